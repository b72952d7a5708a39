"""Consuming events: every record is handled once in effect, or kept with its reason; none is skipped in silence.

A service declares a `Consumer` (one per group) with a `Handler` per message type; `ConsumerLoop` reads and
`ParkedKeysLoop` retries what had to wait. What can go wrong with a record is of three kinds, told apart in `faults`.
"""

from chassis.consumers.declaration import Consumer, Delivery, Handler, Refused, SourceUnavailable
from chassis.consumers.loop import ConsumerLoop
from chassis.consumers.metrics import ConsumerMetrics
from chassis.consumers.parking import ParkedKeysLoop

__all__ = [
    "Consumer",
    "ConsumerLoop",
    "ConsumerMetrics",
    "Delivery",
    "Handler",
    "ParkedKeysLoop",
    "Refused",
    "SourceUnavailable",
]
