"""A small service for the fault tests: books every note once, in order, and announces each booking; run as a process.

python -m tests.chaos.ledger DATABASE_URL BOOTSTRAP TOPIC OUT_TOPIC
"""

import asyncio
import signal
import sys
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import DatabaseClock
from chassis.consumers import Consumer, ConsumerLoop, ConsumerMetrics, Delivery, Handler, ParkedKeysLoop
from chassis.consumers.handling import Handling
from chassis.db import Database, copy_lines, copy_text
from chassis.messaging import KafkaAddress, Producer
from chassis.outbox import EventType, Message, Outbox
from chassis.relay import Relay, RelayMetrics, Wakeup
from chassis.runtime import Background
from chassis.telemetry import configure_logging

GROUP = "pin.ledger.notes"
NOTED, BOOKED = "chaos.noted", "chaos.booked"
SESSION_SECONDS = 6.0
OUTBOX = Outbox("crm")


def noted(topic: str) -> EventType:
    """Return the type of what is consumed."""
    return EventType(topic, NOTED, "/pin/chaos", "Note", "domain")


def book_into(topic: str) -> Handler[dict[str, Any]]:
    """Return the handler: one row in the ledger and one event on `topic`, through the gathered session."""
    booked = EventType(topic, BOOKED, "/pin/ledger", "Note", "domain")

    async def handle(session: AsyncSession, delivery: Delivery[dict[str, Any]]) -> None:
        note = delivery.payload
        line = f"{copy_text(note['key'])}\t{note['number']}\t{delivery.envelope.event_id}"
        await copy_lines(session, "crm.ledger", ("key", "number", "event_id"), [line])
        message = Message(booked, delivery.key, note, datetime.now(UTC))
        await OUTBOX.emit(session, [message], delivery.cause)

    return Handler("", NOTED, dict, handle)


async def main(url: str, bootstrap: str, topic: str, out: str) -> None:
    """Run until SIGTERM."""
    configure_logging("INFO", "ledger")
    registry, wakeup, address = CollectorRegistry(), Wakeup(), KafkaAddress(bootstrap)
    database = Database(url, application_name="ledger", on_commit=wakeup.set)
    producer = Producer(address, client_id="ledger")
    template = book_into(out)
    consumer = Consumer(GROUP, [Handler(topic, NOTED, template.parse, template.handle)], batch_size=200)
    handling = Handling(database, consumer, "crm", DatabaseClock(), ConsumerMetrics(registry))
    relay = Relay(database, producer, schema="crm", wakeup=wakeup, metrics=RelayMetrics(registry), relays=2)
    loops = [ConsumerLoop(handling, address, SESSION_SECONDS), ParkedKeysLoop(handling), relay]
    background = Background(loops, registry)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    background.start()
    await stopping.wait()
    await background.stop()
    await producer.close()
    await database.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
