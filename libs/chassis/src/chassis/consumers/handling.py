"""One transaction over a list of records: inbox first, then parked keys, then the handlers, then one flush.

The same for a whole batch, for one record and for a parked one; who calls decides what a failure means.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import structlog
from pydantic import ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock
from chassis.consumers.declaration import Consumer, Delivery, Handler
from chassis.consumers.envelope import (
    Envelope,
    Unreadable,
    headers_of,
    read_envelope,
    read_payload,
    trace_headers,
    type_of,
)
from chassis.consumers.faults import ConnectionLost, Fault, HandlerCancelled, HandlerTooSlow
from chassis.consumers.metrics import ConsumerMetrics
from chassis.consumers.store import Disposition, Letter, Store, parking_key
from chassis.db import DATABASE_ERRORS, Database, driver_connection
from chassis.gathering import gathered
from chassis.messaging import Received
from chassis.outbox import Cause
from chassis.tracing import handling, is_tracing

BREACHES: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What parsing a payload raises when it isn't what the contract says."""

_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,60}")
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Item:
    """A record on its way through a batch.

    Attributes:
        handler: None if it is to be ignored, or can't be read (`problem`).
        attempts: failed ones.
    """

    record: Received
    key: bytes
    type: str | None = None
    handler: Handler[Any] | None = None
    envelope: Envelope | None = None
    payload: Any = None
    problem: Unreadable | None = None
    attempts: int = 0
    first_failed_at: datetime | None = None


@dataclass(slots=True)
class Tally:
    """What one transaction did, counted once it has committed."""

    now: datetime
    handled: list[Item] = field(default_factory=list)
    duplicates: int = 0
    set_aside: int = 0
    parked: int = 0


class Handling:
    """Reads and handles records of one consumer.

    Args:
        database: the service's database under its system role.
        consumer: what is consumed.
        schema: the service's schema.
        clock: gives each transaction its `now`.
        metrics: shared by the consumers of a process.
    """

    def __init__(
        self, database: Database, consumer: Consumer, schema: str, clock: Clock, metrics: ConsumerMetrics
    ) -> None:
        self.database = database
        self.consumer = consumer
        self.store = Store(schema, consumer.group)
        self.clock = clock
        self.metrics = metrics
        self._handlers = {(handler.topic, handler.type): handler for handler in consumer.handlers}
        metrics.declare(consumer.group)

    def read(self, record: Received) -> Item:
        """Decode a record; what is wrong with it is kept in the item."""
        item = Item(record, parking_key(record))
        try:
            headers = headers_of(record)
            item.type = type_of(headers)
            handler = self._handlers.get((record.topic, item.type))
            if handler is None:
                return item
            item.envelope = read_envelope(headers)
            item.payload = _parsed(handler, item.envelope, record)
            item.handler = handler
        except Unreadable as problem:
            item.problem = problem
        return item

    async def transact(self, items: Sequence[Item], seconds: float) -> Tally:
        """Handle items in one transaction.

        Raises:
            HandlerTooSlow: it took longer than `seconds`.
            Exception: whatever a handler or the database raised; nothing was changed.
        """
        async with self.transaction(seconds) as session:
            now = await self.clock.now(session)
            return await self._handle(session, items, now)

    @asynccontextmanager
    async def transaction(self, seconds: float) -> AsyncIterator[AsyncSession]:
        """Open a write session for handlers, bounded in time; what they raise comes out as what it is.

        Raises:
            HandlerTooSlow: the block took longer than `seconds`.
            HandlerCancelled: a handler raised CancelledError though nobody had cancelled it.
            ConnectionLost: the session's connection died.
        """
        limit = asyncio.timeout(seconds)
        try:
            async with limit, self.database.write() as session, _living(session):
                yield session
        except TimeoutError as error:
            if limit.expired():
                raise HandlerTooSlow(f"longer than {seconds:g} s") from error
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise HandlerCancelled("a handler was cancelled from within") from error

    async def invoke(self, session: AsyncSession, items: Sequence[Item], now: datetime) -> None:
        """Preload the rows of readable items and run their handlers, in order; writes go out once, at the end."""
        async with gathered(session):
            keys = {key: None for item in items if item.handler for key in item.handler.keys(item.payload)}
            if keys:
                await self.consumer.preload(session, list(keys))
            for item in items:
                if item.handler is not None and item.envelope is not None:
                    with self._context(item.record, item.envelope):
                        await item.handler.handle(session, self._delivery(item, item.envelope, now))

    def _delivery(self, item: Item, envelope: Envelope, now: datetime) -> Delivery[Any]:
        cause = Cause(envelope.correlation_id, causation_id=envelope.event_id, emitter=self.consumer.group)
        return Delivery(envelope, item.payload, (item.record.key or b"").decode(errors="replace"), now, cause)

    @contextmanager
    def _context(self, record: Received, envelope: Envelope) -> Iterator[None]:
        """What a handler does belongs to the trace in which its event was emitted; its log lines name the event."""
        names = {"consumer": self.consumer.group, "correlation_id": envelope.correlation_id}
        headers = trace_headers(record) if is_tracing() else {}
        with (
            structlog.contextvars.bound_contextvars(**names, event_id=str(envelope.event_id)),
            handling(headers, record.topic, self.consumer.group),
        ):
            yield

    def letter(self, item: Item, fault: Fault, disposition: Disposition, now: datetime) -> Letter:
        """Return an item as a dead letter."""
        first = item.first_failed_at or now
        return Letter(item.record, item.envelope, item.type, fault, disposition, max(item.attempts, 1), first, now)

    def count(self, tally: Tally) -> None:
        """Put what a committed transaction did into the metrics."""
        group = self.consumer.group
        for item in tally.handled:
            self.metrics.handled.labels(group, item.type).inc()
            age = tally.now.timestamp() - item.record.timestamp_ms / 1000
            self.metrics.age.labels(group).observe(max(0.0, age))
        self.metrics.duplicates.labels(group).inc(tally.duplicates)
        if tally.set_aside:
            self.metrics.dead_letters.labels(group, "quarantine").inc(tally.set_aside)
            self.metrics.failures.labels(group, "contract").inc(tally.set_aside)
        if tally.parked:
            self.metrics.dead_letters.labels(group, "parked").inc(tally.parked)

    async def _handle(self, session: AsyncSession, items: Sequence[Item], now: datetime) -> Tally:
        tally = Tally(now)
        parked = await self.store.lock_parked(session, [item.key for item in items])
        ready: list[Item] = []
        for item in items:
            if item.problem is not None:
                await self.store.set_aside(session, self.letter(item, Fault.of(item.problem), "quarantine", now))
                tally.set_aside += 1
            elif item.handler is not None and item.envelope is not None:
                if item.key in parked:
                    await self.store.put_behind(session, item.record, item.envelope, now)
                    tally.parked += 1
                else:
                    ready.append(item)
        tally.handled = await self._new_ones(session, ready, now)
        tally.duplicates = len(ready) - len(tally.handled)
        if tally.handled:
            await self.invoke(session, tally.handled, now)
        return tally

    async def _new_ones(self, session: AsyncSession, items: Sequence[Item], now: datetime) -> list[Item]:
        """Return the items that have not been handled before, each event once."""
        envelopes = [item.envelope for item in items if item.envelope is not None]
        if not envelopes:
            return []
        fresh = await self.store.mark_handled(session, envelopes, now)
        new: list[Item] = []
        for item, envelope in zip(items, envelopes, strict=True):
            mark = (envelope.event_id, envelope.replay_id)
            if mark in fresh:
                fresh.remove(mark)
                new.append(item)
        return new


@asynccontextmanager
async def _living(session: AsyncSession) -> AsyncIterator[None]:
    """Tell an error of a dead connection from the same error raised by a handler's own mistake."""
    connection = await driver_connection(session)
    try:
        yield
    except DATABASE_ERRORS as error:
        if connection.is_closed():
            raise ConnectionLost(type(error).__name__) from error
        raise


def _parsed(handler: Handler[Any], envelope: Envelope, record: Received) -> Any:
    if envelope.version != handler.version:
        raise Unreadable("version_unknown", f"ce_contractversion is not {handler.version}")
    value = read_payload(record)
    try:
        return handler.parse(value)
    except BREACHES as error:
        raise unparsable(error) from error


def unparsable(error: Exception) -> Unreadable:
    """Return what is wrong with a payload that a handler's parser refused."""
    return Unreadable("schema_breached", _where(error))


def _where(error: Exception) -> str:
    """Say which places of a payload are wrong, without their values (a mapping's keys are the sender's words too)."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__} while parsing"
    problems = error.errors(include_url=False, include_context=False, include_input=False)[:10]
    found = [".".join(map(_name, problem["loc"])) + f" ({problem['type']})" for problem in problems]
    return f"wrong: {', '.join(found)}"


def _name(part: int | str) -> str:
    return str(part) if isinstance(part, int) or _IDENTIFIER.fullmatch(part) else "*"
