"""Processes are killed with SIGKILL at random moments; nothing may be lost, and a repeated event keeps its id.

Seeded: a failing run prints its seed. Set CHAOS_SEED to repeat it and CHAOS_KILLS to make it longer.
"""

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import asyncpg
import pytest

from chassis.testing.kafka import Event
from chassis.testing.plugin import DatabaseTemplates, TestBroker, TestDatabase
from chassis.testing.processes import free_ports, popen_tied, stop, without_variables
from tests.bench.overdue import seed_steps

TOPIC = "pin.crm.timeline-overdue.v1"
DUE_THOUSANDS = 20
KILLS = int(os.environ.get("CHAOS_KILLS", "4"))
pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("chaos")]


class Victims:
    """Two crm processes with one role; one of them is killed whenever the work has come to a random point."""

    def __init__(self, database: TestDatabase, bootstrap: str, folder: Path, role: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.killed = 0
        self._role = role
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **without_variables(),
            **database.variables(bootstrap),
            "PIN_JOB_TIMELINE_OVERDUE_BATCH_SIZE": "40",
            "PIN_JOB_TIMELINE_OVERDUE_MAX_BATCHES": "200",
            "PIN_JOB_TIMELINE_OVERDUE_INTERVAL": "0.5",
        }

    def __enter__(self) -> Self:
        self._start()
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            stop(process, seconds=30)

    async def work_until_done(self, left: Callable[[], Awaitable[int]], kills: int) -> None:
        """Let them work until `left()` is 0, killing one at `kills` random points on the way."""
        total = await left()
        points = sorted((self.random.uniform(0.05, 0.95) * total for _ in range(kills)), reverse=True)
        deadline = time.monotonic() + 120
        while (rest := await left()) > 0:
            assert time.monotonic() < deadline, f"{rest} of {total} are left"
            if points and rest <= points[0]:
                points = [point for point in points if point < rest]
                self._replace()

    def _replace(self) -> None:
        victim = self._running.pop(self.random.randrange(2))
        victim.kill()
        victim.wait()
        self.killed += 1
        self._start()

    def _start(self) -> None:
        environment = {**self._environment, "PIN_HTTP_PORT": str(free_ports(1)[0])}
        command = [sys.executable, "-m", "crm", "serve", "--roles", self._role]
        with (self._folder / f"{self._role}.log").open("ab") as output:
            self._running.append(popen_tied(command, cwd=Path.cwd(), output=output, env=environment))


async def _prepared(databases: DatabaseTemplates, root: Path) -> TestDatabase:
    database = await databases.make("crm", root / "services/crm/migrations")
    admin = await asyncpg.connect(database.admin_url)
    await seed_steps(admin, due=DUE_THOUSANDS, future=0)
    await admin.close()
    return database


@pytest.mark.messaging
@pytest.mark.req("TLO-14", "TLO-12", "TLO-32", "TLO-43", "TLO-53")
async def test_no_step_is_lost_or_announced_under_two_ids_when_jobs_and_relays_are_killed(
    databases: DatabaseTemplates, broker: TestBroker, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or time.time_ns() % 100_000)
    print(f"CHAOS_SEED={seed}")
    database = await _prepared(databases, pytestconfig.rootpath)
    admin = await asyncpg.connect(database.admin_url)
    bootstrap = broker.address.bootstrap

    async def steps_left() -> int:
        return await admin.fetchval("select count(*) from crm.deal_timeline_event where status = 'InProgress'")

    async def rows_left() -> int:
        return await admin.fetchval("select count(*) from crm.outbox")

    with Victims(database, bootstrap, tmp_path, "jobs", seed) as jobs:
        await jobs.work_until_done(steps_left, KILLS)
    moved = {str(row["id"]) for row in await admin.fetch("select id from crm.deal_timeline_event")}
    announced = await admin.fetch(
        "select convert_from(payload, 'utf8')::jsonb ->> 'TimelineEventId' as step, event_id from crm.outbox"
        " where topic = $1",
        TOPIC,
    )
    audited = await admin.fetch("select entity_id::text as step from crm.audit_log")
    assert len(moved) == DUE_THOUSANDS * 1000
    assert sorted(row["step"] for row in announced) == sorted(moved), "exactly one outbox row per moved step"
    assert sorted(row["step"] for row in audited) == sorted(moved), "exactly one audit row per moved step"

    with broker.reading(TOPIC) as reader, Victims(database, bootstrap, tmp_path, "relay", seed) as relays:
        await relays.work_until_done(rows_left, KILLS)

        def all_arrived(events: list[Event]) -> bool:
            return moved <= {event.payload["TimelineEventId"] for event in events}

        events = [event for event in reader.until(all_arrived, 60) if event.payload["TimelineEventId"] in moved]
    seen: dict[str, set[str]] = defaultdict(set)
    for event in events:
        seen[event.payload["TimelineEventId"]].add(event.id)
    assert seen == {row["step"]: {str(row["event_id"])} for row in announced}, "a repeated event keeps its id"
    print(
        f"{jobs.killed} job processes and {relays.killed} relays killed; {len(moved)} steps,"
        f" {len(events)} records, {len(events) - len(moved)} repeated with the same id"
    )
    await admin.close()
