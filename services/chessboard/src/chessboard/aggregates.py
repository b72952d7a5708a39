"""How projects are counted again: the requests of each are folded, its free objects counted in the same snapshot.

A request and the change that asked for it are committed together, so a statement that sees the one sees the other; what
it doesn't see stays for the next one. The project's row lock keeps an older count from being written after a newer one.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection

_CLAIM: Final = """
with due as (
  select distinct project_id from chessboard.project_recalc_request where requested_at <= $1
)
select p.id from chessboard.project p where p.id in (select project_id from due)
order by p.id limit $2 for no key update of p skip locked
"""
_COUNT_AGAIN: Final = """
with folded as (
  delete from chessboard.project_recalc_request where project_id = any($1::uuid[]) returning project_id
), counted as (
  select asked.id, (select count(*) from chessboard.property_object o
                    where o.project_id = asked.id and o.status = 'Free') as free
  from unnest($1::uuid[]) as asked(id)
), written as (
  update chessboard.project p set property_objects_free_count = c.free, aggregates_as_of = $2
  from counted c where p.id = c.id
)
select count(*) from folded
"""
_WAITING: Final = """
select count(distinct project_id) from chessboard.project_recalc_request where requested_at <= $1
"""


async def claim_projects(session: AsyncSession, asked_before: datetime, limit: int) -> Sequence[UUID]:
    """Lock projects whose first request is from before an instant, or of it, and that nobody else holds."""
    rows = await (await driver_connection(session)).fetch(_CLAIM, asked_before, limit)
    return [row["id"] for row in rows]


async def count_again(session: AsyncSession, ids: Sequence[UUID], now: datetime) -> int:
    """Count the free objects of projects that this session has locked; return how many requests that settles."""
    return int(await (await driver_connection(session)).fetchval(_COUNT_AGAIN, list(ids), now))


async def count_waiting(session: AsyncSession, asked_before: datetime) -> int:
    """Return how many projects wait whose first request is from before an instant, or of it."""
    return int(await (await driver_connection(session)).fetchval(_WAITING, asked_before))
