"""The runbooks' commands work: each statement runs under the role that it is written for, each verb is understood."""

import re
import shlex
from pathlib import Path

import pytest
from crm_world import World

import crm
from chassis.cli import ServiceCommand
from chassis.db import open_connection
from crm.app import build
from crm.settings import CrmSettings

RUNBOOKS = sorted((Path(__file__).resolve().parents[3] / "deploy/runbooks").glob("*.md"))
STATEMENT = re.compile(r'^psql "\$PIN_DATABASE_URL" -c "((?:[^"\\]|\\.)*)"$', re.MULTILINE)
VERB = re.compile(r"^crm ([^#\n]+)|`crm ([^`]+)`", re.MULTILINE)
VALUES = {"<id>": "00000000-0000-0000-0000-000000000007", "<key>": "a key", "<why>": "a test"}
NUMBERS = {"<id>": "7"}
COMMAND = ServiceCommand(name="crm", settings=CrmSettings, build=build, package_file=crm.__file__, schema="crm")


def statements(text: str) -> list[str]:
    """Return what a runbook asks the database, as the shell passes it on."""
    return [re.sub(r"\\(.)", r"\1", found) for found in STATEMENT.findall(text)]


def verbs(text: str) -> list[list[str]]:
    """Return the arguments of each command, with values in the place of what the reader has to fill in."""
    found = []
    for arguments in (shlex.split(one or other) for one, other in VERB.findall(text)):
        values = VALUES | NUMBERS if arguments[0] == "outbox" else VALUES
        found.append([values.get(argument, argument) for argument in arguments])
    return found


def is_understood(arguments: list[str]) -> bool:
    """Tell whether the command line takes the arguments."""
    try:
        COMMAND._parser().parse_args(arguments)
    except SystemExit:
        return False
    return True


async def test_every_statement_of_a_runbook_runs(world: World) -> None:
    connection = await open_connection(world.database.system_url)
    world._closing.append(connection.close)
    asked = [statement for path in RUNBOOKS for statement in statements(path.read_text())]
    assert len(asked) == sum(path.read_text().count('psql "$PIN_DATABASE_URL"') for path in RUNBOOKS) > 10
    for statement in asked:
        await connection.fetch(statement)


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_every_verb_of_a_runbook_is_understood(path: Path) -> None:
    assert [arguments for arguments in verbs(path.read_text()) if not is_understood(arguments)] == []


def test_a_verb_that_lacks_its_act_is_seen() -> None:
    text = "```sh\ncrm dead-letters   # list\n```\n`crm outbox discard <id>`, `crm audit verify`"
    assert [arguments[0] for arguments in verbs(text) if not is_understood(arguments)] == ["dead-letters", "outbox"]
