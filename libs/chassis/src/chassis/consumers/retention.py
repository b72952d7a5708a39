"""What has done its duty is deleted in bounded steps; what somebody still has to decide about is never lost from sight.

The inbox outlives every way in which an event can come again: from its topic, or from a dead letter that is retried.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection

TOPIC_RETENTION: Final = timedelta(days=30)
"""The longest time that a topic keeps its records, by contract."""

DEAD_LETTER_LIFE: Final = timedelta(days=90)
"""How long a resolved dead letter is kept for questions."""

INBOX_LIFE: Final = TOPIC_RETENTION + DEAD_LETTER_LIFE
"""A mark that went sooner would let an event that is read or retried late take effect twice."""

_INBOX = """
with old as (
  select i.consumer, i.event_id, i.replay_id from {schema}.inbox i
  where i.received_at < $1 and not exists (
    select from {schema}.dead_letter d
    where d.consumer = i.consumer and d.event_id = i.event_id and d.resolved_at is null)
  order by i.received_at limit $2
)
delete from {schema}.inbox i using old
where (i.consumer, i.event_id, i.replay_id) = (old.consumer, old.event_id, old.replay_id)
"""
_DEAD_LETTERS = """
with old as (
  select id from {schema}.dead_letter where resolved_at < $1 order by resolved_at limit $2 for update skip locked
)
delete from {schema}.dead_letter d using old where d.id = old.id
"""


@dataclass(frozen=True, slots=True)
class Retention:
    """Bounded deletes over one table of a consuming service; a caller repeats them until they return less than `limit`.

    Attributes:
        life: how long rows are kept; `before` of a purge is the caller's now minus this.
    """

    life: timedelta
    sql: str

    async def purge(self, session: AsyncSession, before: datetime, limit: int) -> int:
        """Delete up to `limit` rows that were done with before an instant.

        Returns:
            How many were deleted.
        """
        connection = await driver_connection(session)
        return int((await connection.execute(self.sql, before, limit)).split()[-1])


def inbox_retention(schema: str) -> Retention:
    """Return the retention of a schema's inbox; the mark of an event with an unresolved dead letter stays."""
    return Retention(INBOX_LIFE, _INBOX.format(schema=schema))


def dead_letter_retention(schema: str) -> Retention:
    """Return the retention of a schema's resolved dead letters; unresolved ones are never deleted."""
    return Retention(DEAD_LETTER_LIFE, _DEAD_LETTERS.format(schema=schema))
