"""Relays over one database and a broker, and what a test does with them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import asyncpg
from prometheus_client import CollectorRegistry

from chassis.db import Database
from chassis.messaging import KafkaAddress, Producer
from chassis.outbox import Cause, Message, Outbox
from chassis.relay import Relay, RelayMetrics, Wakeup
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker

Connection = asyncpg.Connection
OUTBOX = Outbox("crm")
FILL = """
insert into crm.outbox (event_id, aggregatetype, aggregateid, type, payload, headers, topic, message_key, lane,
                        occurred_at, parked_at)
select gen_random_uuid(), 'Note', $2, 'test.noted', convert_to(n::text, 'UTF8'),
       jsonb_build_object('ce_type', 'test.noted', 'ce_id', n::text), $1, $2, $3, now(), $5
from generate_series(1, $4) as n
"""


class Scene:
    """Relays over one database, and what they have put on a topic."""

    def __init__(self, database: Database, system_url: str, opened: Callable[..., Database]) -> None:
        self.database = database
        self.wakeup = Wakeup()
        self.emitting = opened(system_url, application_name="emitting", on_commit=self.wakeup.set)
        self.registry = CollectorRegistry()
        self.metrics = RelayMetrics(self.registry)
        self.producers: list[Producer] = []

    def producer(self, address: KafkaAddress, kind: type[Producer] = Producer, **arguments: float) -> Producer:
        self.producers.append(kind(address, client_id="test", **arguments))
        return self.producers[-1]

    def relay(self, producer: Producer, **arguments: object) -> Relay:
        return Relay(
            self.database,
            producer,
            schema="crm",
            wakeup=self.wakeup,
            metrics=self.metrics,
            **{"interval": 60.0, **arguments},
        )

    async def emit(self, messages: Sequence[Message]) -> None:
        async with self.emitting.write() as session:
            await OUTBOX.emit(session, messages, Cause("test"))


async def pending(admin: Connection) -> int:
    return await admin.fetchval("select count(*) from crm.outbox")


async def drain(relay: Relay) -> list[int]:
    """Do turns until nothing is left; return how many rows each published."""
    turns = []
    while (turn := await relay.run_once()).published or turn.more:
        turns.append(turn.published)
    return turns


def port_of(broker: TestBroker) -> int:
    return int(broker.running.bootstrap.rpartition(":")[2])


class Counting(Stop):
    """Doesn't wait, and remembers how long it was asked to; calls back at each wait."""

    def __init__(self, at_wait: Callable[[int], Awaitable[None] | None]) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._at_wait = at_wait

    async def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if (acting := self._at_wait(len(self.waits))) is not None:
            await acting
        await asyncio.sleep(0)
        return self.requested
