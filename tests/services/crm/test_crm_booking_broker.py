"""crm's consumers as the service runs them: requests leave over the broker, answers and releases come over it."""

import asyncio
from uuid import uuid4

import pytest
from booking_desk import HOLD_ANSWERED, Desk
from confluent_kafka import Producer
from crm_world import World
from prometheus_client import CollectorRegistry

from chassis.testing.plugin import TestBroker
from crm.app import consuming
from crm.consumers import declare_consumers

pytestmark = pytest.mark.messaging
HOLD = "pin.crm.booking-hold-requested.v1"
CHANGED = "crm.booking.state-changed"


@pytest.mark.req("EVT-007", "EVT-035")
async def test_a_hold_is_asked_and_answered_over_the_broker(connected: World, broker: TestBroker) -> None:
    desk, one = Desk(connected, connected.system()), uuid4()
    crm = connected.crm("consumers", "relay")
    async with crm.app.router.lifespan_context(crm.app):
        booking = await desk.reserved(one)
        request = await asyncio.to_thread(
            broker.expect, HOLD, HOLD, lambda event: event.payload["BookingId"] == str(booking), 60
        )
        assert request.key == str(one)
        asked = {name: request.payload[name] for name in ("BookingId", "TenantId", "PropertyObjectId")}
        answer = asked | {
            "Sequence": int(request.headers["ce_sequence"]),
            "Outcome": "held",
            "Reason": None,
            "Version": 2,
        }
        record = desk.record(HOLD_ANSWERED, answer)
        producer = Producer({"bootstrap.servers": connected.bootstrap, "partitioner": "murmur2_random"})
        for _ in range(2):
            producer.produce(record.topic, key=record.key, value=record.value, headers=list(record.headers))
        assert await asyncio.to_thread(producer.flush, 20) == 0
        told = await asyncio.to_thread(
            broker.expect,
            "pin.crm.booking.v1",
            CHANGED,
            lambda event: event.payload["BookingId"] == str(booking) and event.payload["ToState"] == "held",
            60,
        )
    assert told.headers["ce_causationid"] == dict(record.headers)["ce_id"].decode()
    assert await desk.state(booking) == "held"


@pytest.mark.req("EVT-007")
def test_a_process_that_consumes_reads_three_groups_and_retries_their_keys(connected: World) -> None:
    registry = CollectorRegistry()
    declared = declare_consumers(registry)
    loops = consuming(connected.settings(), connected.system(), declared, connected.clock, registry)
    groups = ("pin.crm.hold-answers", "pin.crm.object-status", "pin.crm.offers")
    assert {loop.name for loop in loops} == {
        f"{kind} {group}" for kind in ("consumer", "parked keys") for group in groups
    }
