"""The relay: takes committed outbox rows to Kafka, in id order per lane, and deletes what was acknowledged."""

from chassis.relay.floor import Floor
from chassis.relay.parking import MOST_ATTEMPTS, NotParked, ParkedKey, Parking
from chassis.relay.watch import OutboxWatch, RelayMetrics
from chassis.relay.worker import FIRST_BACKOFF, LONGEST_BACKOFF, Relay, Turn, Wakeup

__all__ = [
    "FIRST_BACKOFF",
    "LONGEST_BACKOFF",
    "MOST_ATTEMPTS",
    "Floor",
    "NotParked",
    "OutboxWatch",
    "ParkedKey",
    "Parking",
    "Relay",
    "RelayMetrics",
    "Turn",
    "Wakeup",
]
