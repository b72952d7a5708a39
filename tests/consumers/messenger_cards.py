"""A sample reader of pin.crm.booking.v1: one card per step of a booking, whatever the number of its objects.

It acts once per `ce_id`, and shows nothing older than what it has shown: `ce_sequence` is the booking's version.
A real one keeps both memories in its own database, in the transaction of the card.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson
from confluent_kafka import Consumer, Message

TOPIC = "pin.crm.booking.v1"
CARDS = {"held": "Бронь создана", "confirmed": "Бронь подтверждена", "cancelled": "Бронь отменена"}
EXPIRED = "Время брони истекло"


@dataclass
class Cards:
    """The cards of each booking, in order."""

    shown: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def take(self, message: Message) -> None:
        """Show the card of one record, unless it was seen, is older than what was shown, or has none."""
        headers = {name: value.decode() for name, value in message.headers() or []}
        if headers["ce_id"] in self.seen or headers["ce_type"] != "crm.booking.state-changed":
            return
        self.seen.add(headers["ce_id"])
        booking, version = headers["ce_subject"], int(headers["ce_sequence"])
        if version <= self.versions.get(booking, 0):
            return
        self.versions[booking] = version
        change = orjson.loads(message.value() or b"")
        if text := EXPIRED if change["Reason"] == "expired" else CARDS.get(change["ToState"]):
            self.shown.setdefault(booking, []).append(f"{text} ({len(change['PropertyObjectIds'])})")


def read(bootstrap: str, group: str, cards: Cards, bookings: Iterable[str], last: int) -> None:
    """Read until every named booking has been seen at version `last`, committing what was shown."""
    settings = {"bootstrap.servers": bootstrap, "group.id": group, "auto.offset.reset": "earliest"}
    consumer = Consumer(settings | {"enable.auto.commit": False})
    consumer.subscribe([TOPIC])
    while any(cards.versions.get(one, 0) < last for one in bookings):
        if (message := consumer.poll(1)) is not None and message.error() is None:
            cards.take(message)
            consumer.commit(message, asynchronous=False)
    consumer.close()
