"""The verb `audit`: the head to be remembered, whether the chain is whole, and its first broken link."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
from prometheus_client import CollectorRegistry

import crm
from chassis.audit import AuditSealer
from chassis.cli import ServiceCommand
from chassis.clock import MovableClock
from chassis.db import Database, open_connection
from chassis.testing.plugin import DatabaseTemplates, TestDatabase
from crm.app import build
from crm.settings import CrmSettings

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ServiceCommand(name="crm", settings=CrmSettings, build=build, package_file=crm.__file__, schema="crm")
INSERT = """
insert into crm.audit_log (occurred_at, actor, action, entity_type, entity_id, correlation_id, details)
select '2026-11-30 09:00+00', 'user-1', 'deal.opened', 'deal', gen_random_uuid(), 'req', '{}' from generate_series(1, 5)
"""
Verb = Callable[..., tuple[int, str, str]]


@pytest.fixture
async def database(databases: DatabaseTemplates, clock: MovableClock) -> AsyncIterator[TestDatabase]:
    """A migrated database with five sealed rows, written by the API's role and sealed by the system's."""
    made = await databases.make("crm", ROOT / "services/crm/migrations")
    api = await open_connection(made.api_url)
    await api.execute(INSERT)
    await api.close()
    system = Database(made.system_url, application_name="test")
    sealer = AuditSealer(system, clock, schema="crm", registry=CollectorRegistry(), event=None)
    assert await sealer.run_once() == 5
    await system.close()
    yield made
    await databases.drop(made)


@pytest.fixture
def verb(database: TestDatabase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Verb]:
    """Runs a verb in a thread; returns status, output, error."""
    root, level = logging.getLogger(), logging.getLogger().level
    handlers = root.handlers[:]
    for name, value in database.variables("127.0.0.1:1").items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = COMMAND.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out.strip(), captured.err.strip()

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


async def test_head_is_printed_remembered_and_checked(verb: Verb, database: TestDatabase) -> None:
    code, head, _ = await asyncio.to_thread(verb, "audit")
    assert (code, head.partition(":")[0], len(head.partition(":")[2])) == (0, "5", 64)
    assert await asyncio.to_thread(verb, "audit", "verify", "--head", head) == (0, f"whole up to {head}", "")
    admin = await asyncpg.connect(database.admin_url)
    await admin.execute("delete from crm.audit_seal where sequence > 3; delete from crm.audit_log where id > 3")
    await admin.close()
    assert (await asyncio.to_thread(verb, "audit", "verify"))[0] == 0
    code, _, error = await asyncio.to_thread(verb, "audit", "verify", "--head", head)
    assert (code, error) == (1, "crm: audit broken at link 4: the chain ends before the remembered head 5")


async def test_a_tampered_row_is_named_with_exit_status_1(verb: Verb, database: TestDatabase) -> None:
    admin = await asyncpg.connect(database.admin_url)
    await admin.execute("update crm.audit_log set actor = 'somebody' where id = 3")
    await admin.close()
    assert await asyncio.to_thread(verb, "audit", "verify") == (
        1, "", "crm: audit broken at link 3, audit row 3: the row was changed",
    )  # fmt: skip


async def test_what_is_no_head_is_not_understood(verb: Verb) -> None:
    with pytest.raises(SystemExit, match="2"):
        await asyncio.to_thread(verb, "audit", "verify", "--head", "5:zz")


@pytest.mark.req("EVT-138b")
@pytest.mark.parametrize("role", ["owner", "api", "system"])
@pytest.mark.parametrize(
    "statement",
    [
        "update crm.audit_seal set hash = previous_hash",
        "delete from crm.audit_seal",
        "truncate crm.audit_seal",
        "update crm.audit_log set xid = '1'::xid8",
    ],
)
async def test_no_role_of_the_service_changes_a_seal(database: TestDatabase, role: str, statement: str) -> None:
    connection = await open_connection(getattr(database, f"{role}_url"))
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize("role", ["api", "system"])
async def test_no_role_of_the_service_chooses_a_rows_place_in_the_order(database: TestDatabase, role: str) -> None:
    connection = await open_connection(getattr(database, f"{role}_url"))
    chosen = INSERT.replace("details)", "details, xid)").replace("'{}'", "'{}', '1'::xid8")
    try:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(chosen)
    finally:
        await connection.close()
