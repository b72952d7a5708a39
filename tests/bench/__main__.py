"""`make bench`: measures, prints a table, writes .pin/bench.json; every figure is a ratio within one run.

Exit status 1 if a bar is not met. `python -m tests.bench overdue relay held requests latency calendar memory` runs
a part; HELD_SECONDS=120 holds the snapshot for as long as the official run does.
"""

import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chassis.contracts import ensure_topics
from chassis.db import Database
from chassis.messaging import KafkaAddress
from chassis.relay import Wakeup
from chassis.testing.kafka import RunningBroker, cache_folder
from chassis.testing.plugin import DatabaseTemplates, TestDatabase
from chassis.testing.processes import CannotStart
from chassis.testing.servers import EmbeddedPostgres
from tests.bench import calendar, consuming, expiring, grid, held_snapshot, memory, messaging, overdue, requests
from tests.bench.report import Figure

ROOT = Path(__file__).resolve().parents[2]
MIGRATIONS = ROOT / "services/crm/migrations"
SERVER = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}


@dataclass
class Bench:
    """The servers of a run."""

    templates: DatabaseTemplates
    broker: RunningBroker

    @property
    def address(self) -> KafkaAddress:
        """Where Kafka is."""
        return KafkaAddress(self.broker.bootstrap)

    async def database(self) -> TestDatabase:
        """Return a fresh, migrated database of crm."""
        return await self.templates.make("crm", MIGRATIONS)


def opened(database: TestDatabase, on_commit: Callable[[], None] | None = None) -> Database:
    """Return sessions on a database under the system role."""
    return Database(database.system_url, application_name="bench", on_commit=on_commit)


async def measure_overdue(bench: Bench) -> list[Figure]:
    """Measure timeline-overdue."""
    database = await bench.database()
    sessions = opened(database)
    figures = await overdue.against_one_statement(sessions, database.system_url, database.admin_url)
    await sessions.close()
    return figures


async def measure_scale(bench: Bench) -> list[Figure]:
    """Measure timeline-overdue over small and large tables."""
    small, large = await bench.database(), await bench.database()
    small_sessions, large_sessions = opened(small), opened(large)
    figures = await overdue.at_scale(small_sessions, large_sessions, small.admin_url, large.admin_url)
    await small_sessions.close()
    await large_sessions.close()
    return figures


async def measure_relay(bench: Bench) -> list[Figure]:
    """Measure the relay's throughput."""
    database = await bench.database()
    sessions = opened(database)
    figures = await messaging.throughput(sessions, database.admin_url, bench.address)
    await sessions.close()
    return figures


async def measure_held(bench: Bench) -> list[Figure]:
    """Measure the relay under a held snapshot, and its claim behind parked rows."""
    database, other = await bench.database(), await bench.database()
    sessions, other_sessions = opened(database), opened(other)
    figures = await held_snapshot.held_snapshot(sessions, other_sessions, database.admin_url, bench.address)
    figures += await held_snapshot.behind_parked_rows(other_sessions, other.admin_url)
    await sessions.close()
    await other_sessions.close()
    return figures


async def measure_consuming(bench: Bench) -> list[Figure]:
    """Measure a consumer's batches."""
    database = await bench.database()
    sessions = opened(database)
    figures = await consuming.whole_against_single(sessions, database.admin_url)
    await sessions.close()
    return figures


async def measure_requests(bench: Bench) -> list[Figure]:
    """Measure chessboard's consumer of CRM's requests."""
    database = await bench.templates.make("chessboard", ROOT / "services/chessboard/migrations")
    sessions = opened(database)
    figures = await requests.consumer_path(sessions, database.system_url, database.admin_url)
    await sessions.close()
    return figures


async def measure_expiring(bench: Bench) -> list[Figure]:
    """Measure chessboard's safety net."""
    database = await bench.templates.make("chessboard", ROOT / "services/chessboard/migrations")
    sessions = opened(database)
    figures = await expiring.against_one_statement(sessions, database.system_url, database.admin_url)
    await sessions.close()
    return figures


async def measure_latency(bench: Bench) -> list[Figure]:
    """Measure the time from commit to consumer."""
    database = await bench.database()
    wakeup = Wakeup()
    sessions = opened(database, wakeup.set)
    figures = await messaging.latency(sessions, bench.address, wakeup)
    await sessions.close()
    return figures


async def measure_grid(bench: Bench) -> list[Figure]:
    """Measure chessboard's grid."""
    return await grid.against_bare_sql(
        await bench.templates.make("chessboard", ROOT / "services/chessboard/migrations")
    )


async def measure_calendar(_: Bench) -> list[Figure]:
    """Measure the calendar."""
    return calendar.against_astimezone()


async def measure_memory(bench: Bench) -> list[Figure]:
    """Measure an idle crm process."""
    return await memory.idle_crm(await bench.database(), bench.broker.bootstrap)


PARTS: dict[str, Callable[[Bench], Awaitable[list[Figure]]]] = {
    "overdue": measure_overdue,
    "scale": measure_scale,
    "relay": measure_relay,
    "held": measure_held,
    "consuming": measure_consuming,
    "requests": measure_requests,
    "expiring": measure_expiring,
    "latency": measure_latency,
    "grid": measure_grid,
    "calendar": measure_calendar,
    "memory": measure_memory,
}


def start_broker(home: Path) -> RunningBroker:
    """Start what PIN_KAFKA names, else Apache Kafka where it can be had, else the embedded broker."""
    if os.environ.get("PIN_KAFKA"):
        return RunningBroker.start(home, cache_folder(ROOT))
    try:
        return RunningBroker.start(home, cache_folder(ROOT), choice="apache")
    except CannotStart as error:
        print(error)
        return RunningBroker.start(home / "embedded", cache_folder(ROOT))


async def measure(names: list[str], bench: Bench, console: Console) -> list[Figure]:
    """Run the named parts."""
    await ensure_topics(ROOT / "contracts", bench.address, replicas=1)
    figures = []
    for name in names:
        with console.status(f"measuring {name}"):
            figures += await PARTS[name](bench)
    return figures


def main() -> int:
    """Measure, print, write the report."""
    names = sys.argv[1:] or list(PARTS)
    console = Console(width=None if sys.stdout.isatty() else 150)
    if unknown := set(names) - set(PARTS):
        console.print(f"bench: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="pin-bench-") as folder:
        home = Path(folder)
        home.chmod(0o755)
        postgres = EmbeddedPostgres.start(home / "postgres", settings=SERVER)
        broker = start_broker(home / "kafka")
        templates = DatabaseTemplates(postgres, (ROOT / "deploy/postgres/roles.sql").read_text())
        try:
            figures = asyncio.run(measure(names, Bench(templates, broker), console))
        finally:
            broker.stop()
            postgres.stop()
    report(figures, broker.kind, console)
    return 0 if all(figure.met for figure in figures) else 1


def report(figures: list[Figure], broker: str, console: Console) -> None:
    """Print the table and write the JSON report."""
    table = Table(title=f"Ratios within this run (Kafka: {broker}, {os.cpu_count()} cores)")
    for column in ("figure", "ratio", "bar", "", "behind it"):
        table.add_column(column, overflow="fold")
    for figure in figures:
        table.add_row(*figure.row())
    console.print(table)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    document = {
        "at": datetime.now(UTC).isoformat(),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "kafka": broker,
        "cores": os.cpu_count(),
        "figures": [figure.record() for figure in figures],
    }
    path = ROOT / ".pin" / "bench.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1))
    console.print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
