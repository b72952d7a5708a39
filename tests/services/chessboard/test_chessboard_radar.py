"""The lost-release radar: each warning and its metric say why the release was lost, as far as can be told."""

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from board_world import World, scrape
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from net_pieces import GRACE, PREFIX, counted, cycle, everything, lost, lost_in_order, net
from structlog.testing import capture_logs

from chassis.consumers.envelope import Envelope
from chassis.consumers.faults import Fault
from chassis.consumers.store import Letter, Store
from chassis.messaging import KafkaAddress, Place, Received, partition_of, read_overdue
from chassis.testing.plugin import TestBroker
from chessboard.consumers import CRM_PROPERTY_OBJECT_STATUS
from chessboard.domain import NOTHING_KNOWN, Evidence, LostBecause, why_lost

EXPIRED = "pin.crm.booking-expired.v1"
GROUP = CRM_PROPERTY_OBJECT_STATUS


async def causes(world: World, **overrides: Any) -> dict[str, str]:
    """Run a cycle; return the cause of each warning by object, which the metric has to agree with."""
    board = net(world, **overrides)
    with capture_logs() as logs:
        await cycle(board)
    found = {line["PropertyObjectId"]: line["cause"] for line in logs if line["event"] == "lost CRM release"}
    samples = await scrape(board)
    for cause in LostBecause:
        said = list(found.values()).count(cause.value)
        assert samples[f'{PREFIX}_lost_releases_total{{cause="{cause.value}"}}'] == said
    return found


async def set_aside(world: World, unit: UUID, disposition: str = "refused") -> None:
    """Put a release of an object among the dead letters, or park its key behind it."""
    record = Received(EXPIRED, 3, 7, 1_764_493_200_123, str(unit).encode(), b"{}", (("ce_type", b"x"),))
    envelope = Envelope(uuid4(), EXPIRED, "1", world.now, str(unit), None, uuid4(), "request-1")
    letter = Letter(record, envelope, EXPIRED, Fault("Refused", "x", "y"), disposition, 5, world.now, world.now)
    async with world.system().write() as session:
        store = Store("chessboard", GROUP)
        if disposition == "exhausted":
            await store.park(session, letter, world.now + timedelta(hours=1))
        else:
            await store.set_aside(session, letter)


async def freed_by(world: World, source: str, **ago: float) -> None:
    """Note in the history that a source freed some object."""
    await world.admin.execute(
        "insert into chessboard.property_object_version (property_object_id, version, tenant_id, from_status,"
        " to_status, source, price_minor, currency, correlation_id, changed_at)"
        " values (gen_random_uuid(), 2, gen_random_uuid(), 'Reserved', 'Free', $1, 1, 'RUB', 'x', $2)",
        source,
        world.ago(**ago),
    )


@pytest.mark.parametrize(
    ("evidence", "cause"),
    [
        (NOTHING_KNOWN, "unknown"),
        (Evidence(frozenset({UUID(int=1)}), None, True), "dead_letter"),
        (Evidence(frozenset({UUID(int=1)}), frozenset({UUID(int=1)}), True), "dead_letter"),
        (Evidence(frozenset(), frozenset({UUID(int=1)}), True), "consumer_lagging"),
        (Evidence(frozenset(), frozenset({UUID(int=2)}), True), "crm_silent"),
        (Evidence(frozenset(), frozenset(), False), "never_published"),
    ],
)
def test_what_waits_here_is_surer_than_what_was_not_heard_of(evidence: Evidence, cause: str) -> None:
    assert why_lost(UUID(int=1), evidence).value == cause


@pytest.mark.req("HLD-03", "HLD-31")
@pytest.mark.parametrize("disposition", ["refused", "quarantine", "exhausted"])
async def test_a_release_among_the_dead_letters_or_behind_a_parked_key_is_found(world: World, disposition: str) -> None:
    aside, other = await lost(world), await lost(world)
    await set_aside(world, aside, disposition)
    assert await causes(world) == {str(aside): "dead_letter", str(other): "unknown"}, "Kafka is away"


async def test_a_dead_letter_that_was_settled_explains_nothing(world: World) -> None:
    unit = await lost(world)
    await set_aside(world, unit)
    await world.admin.execute("update chessboard.dead_letter set resolved_at = $1, resolution = 'discarded'", world.now)
    assert await causes(world) == {str(unit): "unknown"}


@pytest.mark.messaging
@pytest.mark.req("HLD-03", "HLD-31")
async def test_a_consumer_that_has_not_read_what_is_older_than_the_grace_lags(
    connected: World, broker: TestBroker
) -> None:
    connected.clock.advance(timedelta(days=400))  # so that all that other tests have sent is older
    (unit,) = await elsewhere(connected, broker.address, 1)
    producer = Producer({"bootstrap.servers": broker.address.bootstrap, "partitioner": "murmur2_random"})
    at = int((connected.now - GRACE - timedelta(minutes=1)).timestamp() * 1000)
    sent: list[Message] = []
    producer.produce(
        EXPIRED, b"{}", str(unit).encode(), timestamp=at, on_delivery=lambda _, message: sent.append(message)
    )
    assert producer.flush(20) == 0
    try:
        overdue = await read_overdue(broker.address, GROUP, {EXPIRED}, connected.now - GRACE, 20)
        place = Place(EXPIRED, partition_of(str(unit).encode(), [place.partition for place in overdue]))
        assert place.partition == sent[0].partition()
        assert overdue[place]
        early = await read_overdue(broker.address, GROUP, {EXPIRED}, connected.now - GRACE - timedelta(minutes=2), 20)
        assert not early[place], "what is younger may still be on its way"
        assert await causes(connected) == {str(unit): "consumer_lagging"}
    finally:
        read = TopicPartition(EXPIRED, sent[0].partition(), sent[0].offset() + 1)
        reader = Consumer({"bootstrap.servers": broker.address.bootstrap, "group.id": GROUP})
        reader.commit(offsets=[read], asynchronous=False)
        reader.close()


@pytest.mark.messaging
async def test_nothing_waits_and_crm_is_heard_so_this_one_was_never_published(
    connected: World, broker: TestBroker
) -> None:
    units = await elsewhere(connected, broker.address, 2)
    await freed_by(connected, "Crm", minutes=5)
    assert await causes(connected) == dict.fromkeys(map(str, units), "never_published")


@pytest.mark.messaging
async def test_crm_is_silent_if_several_bookings_were_over_and_it_released_nothing_for_long(
    connected: World, broker: TestBroker
) -> None:
    units = await elsewhere(connected, broker.address, 2)
    await freed_by(connected, "Crm", minutes=31)
    assert await causes(connected) == dict.fromkeys(map(str, units), "crm_silent")


@pytest.mark.messaging
async def test_one_lost_booking_alone_says_nothing_of_crms_silence_but_after_another_it_does(
    connected: World, broker: TestBroker
) -> None:
    (unit,) = await elsewhere(connected, broker.address, 1)
    assert await causes(connected) == {str(unit): "never_published"}
    (unit,) = await elsewhere(connected, broker.address, 1)
    connected.clock.advance(timedelta(minutes=1))
    assert await causes(connected) == {str(unit): "crm_silent"}


async def elsewhere(world: World, address: KafkaAddress, count: int) -> list[UUID]:
    """Add objects whose holds were over, in partitions where nothing waits."""
    overdue = await read_overdue(address, GROUP, {EXPIRED}, world.now - GRACE, 20)
    partitions = {place.partition: waits for place, waits in overdue.items()}
    ids = (uuid4() for _ in range(1000))
    free = (one for one in ids if not partitions[partition_of(str(one).encode(), partitions)])
    return [await lost(world, id=next(free)) for _ in range(count)]


async def test_a_radar_that_cannot_see_costs_the_cause_and_no_warning(own_world: World) -> None:
    world = own_world
    unit = await lost(world)
    await world.admin.execute("alter table chessboard.dead_letter rename to hidden")
    assert await causes(world) == {str(unit): "unknown"}


# Report only.


@pytest.mark.req("HLD-27")
async def test_report_only_frees_nothing_and_tells_and_measures_what_would_be(world: World) -> None:
    units = await lost_in_order(world, 3)
    await lost(world, "Booked", world.ago(hours=3))
    before = await everything(world)
    board = net(world, job_property_object_hold_expiration_report_only=True)
    with capture_logs() as logs:
        counts = await cycle(board)
    assert counts == counted() | {"ReservedWouldReleaseCount": 3, "BookedWouldReleaseCount": 1}
    assert await everything(world) == before
    would = [line for line in logs if line["event"] == "would be freed"]
    assert [line["PropertyObjectId"] for line in would][:3] == list(map(str, units))
    assert [line["overdueBy"] for line in would] == [23 * 60, 22 * 60, 21 * 60, 3 * 3600]
    assert not [line for line in logs if line["event"] == "lost CRM release"]
    samples = await scrape(board)
    assert samples[f"{PREFIX}_overdue_seconds_count"] == samples[f"{PREFIX}_backlog"] == 4
    assert samples[f'{PREFIX}_overdue_seconds_bucket{{le="1800.0"}}'] == 3
    assert samples[f'{PREFIX}_items_total{{phase="reserved"}}'] == 0


async def test_delays_of_crms_releases_are_measured_so_that_a_grace_can_be_chosen(world: World) -> None:
    for seconds, version_at in ((5, 100), (700, 100), (-30, 100), (40, 100)):
        unit, changed = uuid4(), world.ago(seconds=30)
        await world.admin.execute(
            "insert into chessboard.property_object_version (property_object_id, version, tenant_id, from_status,"
            " to_status, source, reserved_until, price_minor, currency, correlation_id, changed_at)"
            " select $1, v, gen_random_uuid(), case v when 2 then 'Free' else 'Reserved' end,"
            " case v when 2 then 'Reserved' else 'Free' end, 'Crm', case v when 2 then $2::timestamptz end, 1, 'RUB',"
            " 'x', case v when 2 then $3::timestamptz else $4::timestamptz end from generate_series(2, 3) v",
            unit,
            changed - timedelta(seconds=seconds),
            world.ago(minutes=version_at),
            changed,
        )
    board = net(world, job_property_object_hold_expiration_report_only=True)
    with capture_logs() as logs:
        await cycle(board)
    (line,) = [line for line in logs if line["event"] == "delays of CRM's releases"]
    assert (line["count"], line["p50"], line["longest"]) == (3, 40, 700), "one came before its time and counts not"
    samples = await scrape(board)
    name = "chessboard_property_object_release_delay_seconds"
    assert (samples[f"{name}_count"], samples[f"{name}_sum"]) == (3, 745)
    world.clock.advance(timedelta(minutes=1))
    await cycle(board)
    assert (await scrape(board))[f"{name}_count"] == 3, "each is measured once"
