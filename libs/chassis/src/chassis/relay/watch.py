"""What an outbox shows of itself: how much waits, how old it is, what is parked, how late events arrive."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from chassis.db import DATABASE_ERRORS, Database, driver_connection, is_infrastructure
from chassis.outbox import LANES
from chassis.relay.floor import Floor
from chassis.runtime import Heartbeat, Stop

MOST_COUNTED: Final = 100_000
_FIGURES = """
select clock_timestamp() as at, w.*, p.*, k.* from
  (select min(o.created_at) as oldest, count(*) as pending from
    (select r.created_at from unnest($1::smallint[], $2::bigint[]) as l(lane, floor) cross join lateral
      (select i.created_at from {schema}.outbox as i
       where (i.lane, i.id) >= (l.lane, l.floor) and i.lane <= l.lane and i.parked_at is null) as r
     limit {most}) as o) as w,
  (select count(*) as parked_rows from
    (select from {schema}.outbox as i where i.parked_at is not null limit {most}) as o) as p,
  (select min(parked_at) as oldest_parked, count(*) filter (where next_attempt_at is null) as parked_keys,
          count(next_attempt_at) as retrying_keys from {schema}.outbox_parked_key) as k
"""
log = structlog.get_logger(__name__)


NO_LAGS: Final[Mapping[str, str]] = MappingProxyType({})


class RelayMetrics:
    """What a relay exports; one instance per process and registry.

    Args:
        registry: where the metrics are registered.
        lags: topics whose delivery lag is exported, with the name of the metric of each.
    """

    def __init__(self, registry: CollectorRegistry, lags: Mapping[str, str] = NO_LAGS) -> None:
        def counter(name: str, said: str) -> Counter:
            return Counter(f"pin_outbox_{name}", said, registry=registry)

        def gauge(name: str, said: str) -> Gauge:
            return Gauge(f"pin_outbox_{name}", said, registry=registry)

        self.published = counter("published_total", "Outbox rows acknowledged.")
        self.attempts = counter("attempts_total", "Outbox rows handed to Kafka, acknowledged or not.")
        self.floor_breaches = counter("floor_breaches_total", "Full passes that found a row below the floor.")
        self.refused = Counter("pin_outbox_refused_total", "Refusals of rows, by topic.", ["topic"], registry=registry)
        self.failures = Counter("pin_outbox_turn_failures_total", "Turns with trouble.", ["reason"], registry=registry)
        self.oldest = gauge("oldest_age_seconds", "Age of the oldest unpublished row that isn't parked.")
        self.pending = gauge("pending", f"Unpublished rows that aren't parked (counted up to {MOST_COUNTED}).")
        self.parked_rows = gauge("parked_rows", f"Rows behind a refused one, it included (up to {MOST_COUNTED}).")
        self.parked_keys = gauge("parked_keys", "Keys that wait for an operator.")
        self.retrying_keys = gauge("retrying_keys", "Keys whose refused row will be tried again.")
        self.oldest_parked = gauge("oldest_parked_age_seconds", "Time since the first parked key was parked.")
        self.turn_seconds = Histogram(
            "pin_outbox_turn_duration_seconds",
            "Duration of a turn that published something.",
            registry=registry,
            buckets=(0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10),
        )
        self.lags = {
            topic: Histogram(
                name,
                "Time from an event's row in the outbox to the broker's acknowledgement.",
                registry=registry,
                buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800),
            )
            for topic, name in lags.items()
        }


class OutboxWatch:
    """Keeps the figures of an outbox fresh.

    Args:
        database: the service's database under its system role.
        schema: the service's schema.
        metrics: where the figures go.
        interval: seconds between looks.
        floor: of the process's relay, where it has one, so that a look doesn't walk what is dead.
    """

    name = "outbox watch"

    def __init__(
        self,
        database: Database,
        schema: str,
        metrics: RelayMetrics,
        interval: float = 5.0,
        floor: Floor | None = None,
    ) -> None:
        self.heartbeat = Heartbeat(longest_silence=max(60.0, interval * 6))
        self._database = database
        self._metrics = metrics
        self._interval = interval
        self._floor = floor or Floor(schema)
        self._sql = _FIGURES.format(schema=schema, most=MOST_COUNTED)

    async def run(self, stop: Stop) -> None:
        """Look until stopped; a database that is away leaves the last figures standing."""
        while not stop.requested:
            self.heartbeat.beat()
            try:
                await self.observe()
            except DATABASE_ERRORS as error:
                if not is_infrastructure(error):
                    raise
                log.warning("outbox not observed", reason=str(error)[:300])
            await stop.wait(self._interval)

    async def observe(self) -> None:
        """Look once."""
        async with self._database.read() as session:
            connection = await driver_connection(session)
            row = await connection.fetchrow(self._sql, range(LANES), self._floor.ids)
        if row is None:
            return
        metrics = self._metrics
        metrics.oldest.set((row["at"] - row["oldest"]).total_seconds() if row["oldest"] else 0)
        metrics.oldest_parked.set((row["at"] - row["oldest_parked"]).total_seconds() if row["oldest_parked"] else 0)
        metrics.pending.set(row["pending"])
        metrics.parked_rows.set(row["parked_rows"])
        metrics.parked_keys.set(row["parked_keys"])
        metrics.retrying_keys.set(row["retrying_keys"])
