"""The lost-release radar: why CRM's release of a hold never came, as far as the database and Kafka can tell.

Nothing here can keep the safety net from its work: it looks after the batch is committed, briefly, and what can't be
asked is unknown.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from uuid import UUID

import structlog

from chassis.db import DATABASE_ERRORS, Database
from chassis.messaging import BrokerUnavailable, KafkaAddress, partition_of, read_overdue
from chessboard import expired_holds
from chessboard.domain import (
    NOTHING_KNOWN,
    Evidence,
    LostBecause,
    StatusChanged,
    StatusSource,
    bookings_of,
    why_lost,
)
from chessboard.messages import CRM_TOPICS

SEVERAL: int = 2
"""Bookings that must have been over before CRM's silence says more than that one message is missing."""
log = structlog.get_logger(__name__)


class Radar:
    """Looks for the causes of lost releases.

    Args:
        database: under the system role.
        address: where Kafka is.
        consumer: the group whose work the safety net does.
        silence: for how long CRM must have released nothing to count as silent.
        patience: seconds to wait for Kafka.
    """

    def __init__(
        self, database: Database, address: KafkaAddress, consumer: str, silence: timedelta, patience: float = 5.0
    ) -> None:
        self._database = database
        self._address = address
        self._consumer = consumer
        self._silence = silence
        self._patience = patience

    async def explain(
        self, lost: Sequence[StatusChanged], as_of: datetime, grace: timedelta
    ) -> dict[UUID, LostBecause]:
        """Return the cause for each object that the safety net has freed in one batch."""
        try:
            evidence = await self._look(lost, as_of, grace)
        except DATABASE_ERRORS as error:
            log.warning("radar can't see", reason=str(error)[:300])
            evidence = NOTHING_KNOWN
        return {change.property_object_id: why_lost(change.property_object_id, evidence) for change in lost}

    async def _look(self, lost: Sequence[StatusChanged], as_of: datetime, grace: timedelta) -> Evidence:
        ids = [change.property_object_id for change in lost]
        since = as_of - self._silence
        async with self._database.read() as session:
            set_aside = await expired_holds.find_set_aside(session, self._consumer, ids)
            heard = await expired_holds.has_released(session, StatusSource.CRM.value, since, as_of)
            several = bookings_of(lost) >= SEVERAL or await expired_holds.has_released(
                session, StatusSource.EXPIRATION_JOB.value, since, as_of
            )
        return Evidence(set_aside, await self._waiting(ids, as_of - grace), several and not heard)

    async def _waiting(self, ids: Collection[UUID], before: datetime) -> frozenset[UUID] | None:
        """Return the objects in whose partitions the consumer has still to read what came before an instant."""
        try:
            overdue = await read_overdue(self._address, self._consumer, set(CRM_TOPICS), before, self._patience)
        except BrokerUnavailable as error:
            log.warning("radar can't see", reason=str(error)[:300])
            return None
        partitions: dict[str, dict[int, bool]] = {}
        for place, waits in overdue.items():
            partitions.setdefault(place.topic, {})[place.partition] = waits
        return frozenset(
            one for one in ids if any(waits[partition_of(str(one).encode(), waits)] for waits in partitions.values())
        )
