"""How a service declares what it consumes: a handler per message type, and the keys of the rows it will change."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers.envelope import Envelope
from chassis.outbox import Cause

Payload = TypeVar("Payload")


class Refused(Exception):
    """A business refusal: the message is understood and will never be obeyed; raised by handlers.

    It is recorded at once with disposition `refused`, the key flows on, and nothing retries it by itself.

    Attributes:
        code: stable code, e.g. HOLD_MISMATCH.
        instead: what is done all the same, such as to answer the sender, in the transaction that records the refusal:
            that of the handler is rolled back, with what it had locked.
    """

    def __init__(
        self, code: str, reason: str, instead: Callable[[AsyncSession], Awaitable[None]] | None = None
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.instead = instead


class SourceUnavailable(Exception):
    """Something that a handler needs (another system's HTTP interface) is away; the whole consumer waits."""


@dataclass(frozen=True, slots=True)
class Delivery(Generic[Payload]):
    """One event as its handler gets it.

    Attributes:
        envelope: its headers, parsed.
        payload: its value, parsed by the handler's declaration.
        key: the record's key.
        now: the batch's instant; handlers compare with no other.
        cause: what the handler passes to `Outbox.emit`: ids of what it emits follow from this event.
    """

    envelope: Envelope
    payload: Payload
    key: str
    now: datetime
    cause: Cause


def _no_keys(_: Any) -> Iterable[Any]:
    return ()


async def _nothing_to_preload(_: AsyncSession, __: Sequence[Any]) -> None:
    return


@dataclass(frozen=True, slots=True)
class Handler(Generic[Payload]):
    """What a consumer does with messages of one type.

    Attributes:
        topic: where they come from.
        type: `ce_type`.
        parse: turns the decoded JSON value into our own view of it; a ValueError means a breach of the contract.
        handle: translates and calls commands, in the session's transaction; may raise `Refused`.
        keys: keys of the rows that handling will lock, for the consumer's `preload`.
        version: `ce_contractversion` that it understands.
    """

    topic: str
    type: str
    parse: Callable[[Any], Payload]
    handle: Callable[[AsyncSession, Delivery[Payload]], Awaitable[None]]
    keys: Callable[[Payload], Iterable[Any]] = _no_keys
    version: str = "1"


@dataclass(frozen=True, slots=True)
class Consumer:
    """One consumer group and all that it reads.

    Attributes:
        group: `pin.<context>.<consumer>`: also its name in the inbox and in dead letters.
        handlers: at most one per (topic, type); other types of these topics are ignored and counted.
        preload: locks the rows of all declared keys of a batch with one ordered SELECT ... FOR UPDATE and notes them
            with `db.remember_locked`.
        batch_size: most records of one transaction.
    """

    group: str
    handlers: Sequence[Handler[Any]]
    preload: Callable[[AsyncSession, Sequence[Any]], Awaitable[None]] = _nothing_to_preload
    batch_size: int = 500

    @property
    def topics(self) -> frozenset[str]:
        """Every topic that it reads."""
        return frozenset(handler.topic for handler in self.handlers)
