"""Where a claim may start: no row of a lane with a lower id exists, or can still be committed by anybody.

"Greater than the last id seen" loses what commits late. An id is decided once every transaction has ended that had
taken the outbox's insert lock (RowExclusiveLock, which an INSERT or COPY takes before it draws its first id) when
a higher id had already been seen: whoever takes the lock later draws a higher one. The row's `xid` would not do, for a
transaction may draw an id before it gets one. Parked rows hold a lane's floor down, so that a row that is unparked, by
whatever means, never lies below it. The floor lives in memory and starts at 0; a full pass proves it again and again.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import asyncpg
import structlog

from chassis.outbox import LANES

LOOK_EVERY: Final = 0.1
"""Seconds between looks; dead index entries of about three looks are walked by each claim."""

PROVE_EVERY: Final = 30.0
"""Seconds between full passes."""

_FIRST_IDS = """
select l.lane, least(
  (select o.id from {schema}.outbox as o
   where (o.lane, o.id) >= (l.lane, l.floor) and o.lane <= l.lane and o.parked_at is null
   order by o.lane, o.id limit 1),
  (select o.id from {schema}.outbox as o
   where (o.lane, o.id) >= (l.lane, l.floor) and o.lane <= l.lane and o.parked_at is not null
   order by o.lane, o.id limit 1)
) as first
from unnest($1::smallint[], $2::bigint[]) as l(lane, floor)
"""
_INSERTING = """
select coalesce(array_agg(distinct l.virtualtransaction), '{{}}') as inserting,
       exists (select from {schema}.outbox_parked_key as k where k.next_attempt_at is not null) as retrying
from pg_locks as l
where l.locktype = 'relation' and l.relation = '{schema}.outbox'::regclass and l.mode = 'RowExclusiveLock' and l.granted
and l.database = (select d.oid from pg_database as d where d.datname = current_database())
"""
log = structlog.get_logger(__name__)


class Floor:
    """The lowest id of each lane that a claim has to look at; the workers of a process share one.

    Attributes:
        ids: lane -> id.
        retrying: whether a refused row waits for its next attempt, as of the last look.
        breaches: full passes that found a row below the floor; anything but 0 is an error of this module.

    Args:
        schema: the service's schema.
        look_every: seconds between looks.
        prove_every: seconds between full passes.
    """

    def __init__(self, schema: str, look_every: float = LOOK_EVERY, prove_every: float = PROVE_EVERY) -> None:
        self.ids = [0] * LANES
        self.retrying = False
        self.breaches = 0
        self._first_ids = _FIRST_IDS.format(schema=schema)
        self._inserting = _INSERTING.format(schema=schema)
        self._look_every = look_every
        self._prove_every = prove_every
        self._looked = -look_every
        self._proved = time.monotonic()
        self._looking = False
        self._seen = 0
        self._decided = 0
        self._mark = 0
        self._awaited: frozenset[str] = frozenset()

    def note(self, highest: int) -> None:
        """Note the highest id that a claim has read; every id up to it has been drawn."""
        self._seen = max(self._seen, highest)

    async def look(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        """Raise the floor as far as it is safe, if it is time for that.

        Args:
            connection: in a READ COMMITTED transaction that has written nothing.

        Raises:
            asyncpg.PostgresError: the database failed; the floor stays.
        """
        now = time.monotonic()
        if self._looking or now - self._looked < self._look_every:
            return
        self._looking, self._looked = True, now
        try:
            # In this order: the ids of this look count as decided by the transactions of the look before.
            await self._raise(connection, prove=now - self._proved >= self._prove_every)
            row = await connection.fetchrow(self._inserting)
        finally:
            self._looking = False
        if row is not None:
            self.retrying = row["retrying"]
            self._decide(frozenset(row["inserting"]))

    async def _raise(self, connection: "asyncpg.Connection[asyncpg.Record]", *, prove: bool) -> None:
        decided = self._decided
        start = [0] * LANES if prove else self.ids
        rows = await connection.fetch(self._first_ids, range(LANES), start)
        if prove:
            self._proved = time.monotonic()
            self._check(rows)
            decided = min(decided, self._decided)
        for lane, first in rows:
            self.ids[lane] = max(self.ids[lane], min(decided + 1, decided + 1 if first is None else first))

    def _check(self, rows: Sequence[Any]) -> None:
        below = [lane for lane, first in rows if first is not None and first < self.ids[lane]]
        if below:
            log.error("outbox rows below the floor", lanes=below)
            self.breaches += 1
            self.ids = [0] * LANES
            self._decided = self._mark = 0

    def _decide(self, inserting: frozenset[str]) -> None:
        if not self._awaited & inserting:
            self._decided, self._mark, self._awaited = self._mark, self._seen, inserting
