"""Rows whose event has arrived leave the outbox; of some topics it is measured how long they were there."""

from collections.abc import Mapping, Sequence

import asyncpg
from prometheus_client import Histogram

_DELETE = "delete from {schema}.outbox where id = any($1::bigint[])"
_DELETE_AND_TELL = """
with arrived as (delete from {schema}.outbox where id = any($1::bigint[]) returning topic, created_at)
select topic, extract(epoch from clock_timestamp() - created_at)::float8 as lag from arrived
where topic = any($2::text[])
"""


class Arrivals:
    """Takes acknowledged rows out of an outbox.

    Args:
        schema: the service's schema.
        lags: where the lag of a topic is observed, by topic; the others are not measured.
    """

    def __init__(self, schema: str, lags: Mapping[str, Histogram]) -> None:
        self._lags = lags
        self._topics = sorted(lags)
        self._delete = _DELETE.format(schema=schema)
        self._delete_and_tell = _DELETE_AND_TELL.format(schema=schema)

    async def delete(self, connection: "asyncpg.Connection[asyncpg.Record]", ids: Sequence[int]) -> None:
        """Delete rows that the broker has acknowledged."""
        if not self._lags:
            await connection.execute(self._delete, ids)
            return
        for row in await connection.fetch(self._delete_and_tell, ids, self._topics):
            self._lags[row["topic"]].observe(row["lag"])
