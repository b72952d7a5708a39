"""crm refuses impossible settings with one clear line, before it opens anything."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import orjson
import pytest
from crm_world import World, trusted_issuer

import crm.__main__ as command_line
from crm.settings import CrmSettings

BATCH_SIZE = "PIN_JOB_TIMELINE_OVERDUE_BATCH_SIZE"
MAX_BATCHES = "PIN_JOB_TIMELINE_OVERDUE_MAX_BATCHES"
INTERVAL = "PIN_JOB_TIMELINE_OVERDUE_INTERVAL"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Stands where the database and the broker would be, and notices who calls."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture
def environment(listener: socket.socket) -> dict[str, str]:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    url = f"postgresql://crm_system@{address}/pin"
    return {
        "PIN_ENV": "development",
        "PIN_DATABASE_URL": url,
        "PIN_API_DATABASE_URL": url,
        "PIN_MIGRATE_DATABASE_URL": url,
        "PIN_KAFKA_BOOTSTRAP": address,
        "PIN_KAFKA_SECURITY": "plaintext",
        "PIN_HTTP_PORT": "0",
    }


def refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a cycle of the job from the command line, in this process, and return the exit status."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["crm", "job", "timeline-overdue", "--once"])
    return command_line.main()


def nobody_called(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return True
    return False


@pytest.mark.req("TLO-25", "TLO-26")
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (BATCH_SIZE, "0", "BatchSize must be a whole number from 1 to 1000, not 0"),
        (BATCH_SIZE, "1001", "BatchSize must be a whole number from 1 to 1000, not 1001"),
        (BATCH_SIZE, "-5", "BatchSize must be a whole number from 1 to 1000, not -5"),
        (BATCH_SIZE, "2.5", "valid integer"),
        (BATCH_SIZE, "many", "valid integer"),
        (MAX_BATCHES, "0", "MaxBatchesPerCycle must be a whole number from 1 to 200, not 0"),
        (MAX_BATCHES, "201", "MaxBatchesPerCycle must be a whole number from 1 to 200, not 201"),
        (INTERVAL, "0", "greater than 0"),
        (INTERVAL, "inf", "less than or equal to 86400"),
    ],
)
def test_limit_outside_its_range_is_one_clear_line_and_nothing_is_read(
    environment: dict[str, str],
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    says: str,
) -> None:
    assert refused(environment | {variable: value}, monkeypatch) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"crm: {variable}: ")
    assert says in line
    assert nobody_called(listener)


def test_each_impossible_variable_has_its_line(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(environment | {BATCH_SIZE: "0", MAX_BATCHES: "0"}, monkeypatch) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in lines] == [BATCH_SIZE, MAX_BATCHES]


@pytest.mark.req("TLO-25")
def test_service_does_not_start_with_an_impossible_batch_size(
    environment: dict[str, str], listener: socket.socket
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "crm", "serve"],
        env={**os.environ, **environment, BATCH_SIZE: "1001"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"crm: {BATCH_SIZE}: BatchSize must be a whole number from 1 to 1000, not 1001\n"
    assert nobody_called(listener)


@pytest.mark.req("TLO-25", "TLO-26")
@pytest.mark.parametrize(("size", "batches"), [(1, 1), (1000, 200)])
async def test_limits_at_the_ends_of_their_range_run(world: World, size: int, batches: int) -> None:
    await world.due_steps(2)
    counts = await world.run_job(batch_size=size, max_batches=batches)
    assert counts["processed"] == min(2, size * batches)


@pytest.mark.req("TLO-58d")
async def test_defaults_are_those_of_the_source(world: World) -> None:
    fields = CrmSettings.model_fields
    assert fields["job_timeline_overdue_interval"].default == 300
    assert fields["job_timeline_overdue_single_runner"].default is False
    assert 1 <= fields["job_timeline_overdue_batch_size"].default <= 1000
    assert 1 <= fields["job_timeline_overdue_max_batches"].default <= 200
    assert world.settings().http_port == 8101


async def test_one_cycle_can_be_run_by_hand(world: World) -> None:
    steps = await world.due_steps(3)
    await world.admin.execute("update crm.deal_timeline_event set due_at = clock_timestamp() - interval '1 hour'")
    settings = {
        "PIN_ENV": "development",
        "PIN_DATABASE_URL": world.database.system_url,
        "PIN_API_DATABASE_URL": world.database.api_url,
        "PIN_MIGRATE_DATABASE_URL": world.database.owner_url,
        "PIN_KAFKA_BOOTSTRAP": world.bootstrap,
        "PIN_KAFKA_SECURITY": "plaintext",
        "PIN_JWT_ISSUERS": orjson.dumps([trusted_issuer()]).decode(),
        BATCH_SIZE: "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "crm", "job", "timeline-overdue", "--once"],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "processed=3 batches=2 skipped_locked=0 failed=0"
    assert await world.steps_in("Overdue") == set(steps)
