"""How the safety net finds holds that are over, and what it looks at to say why they were not released.

It claims rows with SKIP LOCKED in the order of their times and never waits; it writes through `repository`.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from asyncpg import Record
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.batching import SkipLocked
from chassis.db import driver_connection
from chessboard.domain import Phase
from chessboard.repository import OBJECT_COLUMNS
from chessboard.tables import SCHEMA

JOB: Final = "property-object-hold-expiration"
MOST_COUNTED: Final = 100_000
MOST_DELAYS: Final = 10_000


def _is_over(phase: Phase, as_of: str, grace: str) -> str:
    status, until = phase.value.capitalize(), f"t.{phase.value}_until"
    return f"t.status = '{status}' and {until} is not null and {until} < {as_of}::timestamptz - {grace}::interval"


def _claim(phase: Phase) -> SkipLocked:
    return SkipLocked(
        schema=SCHEMA,
        job=f"{JOB}/{phase.value}",
        table="chessboard.property_object",
        columns=[f"t.{column}" for column in OBJECT_COLUMNS.split(", ")],
        where=_is_over(phase, "$4", "$5"),
        order=(f"t.{phase.value}_until", "t.id"),
        arguments=2,
        cursor_types=("timestamptz", "uuid"),
        logged_as=("PropertyObjectId", "exception"),
    )


CLAIMS: Final = {phase: _claim(phase) for phase in Phase}
"""Each phase has a poison book of its own: what is no longer reserved is not thereby settled as a booking."""

_LOOK: Final = {
    phase: f"select t.id, t.{phase.value}_until as until from chessboard.property_object t"
    f" where {_is_over(phase, '$1', '$2')} order by t.{phase.value}_until, t.id limit $3"
    for phase in Phase
}
_BACKLOG: Final = "select " + " + ".join(
    f"(select count(*) from (select from chessboard.property_object t where {_is_over(phase, '$1', '$2')}"
    f" limit {MOST_COUNTED}) as due)"
    for phase in Phase
)
_SET_ASIDE: Final = """
select distinct parking_key from chessboard.dead_letter
where consumer = $1 and parking_key = any($2::bytea[]) and resolved_at is null
"""
_RELEASED: Final = """
select exists (select from chessboard.property_object_version
               where to_status = 'Free' and from_status <> 'Free'
                 and source = $1 and changed_at > $2 and changed_at < $3)
"""
_DELAYS: Final = """
select extract(epoch from r.changed_at - coalesce(h.reserved_until, h.booked_until))::float8 as delay
from chessboard.property_object_version r
join chessboard.property_object_version h on h.property_object_id = r.property_object_id and h.version = r.version - 1
where r.to_status = 'Free' and r.from_status <> 'Free' and r.source = 'Crm' and r.changed_at > $1 and r.changed_at <= $2
  and r.changed_at >= coalesce(h.reserved_until, h.booked_until)
order by r.changed_at desc limit $3
"""


async def look(session: AsyncSession, phase: Phase, as_of: datetime, grace: timedelta, limit: int) -> Sequence[Record]:
    """Return id and time (`until`) of the first holds that are over by more than a grace, without locking them."""
    return await (await driver_connection(session)).fetch(_LOOK[phase], as_of, grace, limit)


async def count_backlog(session: AsyncSession, as_of: datetime, grace: timedelta) -> int:
    """Return how many holds are over by more than a grace, counted up to 100000 of each phase."""
    return int(await (await driver_connection(session)).fetchval(_BACKLOG, as_of, grace))


async def find_set_aside(session: AsyncSession, consumer: str, ids: Collection[UUID]) -> frozenset[UUID]:
    """Return the objects for which a consumer has dead letters or parked records that nobody has settled."""
    keys = {str(one).encode(): one for one in ids}
    rows = await (await driver_connection(session)).fetch(_SET_ASIDE, consumer, list(keys))
    return frozenset(keys[row["parking_key"]] for row in rows)


async def has_released(session: AsyncSession, source: str, since: datetime, before: datetime) -> bool:
    """Tell whether a source has freed any object between two instants."""
    return bool(await (await driver_connection(session)).fetchval(_RELEASED, source, since, before))


async def read_delays(session: AsyncSession, since: datetime, until: datetime) -> list[float]:
    """Return how many seconds after a hold's time CRM's releases of a period came, for those that came after it."""
    rows = await (await driver_connection(session)).fetch(_DELAYS, since, until, MOST_DELAYS)
    return [row["delay"] for row in rows]
