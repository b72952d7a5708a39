"""The floor of a claim: it never passes an id that somebody can still commit, and it makes dead rows cost nothing."""

import random
from collections.abc import Awaitable, Callable

import orjson
import pytest
from relay_scene import FILL, OUTBOX, Connection, Scene, pending

from chassis.messaging import KafkaAddress, Producer, Publication, Record
from chassis.outbox import Cause, Message, lane_of
from chassis.relay import Floor, Relay
from chassis.testing.plugin import TestDatabase

Note = Callable[..., Message]
Connect = Callable[[str], Awaitable[Connection]]
NOWHERE = KafkaAddress("127.0.0.1:1")
INSERT = """
insert into crm.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
                        occurred_at)
values (gen_random_uuid(), 'Note', $1, 'test.noted', convert_to($2, 'UTF8'), '{}', 't', $1, $3, '2026-11-30')
"""


def _number(record: Record) -> int:
    value = orjson.loads(record.value)
    return value["number"] if isinstance(value, dict) else value


class Recording(Producer):
    """Takes every record and remembers it."""

    sent: list[tuple[str, int]]

    async def connect(self) -> None:
        self.sent = getattr(self, "sent", [])

    async def deliver(self, records: list[Record]) -> Publication:
        self.sent += [(record.key.decode(), _number(record)) for record in records]
        return Publication(set(range(len(records))))


class LastSeen(Floor):
    """The counter-example: what has been seen counts as decided at once."""

    def _decide(self, inserting: frozenset[str]) -> None:
        self._decided = self._seen


def eager(kind: type[Floor] = Floor) -> Floor:
    """A floor that is looked at in every turn, and that no full pass puts right."""
    return kind("crm", look_every=0.0, prove_every=1e9)


def recording(scene: Scene, floor: Floor) -> tuple[Relay, Recording]:
    producer = scene.producer(NOWHERE, Recording)
    return scene.relay(producer, floor=floor), producer


async def insert(connection: Connection, key: str, number: int) -> None:
    await connection.execute(INSERT, key, str(number), lane_of(key))


async def turns(relay: Relay, count: int) -> None:
    for _ in range(count):
        await relay.run_once()


async def two_writers(scene: Scene, url: str, connect: Connect, kind: type[Floor]) -> list[tuple[str, int]]:
    """The lower id commits last, while a relay goes on; return what is sent."""
    relay, producer = recording(scene, eager(kind))
    slow, quick = await connect(url), await connect(url)
    await insert(quick, "k", 0)
    await turns(relay, 4)
    late = slow.transaction()
    await late.start()
    await insert(slow, "k", 1)
    for number in range(2, 6):
        await insert(quick, "k", number)
        await turns(relay, 4)
    await late.commit()
    await turns(relay, 4)
    return producer.sent


@pytest.mark.req("EVT-026", "EVT-031")
async def test_of_two_writers_the_lower_id_commits_last_and_is_sent(
    scene: Scene, scratch: TestDatabase, connect: Connect, admin: Connection
):
    sent = await two_writers(scene, scratch.system_url, connect, Floor)
    assert [number for _, number in sent] == [0, 2, 3, 4, 5, 1]
    assert await pending(admin) == 0


async def test_a_cursor_on_the_last_id_seen_loses_that_row(
    scene: Scene, scratch: TestDatabase, connect: Connect, admin: Connection
):
    sent = await two_writers(scene, scratch.system_url, connect, LastSeen)
    assert [number for _, number in sent] == [0, 2, 3, 4, 5]
    assert await pending(admin) == 1


async def test_an_id_that_was_drawn_before_its_transaction_had_a_number_is_not_passed(
    scene: Scene, scratch: TestDatabase, connect: Connect, admin: Connection
):
    """Between the two default values of a row its transaction is invisible to every snapshot."""
    relay, producer = recording(scene, eager())
    slow, quick = await connect(scratch.admin_url), await connect(scratch.system_url)
    await insert(quick, "k", 0)
    await turns(relay, 4)
    late = slow.transaction()
    await late.start()
    await slow.execute("lock table crm.outbox in row exclusive mode")
    drawn = await slow.fetchval("select nextval(pg_get_serial_sequence('crm.outbox', 'id'))")
    assert await slow.fetchval("select pg_current_xact_id_if_assigned() is null")
    for number in range(2, 6):
        await insert(quick, "k", number)
        await turns(relay, 4)
    with_id = INSERT.replace("(event_id", "(id, event_id").replace(
        "values (", f"overriding system value values ({drawn}, "
    )
    await slow.execute(with_id, "k", "1", lane_of("k"))
    await late.commit()
    await turns(relay, 4)
    assert [number for _, number in producer.sent] == [0, 2, 3, 4, 5, 1]


async def test_the_floor_follows_what_is_sent_and_writers_that_gave_up(
    scene: Scene, scratch: TestDatabase, connect: Connect, admin: Connection
):
    floor = eager()
    relay, _ = recording(scene, floor)
    writer = await connect(scratch.system_url)
    failing = writer.transaction()
    await failing.start()
    await insert(writer, "k", 0)
    await insert(admin, "k", 1)
    await turns(relay, 6)
    assert set(floor.ids) == {1}
    await failing.rollback()
    await insert(admin, "k", 2)
    await turns(relay, 6)
    assert set(floor.ids) == {4}


async def test_a_parked_row_holds_the_floor_of_its_lane_and_is_found_however_it_was_unparked(
    scene: Scene, admin: Connection
):
    floor = eager()
    relay, producer = recording(scene, floor)
    await admin.execute(FILL, "t", "parked", lane_of("parked"), 1, None)
    await admin.execute("update crm.outbox set parked_at = '2026-11-30'")
    for number in range(20):
        await insert(admin, f"key-{number}", number)
        await turns(relay, 2)
    await turns(relay, 4)
    assert floor.ids[lane_of("parked")] == 1
    assert min(at for lane, at in enumerate(floor.ids) if lane != lane_of("parked")) > 15
    await admin.execute("update crm.outbox set parked_at = null")
    await turns(relay, 1)
    assert producer.sent[-1] == ("parked", 1)


async def test_a_full_pass_finds_what_lies_below_the_floor_and_says_so(scene: Scene, admin: Connection):
    floor = Floor("crm", look_every=0.0, prove_every=0.0)
    relay, producer = recording(scene, floor)
    await insert(admin, "k", 1)
    floor.ids = [1_000_000] * 64
    await turns(relay, 1)
    assert producer.sent == [("k", 1)]
    assert scene.registry.get_sample_value("pin_outbox_floor_breaches_total") == 1


@pytest.mark.req("EVT-026", "EVT-031", "EVT-032", "EVT-039")
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_the_interleaving_every_committed_row_is_sent_once_and_in_order_per_key(
    scene: Scene, scratch: TestDatabase, connect: Connect, admin: Connection, seed: int
):
    """Writers that hold their key's lock commit or give up at random moments, between the turns of two relays."""
    chance = random.Random(seed)
    producer = scene.producer(NOWHERE, Recording)
    relays = [scene.relay(producer, floor=eager()) for _ in range(2)]
    writers = [await connect(scratch.system_url) for _ in range(5)]
    running: dict[int, tuple[object, list[tuple[str, int]]]] = {}
    committed: list[tuple[str, int]] = []
    for step in range(250):
        who = chance.randrange(8)
        if who >= 5:
            await chance.choice(relays).run_once()
        elif who not in running:
            transaction = writers[who].transaction()
            await transaction.start()
            running[who] = transaction, []
        elif chance.random() < 0.6:
            await insert(writers[who], f"key-{who}", step)
            running[who][1].append((f"key-{who}", step))
        else:
            transaction, rows = running.pop(who)
            if chance.random() < 0.25:
                await transaction.rollback()
            else:
                await transaction.commit()
                committed += rows
    for transaction, _ in running.values():
        await transaction.rollback()
    assert max(max(relay._floor.ids) for relay in relays) > 10, "the floors have moved meanwhile"
    for relay in relays:
        await turns(relay, 3)
    assert await pending(admin) == 0
    assert sorted(producer.sent) == sorted(committed)
    for key in {key for key, _ in committed}:
        steps = [step for sent_key, step in producer.sent if sent_key == key]
        assert steps == sorted(steps)


async def claim_pages(connection: Connection, relay: Relay, floors: list[int]) -> int:
    plan = await connection.fetchval(
        "explain (analyze, buffers, format json) " + relay._sql["lock"], range(64), floors, 64
    )
    root = orjson.loads(plan)[0]["Plan"]
    return root["Shared Hit Blocks"] + root["Shared Read Blocks"]


async def test_under_a_held_snapshot_a_claim_does_not_walk_what_was_deleted(
    scene: Scene, scratch: TestDatabase, connect: Connect, admin: Connection
):
    floor = eager()
    relay, _ = recording(scene, floor)
    holder = await connect(scratch.system_url)
    held = holder.transaction(isolation="repeatable_read")
    await held.start()
    await holder.fetchval("select count(*) from crm.outbox")
    await admin.execute(FILL, "t", "busy", lane_of("busy"), 20_000, None)
    while await pending(admin):
        await relay.run_once()
    await turns(relay, 3)
    without = await claim_pages(admin, relay, [0] * 64)
    with_floor = await claim_pages(admin, relay, floor.ids)
    assert with_floor < 200
    assert without > 3 * with_floor
    await held.rollback()


async def test_emitted_rows_pass_through_a_relay_with_a_floor(scene: Scene, note: Note, admin: Connection):
    relay, producer = recording(scene, eager())
    for number in range(10):
        async with scene.emitting.write() as session:
            await OUTBOX.emit(session, [note("t", "k", number)], Cause("test"))
        await turns(relay, 2)
    assert len(producer.sent) == 10
    assert await pending(admin) == 0
