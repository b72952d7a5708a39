"""Retention, and plans over tables in which much has piled up."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import orjson
import pytest
from consumer_world import Desk, Tape, handling_of, notes_consumer

from chassis.clock import MovableClock
from chassis.consumers import ParkedKeysLoop, Refused
from chassis.consumers.batches import Batches
from chassis.consumers.retention import DEAD_LETTER_LIFE, INBOX_LIFE, dead_letter_retention, inbox_retention
from chassis.db import Database
from chassis.runtime import Stop

TOPIC = "pin.test.notes.v1"
Connection = asyncpg.Connection
SEED = """
insert into crm.dead_letter (id, consumer, topic, partition, record_offset, recorded_at, parking_key, value, headers,
  event_id, type, error_class, error_code, error, attempts, first_failed_at, last_failed_at, disposition)
select gen_random_uuid(), $1, 'pin.test.notes.v1', 0, n, now(), ('key ' || n % 1000)::bytea, 'x', '[]',
  gen_random_uuid(), 'test.noted', 'E', '', '', 1, now(), now(), (array['quarantine', 'parked'])[n % 2 + 1]
from generate_series(1, 100000) n;
"""


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a plan's node and all below it."""
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def test_old_marks_and_resolved_letters_go_in_bounded_steps_and_open_ones_stay(
    system: Database, admin: Connection, clock: MovableClock
) -> None:
    desk, tape = Desk(), Tape(TOPIC)

    def refuse() -> None:
        raise Refused("HOLD_MISMATCH", "no")

    desk.moods = {3: refuse, 4: refuse}
    for number in range(6):
        tape.note(f"key {number}", number)
    await Batches(handling_of(system, notes_consumer(TOPIC, desk), clock)).take(tape.records, Stop())
    await admin.execute(
        "update crm.dead_letter set resolved_at = $1, resolution = 'discarded' where record_offset = 3", clock.instant
    )

    async def purge(limit: int) -> tuple[int, int]:
        async with system.write() as session:
            now = await clock.now(session)
            letters = await dead_letter_retention("crm").purge(session, now - DEAD_LETTER_LIFE, limit)
            return letters, await inbox_retention("crm").purge(session, now - INBOX_LIFE, limit)

    assert INBOX_LIFE > DEAD_LETTER_LIFE
    assert await purge(10) == (0, 0)
    clock.advance(INBOX_LIFE + timedelta(seconds=1))
    assert [await purge(2) for _ in range(4)] == [(1, 2), (0, 2), (0, 1), (0, 0)]
    [open_letter] = await admin.fetch("select event_id from crm.dead_letter")
    assert await admin.fetch("select event_id from crm.inbox") == [open_letter]


@pytest.fixture
async def piled_up(system: Database, admin: Connection) -> Any:
    """100,000 dead letters, half of them parked behind 1,000 keys, and 100,000 marks."""
    handling = handling_of(system, notes_consumer(TOPIC, Desk()))
    group = handling.consumer.group
    await admin.execute(SEED.replace("$1", f"'{group}'"))
    await admin.execute(
        "insert into crm.parked_key select distinct consumer, parking_key, now(), 0, now() from crm.dead_letter"
        " where disposition = 'parked'"
    )
    await admin.execute(
        "insert into crm.inbox (consumer, event_id, received_at)"
        " select $1, gen_random_uuid(), now() from generate_series(1, 100000)",
        group,
    )
    await admin.execute("vacuum (analyze) crm.dead_letter, crm.inbox, crm.parked_key")
    return handling


@pytest.mark.parametrize(
    ("name", "most_pages"),
    [("mark", 1500), ("lock", 300), ("due", 60), ("of key", 60), ("requested", 20)],
)
async def test_statements_of_every_batch_read_pages_of_the_batch_only(
    name: str, most_pages: int, piled_up: Any, clock: MovableClock, connect: Callable, scratch: Any
) -> None:
    group, keys = piled_up.consumer.group, [f"key {n}".encode() for n in range(100)]
    ids = [uuid4() for _ in range(100)]
    later = clock.instant + timedelta(days=36500)
    sql, values = {
        "mark": (piled_up.store._sql["mark"], [group, ids, [uuid4()] * 100, clock.instant]),
        "lock": (piled_up.store._sql["lock"], [group, keys]),
        "due": (ParkedKeysLoop(piled_up)._sql["due"], [group, later]),
        "of key": (ParkedKeysLoop(piled_up)._sql["of key"], [group, keys[1]]),
        "requested": (ParkedKeysLoop(piled_up)._sql["requested"], [group]),
    }[name]
    worker = await connect(scratch.system_url)
    for mode in ("force_custom_plan", "force_generic_plan"):
        await worker.execute(f"set plan_cache_mode = {mode}")
        transaction = worker.transaction()
        await transaction.start()
        answer = await worker.fetchval(f"explain (analyze, buffers, format json) {sql}", *values)
        await transaction.rollback()
        plan = orjson.loads(answer)[0]["Plan"]
        scanned = {node["Relation Name"] for node in nodes(plan) if node["Node Type"] == "Seq Scan"}
        assert scanned <= {"parked_key"}  # which holds a thousand rows of a consumer at most
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] <= most_pages, (mode, plan)
