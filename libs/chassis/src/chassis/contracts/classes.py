"""The event classes and queue classes of the platform, and what each promises: the table that contracts are held to.

A channel names its class; what the class promises is stated here once and shown on the page of queues.
"""

from dataclasses import dataclass
from typing import Final

QUEUE_CLASSES: Final = {
    "event-stream": "facts for any number of readers, kept and replayed: Kafka",
    "durable-work": "work that one worker does once: rows of the owner's Postgres, claimed with SKIP LOCKED",
    "delay": "work that falls due at an instant: rows with a due time, claimed by scheduler workers",
    "dead-letter": "what could not be handled, kept with its reason until a person decides",
}


@dataclass(frozen=True, slots=True)
class EventClass:
    """What an event class promises.

    Attributes:
        source: whose truth it is.
        delivery: the delivery guarantee.
        order: what order readers may rely on.
        log_years: how long the event log keeps it at least ("long" is read as the audit's seven); 0 where the channel
            decides.
        encryption: what `x-event-classes` of a contract must declare for it.
        lossless: at least once: acknowledged by more than one replica, never compacted.
        per_entity: ordered per entity, so that the key is a field of the payload.
        full: FULL_TRANSITIVE within a major version, as the log is replayed for ever; else BACKWARD_TRANSITIVE.
    """

    source: str
    delivery: str
    order: str
    log_years: int
    encryption: str
    lossless: bool = True
    per_entity: bool = False
    full: bool = True

    @property
    def evolution(self) -> str:
        """The name of its rule of evolution."""
        return "FULL_TRANSITIVE" if self.full else "BACKWARD_TRANSITIVE"


EVENT_CLASSES: Final[dict[str, EventClass]] = {
    "domain": EventClass(
        "platform services", "at least once, ordered per entity", "per entity", 7, "at-rest", per_entity=True
    ),
    "analytical": EventClass(
        "interaction surfaces",
        "at least once; the loss of a small share is admissible",
        "best effort",
        0,
        "at-rest",
        lossless=False,
        full=False,
    ),
    "saga": EventClass(
        "the saga's service",
        "exactly once in effect: outbox, inbox and step journal",
        "strict per saga",
        7,
        "at-rest",
        per_entity=True,
    ),
    "audit": EventClass(
        "all services, through the audit log",
        "at least once; append-only, chained by hash",
        "by timestamp",
        7,
        "at-rest tamper-evident",
    ),
    "security": EventClass(
        "all services, through the audit log",
        "at least once; append-only, chained by hash",
        "by timestamp",
        7,
        "at-rest tamper-evident",
    ),
    "operational": EventClass("the platform's operation", "at least once", "best effort", 7, "at-rest", full=False),
    "compliance": EventClass(
        "the compliance pipeline", "at least once; append-only, counted", "by timestamp", 7, "at-rest audit-grade"
    ),
}
