"""Consumer lag, read from the broker by a process that is well: a dead consumer can't report its own.

Every service's process looks at all groups of the platform, so that each is watched as long as one process lives.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Gauge

from chassis.consumers.declaration import Consumer
from chassis.messaging import BrokerUnavailable, KafkaAddress, read_lag
from chassis.runtime import Heartbeat, Stop

GROUPS: Final = "pin."
"""How the names of the platform's groups begin."""

log = structlog.get_logger(__name__)


class LagWatch:
    """Keeps `pin_consumer_lag{group, topic}` fresh.

    Args:
        address: where Kafka is.
        registry: where the gauge is registered.
        declared: the service's own consumers: their lag counts before they have ever committed.
        interval: seconds between looks.
    """

    name = "lag watch"

    def __init__(
        self,
        address: KafkaAddress,
        registry: CollectorRegistry,
        declared: Sequence[Consumer] = (),
        interval: float = 15.0,
    ) -> None:
        self.heartbeat = Heartbeat(longest_silence=max(120.0, interval * 6))
        self._address = address
        self._declared = {consumer.group: consumer.topics for consumer in declared}
        self._interval = interval
        self._lag = Gauge(
            "pin_consumer_lag", "Records that a consumer group has not handled.", ["group", "topic"], registry=registry
        )

    async def run(self, stop: Stop) -> None:
        """Look until stopped; a broker that is away leaves the last figures standing."""
        while not stop.requested:
            self.heartbeat.beat()
            try:
                await self.observe()
            except BrokerUnavailable as error:
                log.warning("lag not observed", reason=str(error)[:300])
            await stop.wait(self._interval)

    async def observe(self) -> None:
        """Look once.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        lag: defaultdict[tuple[str, str], int] = defaultdict(int)
        for group, places in (await read_lag(self._address, GROUPS, self._declared)).items():
            for place, waiting in places.items():
                lag[group, place.topic] += waiting
        for (group, topic), waiting in lag.items():
            self._lag.labels(group, topic).set(waiting)
