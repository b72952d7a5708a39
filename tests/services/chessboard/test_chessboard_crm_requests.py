"""The consumer of CRM's requests on a real database: each is settled under the object's lock, written and answered."""

import asyncio
import random
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest
from board_world import OTHER_TENANT, TENANT, World, scrape
from confluent_kafka import Producer

from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.consumers.parking import ParkedKeysLoop
from chassis.instants import rfc3339
from chassis.messaging import Received
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker
from chessboard.app import Chessboard

HOLD, BOOK, SELL = (
    f"pin.crm.{name}.v1" for name in ("booking-hold-requested", "booking-commit-requested", "deal-completed")
)
RELEASES = tuple(f"pin.crm.{name}.v1" for name in ("booking-expired", "booking-cancelled", "deal-cancelled"))
EXPIRED, CANCELLED, DEAL_CANCELLED = RELEASES
ANSWERED = "pin.chessboard.hold-answered.v1"
CHANGED = "pin.chessboard.property-object-status-changed.v1"
MISMATCH = "CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH"
INSTANTS = {HOLD: "ReservedUntil", BOOK: "BookedUntil", SELL: "SoldAt"}


class Crm:
    """Sends requests as CRM would, with numbers that grow per object."""

    def __init__(self, world: World, board: Chessboard | None = None) -> None:
        self.world = world
        self.board = board or world.board("consumers")
        (self.handling,) = self.board.handlings
        self.batches = Batches(self.handling, (0.0, 0.0, 0.0, 0.0))
        self.numbers: dict[UUID, int] = {}
        self.offset = 0

    def record(
        self,
        topic: str,
        unit: UUID,
        booking: UUID,
        *,
        sequence: int | str | None = None,
        deal: UUID | None = None,
        at: datetime | None = None,
        event_id: UUID | None = None,
        tenant: UUID = TENANT,
        **payload: Any,
    ) -> Received:
        """Return a request; its number is the next one of the object unless it is given ("": none)."""
        if sequence is None:
            sequence = self.numbers[unit] = self.numbers.get(unit, 0) + 1
        body: dict[str, Any] = {
            "BookingId": str(booking),
            "DealId": str(deal or deal_of(booking)),
            "TenantId": str(tenant),
            "PropertyObjectId": str(unit),
        }
        if topic in INSTANTS:
            body[INSTANTS[topic]] = rfc3339(at or self.world.ago(hours=-1))
        else:
            body["Reason"] = "expired"
        headers = {
            "content-type": "application/json",
            "ce_specversion": "1.0",
            "ce_id": str(event_id or uuid4()),
            "ce_source": "/pin/crm",
            "ce_type": topic,
            "ce_time": "2026-11-30T09:00:00Z",
            "ce_subject": str(unit),
            "ce_aggregatetype": "PropertyObject",
            "ce_contractversion": "1",
            "ce_correlationid": "request-1",
            "ce_eventclass": "domain",
            "ce_tenantid": str(tenant),
        } | ({"ce_sequence": str(sequence)} if sequence != "" else {})
        self.offset += 1
        pairs = tuple((name, value.encode()) for name, value in headers.items())
        value = orjson.dumps(body | payload)
        return Received(topic, 0, self.offset, 1_796_000_000_000, str(unit).encode(), value, pairs)

    async def send(self, *records: Received) -> None:
        """Let the consumer take records as one batch."""
        progress = await self.batches.take(records, Stop())
        assert not progress.behind

    async def ask(self, topic: str, unit: UUID, booking: UUID, **details: Any) -> tuple[str, str | None]:
        """Send one request and return what it is answered with."""
        await self.send(self.record(topic, unit, booking, **details))
        answer = (await self.world.events(ANSWERED))[-1]
        assert answer["BookingId"] == str(booking)
        return answer["Outcome"], answer["Reason"]


def deal_of(booking: UUID) -> UUID:
    return UUID(int=booking.int ^ 1)


async def letters(world: World) -> list[tuple[str, str]]:
    rows = await world.admin.fetch("select disposition, error_code from chessboard.dead_letter order by position")
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("release", RELEASES)
async def test_a_booking_goes_through_all_its_requests(world: World, release: str) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    until = world.ago(hours=-3)
    assert await crm.ask(HOLD, unit, booking, at=until) == ("held", None)
    row = await world.object_row(unit)
    assert (row["status"], row["reserved_until"], row["status_source"]) == ("Reserved", until, "Crm")
    assert (row["hold_booking_id"], row["hold_deal_id"]) == (booking, deal_of(booking))
    assert await crm.ask(BOOK, unit, booking, at=until) == ("booked", None)
    assert (await world.object_row(unit))["booked_until"] == until
    assert await crm.ask(release, unit, booking) == ("released", None)
    row = await world.object_row(unit)
    assert (row["status"], row["version"], row["hold_booking_id"]) == ("Free", 4, None)
    assert (await world.ledger(unit))[booking]["released"]
    assert await crm.ask(HOLD, unit, other := uuid4()) == ("held", None)
    assert await crm.ask(BOOK, unit, other) == ("booked", None)
    assert await crm.ask(SELL, unit, other, at=world.now) == ("sold", None)
    row = await world.object_row(unit)
    assert (row["status"], row["sold_at"]) == ("Sold", world.now)
    changes = await world.events(CHANGED)
    assert [one["Version"] for one in changes] == [2, 3, 4, 5, 6, 7]
    assert [one["StatusSource"] for one in changes] == ["Crm"] * 6
    assert [one["Version"] for one in await world.events(ANSWERED)] == [2, 3, 4, 5, 6, 7]
    assert len(await world.history(unit)) == len(await world.audit()) == 6
    assert await letters(world) == []


async def test_all_of_a_batch_is_the_same_as_one_by_one(world: World) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    await crm.send(*(crm.record(topic, unit, booking) for topic in (HOLD, BOOK, CANCELLED)))
    assert [one["Outcome"] for one in await world.events(ANSWERED)] == ["held", "booked", "released"]
    row = await world.object_row(unit)
    assert (row["status"], row["version"]) == ("Free", 4)
    assert [one["version"] for one in await world.history(unit)] == [2, 3, 4]
    [entry] = (await world.ledger(unit)).values()
    assert (entry["last_sequence"], entry["released"]) == (3, True)


async def test_a_redelivered_record_is_absorbed_and_a_repeated_request_answered_again(world: World) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    record = crm.record(HOLD, unit, booking)
    await crm.send(record)
    before = await world.object_row(unit)
    await crm.send(record)
    assert len(await world.events(ANSWERED)) == 1
    assert await crm.ask(HOLD, unit, booking, sequence=1) == ("held", None)
    answers = await world.events(ANSWERED)
    assert len(answers) == 2
    assert answers[0] == answers[1]
    assert await world.object_row(unit) == before
    assert len(await world.events(CHANGED)) == 1


async def test_a_hold_with_a_higher_number_releases_and_reserves_in_one_transaction(world: World) -> None:
    crm, unit, first, second = Crm(world), await world.property_object(), uuid4(), uuid4()
    await crm.ask(HOLD, unit, first)
    late = crm.record(EXPIRED, unit, first)
    assert await crm.ask(HOLD, unit, second) == ("held", None)
    row = await world.object_row(unit)
    assert (row["status"], row["hold_booking_id"], row["version"]) == ("Reserved", second, 4)
    changes = [(one["FromStatus"], one["ToStatus"], one["Version"]) for one in await world.events(CHANGED)]
    assert changes == [("Free", "Reserved", 2), ("Reserved", "Free", 3), ("Free", "Reserved", 4)]
    transactions = {row["tx"] for row in await world.outbox() if row["headers"].get("ce_sequence") in ("3", "4")}
    assert len(transactions) == 1
    await crm.send(late)
    assert (await world.events(ANSWERED))[-1]["Outcome"] == "released"
    assert await world.object_row(unit) == row
    assert await letters(world) == []


@pytest.mark.req("HLD-86")
async def test_a_release_by_another_booking_is_refused_answered_and_parks_nothing(world: World) -> None:
    crm, unit, mine, strange = Crm(world), await world.property_object(), uuid4(), uuid4()
    other = await world.property_object()
    await crm.ask(HOLD, unit, mine)
    record = crm.record(CANCELLED, unit, strange)
    await crm.send(record, crm.record(HOLD, other, mine), crm.record(BOOK, unit, mine))
    assert await letters(world) == [("refused", MISMATCH)]
    answers = {(one["BookingId"], one["Sequence"]): one for one in await world.events(ANSWERED)}
    refused = answers[str(strange), 2]
    assert (refused["Outcome"], refused["Reason"], refused["Version"]) == ("rejected", "hold_mismatch", 2)
    assert (await world.object_row(unit))["status"] == "Booked", "the key flows"
    assert (await world.object_row(other))["status"] == "Reserved"
    assert (await world.ledger(unit))[strange]["released"], "its hold comes too late"
    await crm.send(record)
    assert len(await world.events(ANSWERED)) == 4, "once more, and it is absorbed"


async def test_a_mismatch_that_waited_behind_a_parked_record_is_answered_too(world: World) -> None:
    crm, unit, mine, strange = Crm(world), await world.property_object(), uuid4(), uuid4()
    await crm.ask(HOLD, unit, mine)
    await world.admin.execute(
        "insert into chessboard.parked_key (consumer, parking_key, parked_at, attempts, next_attempt_at)"
        " values ($1, $2, $3, 0, $3)",
        crm.handling.consumer.group,
        str(unit).encode(),
        world.now,
    )
    await crm.send(crm.record(CANCELLED, unit, strange))
    assert await letters(world) == [("parked", "")]
    loop = ParkedKeysLoop(crm.handling)
    while await loop.drain_one():
        pass
    assert await letters(world) == [("refused", MISMATCH)]
    assert (await world.events(ANSWERED))[-1]["Reason"] == "hold_mismatch"
    assert not await world.admin.fetchval("select count(*) from chessboard.parked_key")


@pytest.mark.req("HLD-85", "HLD-96")
async def test_a_late_release_of_a_free_object_is_nothing_to_do(world: World) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    await crm.ask(HOLD, unit, booking)
    await world.admin.execute(
        "update chessboard.property_object set status = 'Free', status_source = 'ExpirationJob', version = 3,"
        " reserved_until = null, hold_deal_id = null, hold_booking_id = null where id = $1",
        unit,
    )
    before = await world.object_row(unit)
    assert await crm.ask(EXPIRED, unit, booking) == ("released", None)
    assert await world.object_row(unit) == before
    assert await letters(world) == []
    assert len(await world.events(CHANGED)) == 1
    assert (await scrape(crm.board))['chessboard_crm_requests_total{ask="release",result="nothing-to-do"}'] == 1


async def test_an_object_that_is_not_there_or_another_tenants_is_rejected(world: World) -> None:
    crm, strange = Crm(world), await world.property_object(tenant=OTHER_TENANT)
    before = await world.object_row(strange)
    for unit in (uuid4(), strange):
        assert await crm.ask(HOLD, unit, uuid4()) == ("rejected", "unknown_object")
        assert (await world.events(ANSWERED))[-1]["Version"] == 0
    assert await world.object_row(strange) == before
    assert await world.ledger(strange) == {}


@pytest.mark.parametrize(("status", "reason"), [("Sold", "sold"), ("Hidden", "hidden")])
async def test_what_is_sold_or_hidden_is_not_given_away(world: World, status: str, reason: str) -> None:
    crm, unit = Crm(world), await world.property_object(status=status)
    for topic in (HOLD, BOOK, SELL):
        assert await crm.ask(topic, unit, uuid4()) == ("rejected", reason)
    assert (await world.object_row(unit))["version"] == 1


@pytest.mark.parametrize("sequence", ["", "0", str(2**63)])
async def test_a_request_without_a_number_that_can_be_kept_is_set_aside(world: World, sequence: str) -> None:
    crm, unit = Crm(world), await world.property_object()
    await crm.send(crm.record(HOLD, unit, uuid4(), sequence=sequence))
    [(disposition, _)] = await letters(world)
    assert disposition in ("refused", "quarantine")
    assert (await world.object_row(unit))["status"] == "Free"


@pytest.mark.parametrize(
    "payload",
    [
        {"ReservedUntil": "2026-12-01T10:00:00"},
        {"ReservedUntil": "9999-12-31T23:59:59Z"},
        {"ReservedUntil": None},
        {"BookingId": "seven"},
        {"DealId": None},
    ],
)
async def test_a_payload_in_breach_of_its_contract_is_quarantined(world: World, payload: dict[str, Any]) -> None:
    crm, unit = Crm(world), await world.property_object()
    await crm.send(crm.record(HOLD, unit, uuid4(), **payload))
    assert await letters(world) == [("quarantine", "schema_breached")]


@pytest.mark.req("HLD-60")
async def test_the_consumer_locks_the_rows_that_it_changes_and_waits_for_them(world: World, eventually: Any) -> None:
    crm, unit, booking = Crm(world), await world.property_object(), uuid4()
    async with world.admin.transaction():
        await world.admin.execute("select from chessboard.property_object where id = $1 for update", unit)
        asking = asyncio.create_task(crm.ask(HOLD, unit, booking))
        await eventually(world.blocked_pid)
        await world.admin.execute("update chessboard.property_object set version = 9 where id = $1", unit)
    assert await asking == ("held", None)
    assert (await world.object_row(unit))["version"] == 10


async def test_members_whose_batches_share_objects_in_any_order_never_deadlock(world: World) -> None:
    members = [Crm(world) for _ in range(4)]
    building = await world.building(await world.project())
    units = [await world.property_object(building) for _ in range(12)]
    chance = random.Random(7)

    async def send(member: Crm, number: int) -> None:
        for turn in range(6):
            mine = chance.sample(units, len(units))
            sequence = 1 + turn * len(members) + number
            await member.send(*(member.record(HOLD, unit, uuid4(), sequence=sequence) for unit in mine))

    await asyncio.gather(*(send(member, number) for number, member in enumerate(members)))
    assert len(await world.events(ANSWERED)) == 4 * 6 * 12
    rows = [await world.object_row(unit) for unit in units]
    assert {row["status"] for row in rows} == {"Reserved"}
    assert sum(row["version"] - 1 for row in rows) == len(await world.events(CHANGED))
    assert await letters(world) == []
    for member in members:
        found = await scrape(member.board)
        group = member.handling.consumer.group
        assert not [
            name for name in found if name.startswith(f'pin_consumer_batches_total{{consumer="{group}",mode="one')
        ]


@pytest.mark.messaging
@pytest.mark.req("HLD-98")
async def test_a_request_that_comes_over_the_broker_is_answered_over_it(connected: World, broker: TestBroker) -> None:
    """The normal path: request, consumer, answer and change, with no job at work."""
    world, unit, booking = connected, await connected.property_object(), uuid4()
    board = world.board("consumers", "relay")
    record = Crm(world, board).record(HOLD, unit, booking)
    release = Crm(world, board).record(EXPIRED, unit, booking, sequence=2)
    async with board.app.router.lifespan_context(board.app):
        producer = Producer({"bootstrap.servers": world.bootstrap, "partitioner": "murmur2_random"})
        for one, outcome in ((record, "held"), (release, "released")):
            producer.produce(one.topic, key=one.key, value=one.value, headers=list(one.headers))
            assert await asyncio.to_thread(producer.flush, 20) == 0
            answer = await asyncio.to_thread(
                broker.expect,
                ANSWERED,
                ANSWERED,
                lambda event, outcome=outcome: event.key == str(unit) and event.payload["Outcome"] == outcome,
                60,
            )
            assert answer.payload["BookingId"] == str(booking)
    row = await world.object_row(unit)
    assert (row["status"], row["status_source"], row["version"]) == ("Free", "Crm", 3)


@pytest.mark.parametrize("seed", range(3))
async def test_fifty_holds_on_one_object_at_the_same_time_have_one_winner_and_all_are_answered(
    world: World, seed: int
) -> None:
    """As CRM's guard would never send them: one number each, in any order, over many members and batches."""
    members = [Crm(world) for _ in range(5)]
    unit, bookings = await world.property_object(), [uuid4() for _ in range(50)]
    numbers = [1] * 50 if seed == 0 else random.Random(seed).sample(range(1, 51), 50)

    async def send(member: Crm, mine: Sequence[tuple[UUID, int]]) -> None:
        for booking, number in mine:
            await member.send(member.record(HOLD, unit, booking, sequence=number))

    todo = list(zip(bookings, numbers, strict=True))
    await asyncio.gather(*(send(member, todo[first::5]) for first, member in enumerate(members)))
    answers = await world.events(ANSWERED)
    assert {one["BookingId"] for one in answers} == {str(booking) for booking in bookings}
    assert len(answers) == 50
    row = await world.object_row(unit)
    assert row["status"] == "Reserved"
    assert row["version"] == 1 + len(await world.events(CHANGED))
    assert [one["Version"] for one in await world.events(CHANGED)] == list(range(2, row["version"] + 1))
    if seed:
        assert row["hold_booking_id"] == bookings[numbers.index(50)], "the newest number"
    else:
        assert sorted(one["Outcome"] for one in answers) == ["held"] + ["rejected"] * 49
    assert await letters(world) == []
    handling: Handling = members[0].handling
    assert handling.consumer.group == "pin.chessboard.crm-property-object-status"
