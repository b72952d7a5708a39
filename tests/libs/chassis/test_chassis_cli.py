"""The command line that every service has, shown on crm: verbs, one-line refusals, and the end of a process."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from uuid import uuid4

import asyncpg
import httpx
import orjson
import pytest

import crm
from chassis.cli import ServiceCommand
from chassis.outbox import lane_of
from chassis.testing.plugin import DatabaseTemplates, TestBroker, TestDatabase
from chassis.testing.processes import HOST, free_ports, popen_tied, stop, without_variables
from crm.app import build
from crm.settings import CrmSettings

pytestmark = pytest.mark.messaging

ROOT = Path(__file__).resolve().parents[3]
COMMAND = ServiceCommand(name="crm", settings=CrmSettings, build=build, package_file=crm.__file__, schema="crm")
DUE_STEPS = """
with deal as (
  insert into crm.deal select gen_random_uuid(), gen_random_uuid(), 'a deal', 'Active', 1, now(), now() returning *
)
insert into crm.deal_timeline_event (id, deal_id, tenant_id, type, status, occurred_at, due_at, payload, created_at,
                                     updated_at)
select gen_random_uuid(), deal.id, deal.tenant_id, 'DocumentRequested', 'InProgress', now() - interval '2 d',
       now() - interval '1 d', '{}', now(), now()
from deal, generate_series(1, $1)
"""
Says = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
async def database(databases: DatabaseTemplates) -> AsyncIterator[TestDatabase]:
    """A migrated database of crm."""
    made = await databases.make("crm", ROOT / "services/crm/migrations")
    yield made
    await databases.drop(made)


@pytest.fixture
def environment(database: TestDatabase, broker: TestBroker) -> dict[str, str]:
    """What crm is told."""
    return environment_of(database, broker.running.bootstrap)


def environment_of(database: TestDatabase, bootstrap: str) -> dict[str, str]:
    return {**database.variables(bootstrap), "PIN_HTTP_PORT": "0"}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Says]:
    """Runs a verb in this process; returns exit status, last line of standard output, lines of standard error."""
    root = logging.getLogger()
    level = root.level

    def run(environment: dict[str, str], *arguments: str, **changes: str) -> tuple[int, str, list[str]]:
        for name, value in {**environment, **changes}.items():
            monkeypatch.setenv(name, value)
        code = COMMAND.main(arguments)
        captured = capsys.readouterr()
        return code, (captured.out.splitlines() or [""])[-1], captured.err.splitlines()

    yield run
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def refusal(answer: tuple[int, str, list[str]], status: int) -> str:
    """Check that crm refused with one line on standard error and return it."""
    code, _, lines = answer
    assert (code, len(lines)) == (status, 1), answer
    assert lines[0].startswith("crm: ")
    return lines[0]


def fetchval(database: TestDatabase, statement: str, *arguments: object) -> object:
    async def fetch() -> object:
        connection = await asyncpg.connect(database.admin_url)
        try:
            return await connection.fetchval(statement, *arguments)
        finally:
            await connection.close()

    return asyncio.run(fetch())


# --- refusals


def test_a_port_that_is_taken_is_one_line(environment: dict[str, str], says: Says):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(says(environment, "serve", PIN_HTTP_PORT=str(port)), 1)
    assert f"port {port} is not free" in line
    assert "PIN_HTTP_PORT" in line


def test_a_database_or_role_that_does_not_exist_is_one_line(
    environment: dict[str, str], says: Says, database: TestDatabase
):
    gone = database.system_url + "_gone"
    assert "does not exist" in refusal(says(environment, "job", "timeline-overdue", "--once", PIN_DATABASE_URL=gone), 1)
    gone = database.server.url("nobody_we_know", database.name)
    assert "does not exist" in refusal(says(environment, "migrate", PIN_MIGRATE_DATABASE_URL=gone), 1)


def test_a_database_that_is_away_is_one_line_with_the_address_that_was_used(environment: dict[str, str], says: Says):
    nowhere = "postgresql://owner:hunter2@127.0.0.1:1/pin"
    line = refusal(says(environment, "migrate", PIN_MIGRATE_DATABASE_URL=nowhere), 1)
    assert "127.0.0.1:1/pin" in line
    assert "hunter2" not in line


def test_a_database_that_never_answers_is_one_line(
    environment: dict[str, str], says: Says, monkeypatch: pytest.MonkeyPatch
):
    async def connect(*_: object, **__: object) -> None:
        raise TimeoutError  # what the driver raises after its ten seconds, without a word

    monkeypatch.setattr(asyncpg, "connect", connect)
    assert refusal(says(environment, "audit"), 1).endswith(": TimeoutError")


def test_an_argument_in_another_encoding_is_refused(environment: dict[str, str], says: Says):
    reason = "из-за теста".encode("cp1251").decode(errors="surrogateescape")
    line = refusal(says(environment, "outbox", "discard", "1", "--reason", reason), 2)
    assert "UTF-8" in line


def test_a_broker_that_is_away_is_one_line(environment: dict[str, str], says: Says):
    line = refusal(says(environment, "relay", "--once", PIN_KAFKA_BOOTSTRAP="127.0.0.1:1"), 1)
    assert "Kafka is not available: 127.0.0.1:1" in line


def test_unknown_jobs_and_roles_are_named(environment: dict[str, str], says: Says):
    line = refusal(says(environment, "job", "nonesuch", "--once"), 2)
    assert "no job nonesuch" in line
    assert "timeline-overdue" in line
    assert "unknown roles pets" in refusal(says(environment, "serve", "--roles", "api,pets"), 2)


def test_a_value_that_is_not_json_is_one_line(environment: dict[str, str], says: Says):
    line = refusal(says(environment, "serve", PIN_JWT_ISSUERS="hunter2"), 2)
    assert line == "crm: PIN_JWT_ISSUERS: not readable as JSON"


@pytest.mark.parametrize("arguments", [[], ["fly"], ["job", "timeline-overdue"], ["relay"], ["serve", "--port", "1"]])
def test_what_is_no_verb_is_exit_status_2(says: Says, arguments: list[str]):
    with pytest.raises(SystemExit) as caught:
        says({}, *arguments)
    assert caught.value.code == 2


# --- verbs


def test_migrating_twice_changes_nothing_the_second_time(databases: DatabaseTemplates, says: Says):
    database = asyncio.run(databases.empty("crm"))
    environment = environment_of(database, "127.0.0.1:1")
    for _ in range(2):
        assert says(environment, "migrate")[0] == 0
        assert fetchval(database, "select count(*) from crm.alembic_version") == 1
    assert fetchval(database, "select to_regclass('crm.outbox') is not null")
    asyncio.run(databases.drop(database))


def test_a_job_runs_once_and_the_relay_until_nothing_is_left(
    environment: dict[str, str], says: Says, database: TestDatabase, broker: TestBroker
):
    fetchval(database, DUE_STEPS, 100)
    with broker.reading("pin.crm.timeline-overdue.v1") as reader:
        code, line, _ = says(environment, "job", "timeline-overdue", "--once", PIN_KAFKA_BOOTSTRAP="127.0.0.1:1")
        assert (code, line) == (0, "processed=100 batches=1 skipped_locked=0 failed=0")
        assert fetchval(database, "select count(*) from crm.outbox") == 100
        code, line, _ = says(environment, "relay", "--once")
        assert (code, line) == (0, "published=100")
        reader.until(lambda seen: len(seen) == 100)
    assert fetchval(database, "select count(*) from crm.outbox") == 0


PARKED_ROWS = """
with k as (insert into crm.outbox_parked_key values ('a key', 't', now(), 'larger', null))
insert into crm.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
                        occurred_at, parked_at, attempts)
select gen_random_uuid(), 'Note', 'a key', 'test.noted', 'x', '{}', 't', 'a key', $1, now(), now(), (n = 1)::int
from generate_series(1, 3) as n
"""


@pytest.mark.req("EVT-105")
def test_parked_rows_are_listed_discarded_for_a_reason_and_unparked_and_every_act_is_audited(
    environment: dict[str, str], says: Says, database: TestDatabase
):
    fetchval(database, PARKED_ROWS, lane_of("a key"))
    first = fetchval(database, "select min(id) from crm.outbox")
    code, line, _ = says(environment, "outbox", "parked")
    assert code == 0
    assert f"key=a key first_id={first} topic=t rows=3 attempts=1" in line
    assert "next=operator reason=larger" in line
    assert "reason" in refusal(says(environment, "outbox", "discard", str(first), "--reason", " "), 2)
    assert says(environment, "outbox", "unpark", "a key", "--actor", "ann")[:2] == (0, "unparked=3")
    assert "not parked" in refusal(says(environment, "outbox", "unpark", "a key"), 2)
    fetchval(database, "update crm.outbox set parked_at = now(), attempts = 1")
    assert says(environment, "outbox", "discard", str(first), "--reason", "garbage")[0] == 0
    assert "no parked row" in refusal(says(environment, "outbox", "discard", str(first), "--reason", "garbage"), 2)
    acts = fetchval(database, "select string_agg(action || ' ' || actor, ', ' order by id) from crm.audit_log")
    assert acts == "outbox.unparked cli:ann, outbox.discarded cli"
    assert fetchval(database, "select count(*) from crm.outbox") == 2
    assert says(environment, "outbox", "parked")[1] == "nothing is parked"


# --- a process


async def raw_answer(port: int, request: bytes) -> bytes:
    """Send bytes to a service and return all that it answers before it closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    return answer


async def test_a_service_says_what_it_lacks_and_when_told_to_stop_finishes_its_batch_and_exits_0(
    environment: dict[str, str], database: TestDatabase, connect: Callable, eventually: Callable, tmp_path: Path
):
    rows = await connect(database.admin_url)
    await rows.execute(DUE_STEPS.replace("$1", "1500"))
    [port] = free_ports(1)
    environment |= {"PIN_HTTP_PORT": str(port), "PIN_KAFKA_BOOTSTRAP": "127.0.0.1:1"}
    log = tmp_path / "crm.log"
    async with rows.transaction():
        await rows.execute("lock table crm.audit_log in exclusive mode")
        with log.open("wb") as output:
            command = [sys.executable, "-m", "crm", "serve"]
            process = popen_tied(command, cwd=tmp_path, output=output, env={**without_variables(), **environment})

        async def in_a_batch() -> bool:
            assert process.poll() is None, log.read_text()
            blocked = "select count(*) from pg_locks where not granted and relation = 'crm.audit_log'::regclass"
            return await rows.fetchval(blocked) == 1

        await eventually(in_a_batch, 60)
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=20) as client:
            assert (await client.get("/health/live")).status_code == 200
            answer = await client.get("/health/ready")
            assert answer.status_code == 503
            assert [error["location"] for error in answer.json()["errors"]] == ["kafka"]
            answer = await client.get(f"/v1/deals/{uuid4()}")
            assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
            assert "server" not in answer.headers
        refused = await raw_answer(port, b"FOO /v1/deals HTTP/1.1\r\ncontent-length: abc\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 400 ")
        assert b"content-type: application/problem+json" in refused
        assert orjson.loads(refused.partition(b"\r\n\r\n")[2])["code"] == "malformed_request"
        process.send_signal(signal.SIGTERM)
        await eventually(lambda: b"Shutting down" in log.read_bytes())
    status = await asyncio.to_thread(stop, process, 30, signal.SIGTERM)
    assert status == 0, log.read_text()
    moved = await rows.fetchval("select count(*) from crm.deal_timeline_event where status = 'Overdue'")
    assert moved in (500, 1000)
    assert await rows.fetchval("select count(*) from crm.audit_log") == moved
    assert await rows.fetchval("select count(distinct event_id) from crm.outbox") == moved
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert "cycle completed" in [line["event"] for line in lines]
    assert {line["service"] for line in lines} == {"crm"}
