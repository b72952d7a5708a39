"""The verifier of an audit log: walks the chain from its beginning and names the first link that doesn't hold.

It trusts nothing but the rows it reads and, if given, a head that somebody remembered elsewhere: without one, a chain
that was cut off at its end (rows and seals) or made anew as a whole looks whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit.chain import CONTENT, FIRST_HASH, Head, link_hash
from chassis.db import driver_connection

PAGE: Final = 2000

# `offset 0` keeps both statements to look-ups by index: a join of whole tables would cost each page the whole log.
_LINKS = """
select s.sequence, s.audit_id, s.previous_hash, s.hash, s.next, r.*,
  r.xid >= pg_snapshot_xmin(pg_current_snapshot())::text::bigint as is_to_come from (
  select s.sequence, s.audit_id, s.previous_hash, s.hash, lead(s.previous_hash) over (order by s.sequence) as next
  from {schema}.audit_seal s where s.sequence > $1 order by s.sequence limit $2
) as s left join lateral (
  select {content} from {schema}.audit_log a where a.id = s.audit_id offset 0
) as r on true order by s.sequence
"""
_UNSEALED_BETWEEN = """
select r.id from (
  select a.id, a.xid from {schema}.audit_log a
  where (a.xid, a.id) > ($1::text::xid8, $2::bigint) and (a.xid, a.id) <= ($3::text::xid8, $4::bigint)
  order by a.xid, a.id offset 0
) as r where not exists (select from {schema}.audit_seal s where s.audit_id = r.id offset 0)
order by r.xid, r.id limit 1
"""


@dataclass(frozen=True, slots=True)
class BrokenLink:
    """The first place where the chain doesn't hold.

    Attributes:
        sequence: position in the chain.
        audit_id: id of the audit row, where one is known.
        reason: what is wrong, in a sentence.
    """

    sequence: int
    audit_id: int | None
    reason: str

    def __str__(self) -> str:
        row = "" if self.audit_id is None else f", audit row {self.audit_id}"
        return f"link {self.sequence}{row}: {self.reason}"


@dataclass(frozen=True, slots=True)
class _Place:
    """How far the chain was found whole: the last good link and its row's place in the order."""

    head: Head
    xid: int = 0
    audit_id: int = 0


async def verify(
    session: AsyncSession, schema: str, *, remembered: Head | None = None, page: int = PAGE
) -> BrokenLink | Head:
    """Check the whole chain of a service's audit log, a page at a time.

    Args:
        session: an open session of the system role.
        schema: the service's schema.
        remembered: a head noted earlier; the chain must still contain it.
        page: links read at once.

    Returns:
        The first broken link; or the head up to which the chain is whole, later links having been unread.

    Raises:
        asyncpg.PostgresError: the database failed.
    """
    connection = await driver_connection(session)
    place = _Place(Head(0, FIRST_HASH))
    links = _LINKS.format(schema=schema, content=CONTENT)
    while rows := await connection.fetch(links, place.head.sequence, page):
        before = place
        place, broken = _walked(place, rows, remembered)
        slipped = await _find_slipped_in(connection, schema, before, place)
        wrong = slipped or broken
        if wrong is not None:
            return wrong
    if remembered is not None and place.head.sequence < remembered.sequence:
        return BrokenLink(
            place.head.sequence + 1, None, f"the chain ends before the remembered head {remembered.sequence}"
        )
    return place.head


def _walked(place: _Place, rows: Sequence[asyncpg.Record], remembered: Head | None) -> tuple[_Place, BrokenLink | None]:
    for row in rows:
        broken = _broken(place, row, remembered)
        if broken is not None:
            return place, broken
        place = _Place(Head(row["sequence"], row["hash"]), row["xid"], row["audit_id"])
    return place, None


def _broken(place: _Place, row: asyncpg.Record, remembered: Head | None) -> BrokenLink | None:
    expected = place.head.sequence + 1
    if row["sequence"] != expected:
        return BrokenLink(expected, None, "the seal is missing")
    reason = _wrong_with(place, row)
    if reason is None and remembered is not None and remembered.sequence == expected:
        reason = (
            None if remembered.hash == row["hash"] else "the chain was made anew: its hash is not the remembered one"
        )
    return None if reason is None else BrokenLink(expected, row["audit_id"], reason)


def _wrong_with(place: _Place, row: asyncpg.Record) -> str | None:
    if row["id"] is None:
        return "the row was deleted"
    if row["previous_hash"] != place.head.hash:
        return "the seal was changed: it doesn't follow the one before"
    if row["hash"] != link_hash(place.head.hash, place.head.sequence + 1, row):
        return _what_changed(place, row)
    if (row["xid"], row["audit_id"]) <= (place.xid, place.audit_id):
        return "the row's transaction id was changed: it is out of order"
    if row["is_to_come"]:
        return "the row's transaction id is one that nobody has had yet: it was changed, or the ids started over"
    return None


def _what_changed(place: _Place, row: asyncpg.Record) -> str:
    """Tell a changed seal from a changed row by what the next link took for its predecessor."""
    follows: Any = row["next"]
    computed = link_hash(place.head.hash, place.head.sequence + 1, row)
    return "the seal was changed" if follows == computed else "the row was changed"


async def _find_slipped_in(
    connection: "asyncpg.Connection[asyncpg.Record]", schema: str, before: _Place, place: _Place
) -> BrokenLink | None:
    found = await connection.fetchval(
        _UNSEALED_BETWEEN.format(schema=schema),
        str(before.xid),
        before.audit_id,
        str(place.xid),
        place.audit_id,
    )
    if found is None:
        return None
    return BrokenLink(
        before.head.sequence + 1, found, f"the row was inserted between sealed ones, before link {place.head.sequence}"
    )
