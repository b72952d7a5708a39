"""What one `deliver` has still to send, per partition and in order: a record never passes one of its own key.

Nothing here knows the client library; the producer asks for the next batch and says what became of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from chassis.messaging.records import Publication, Record, RecordRefused, Refusal

MAX_RECORD_BYTES: Final = 1024 * 1024
"""Largest record (key, value, headers) that is sent at all, in bytes."""

MOST_REFUSALS: Final = 24
"""Refused requests of one partition in one `deliver`; a broker that refuses everything isn't asked record by record."""


@dataclass(slots=True)
class Queue:
    """The records of one partition that are still to be sent.

    Attributes:
        topic: the topic.
        partition: its partition.
        rest: positions of records, in order.
        error: why sending stopped, if it did.
        sent: how many of `rest` the failed request held.
        most: how many records the next request may hold; None for as many as fit.
        refusals: refused requests so far.
    """

    topic: str
    partition: int
    rest: list[int] = field(default_factory=list)
    error: Exception | None = None
    sent: int = 0
    most: int | None = None
    refusals: int = 0


class Delivery:
    """The state of one `deliver`.

    Args:
        records: what to send; positions in this sequence name the records.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        self.publication = Publication()
        self._refused: dict[tuple[str, bytes], int] = {}

    def next_of(self, queue: Queue) -> Iterator[Record]:
        """Yield the records that the queue's next request may hold; those behind a refused one are dropped."""
        if self._refused:
            queue.rest = [at for at in queue.rest if not self._is_behind(at)]
        for at in queue.rest[: queue.most]:
            yield self.records[at]

    def acknowledge(self, queue: Queue, count: int) -> None:
        """Note that the queue's first `count` records have arrived; the next request may hold twice as many."""
        self.publication.acknowledged.update(queue.rest[:count])
        queue.rest = queue.rest[count:]
        if queue.most is not None:
            queue.most *= 2

    def narrow(self, queue: Queue, refusal: Refusal) -> None:
        """Act on a refused request: halve it, or name the record if it held a single one."""
        queue.refusals += 1
        if refusal.whole_topic:
            self.refuse_all(queue, refusal)
        elif queue.sent == 1:
            self.refuse(queue.rest.pop(0), refusal)
            queue.most = 1
        else:
            queue.most = queue.sent // 2

    def refuse(self, at: int, refusal: Refusal) -> None:
        """Note that a record is refused; what follows of its key stands behind it."""
        record = self.records[at]
        self.publication.refused[at] = RecordRefused(record, refusal.reason, final=refusal.final)
        place = (record.topic, record.key)
        self._refused[place] = min(at, self._refused.get(place, at))

    def refuse_all(self, queue: Queue, refusal: Refusal) -> None:
        """Refuse the first record of each key that is left in a queue."""
        for at in queue.rest:
            if not self._is_behind(at):
                self.refuse(at, refusal)
        queue.rest = []

    def refuse_oversize(self) -> None:
        """Refuse what no broker is to be asked about."""
        for at, record in enumerate(self.records):
            size = len(record.key) + len(record.value)
            if size > MAX_RECORD_BYTES // 2 and size + _header_bytes(record) > MAX_RECORD_BYTES:
                self.refuse(at, Refusal(f"larger than {MAX_RECORD_BYTES} bytes", final=True))

    def left(self) -> list[int]:
        """Return the positions of the records that are to be sent."""
        done = self.publication.acknowledged
        return [at for at in range(len(self.records)) if at not in done and not self._is_behind(at)]

    def _is_behind(self, at: int) -> bool:
        if not self._refused:
            return False
        first = self._refused.get((self.records[at].topic, self.records[at].key))
        return first is not None and at >= first


def _header_bytes(record: Record) -> int:
    return sum(len(name.encode()) + len(value) for name, value in record.headers)
