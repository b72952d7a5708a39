"""The one sealer of an audit log: chains what is committed, and announces each sealed row, in one transaction.

One at a time, by an advisory lock that ends with the transaction: any number of processes may run a sealer. The audit
row itself is never touched.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, cast
from uuid import UUID, uuid5

import asyncpg
import orjson
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit.chain import CONTENT, Head, find_head, link_hash
from chassis.clock import Clock
from chassis.db import DATABASE_ERRORS, Database, copy_bytes, copy_lines, driver_connection, is_infrastructure
from chassis.gathering import gathered
from chassis.ids import EVENTS_NAMESPACE
from chassis.instants import rfc3339
from chassis.outbox import Cause, EventType, Message, MessageRefused, Outbox
from chassis.platform_events import SYSTEM_KEY, AuditRecordedPayload
from chassis.runtime import Heartbeat, Stop

ROWS_PER_TURN: Final = 2000
"""Message key of what no person did."""

_LOCK = "select pg_try_advisory_xact_lock(hashtext('{schema}.audit_seal'), 0)"
# The place is given as values: a row compared with a subquery can't be looked up in an index.
_PLACE = """
select l.xid::text as xid, l.id, l.xid >= pg_snapshot_xmin(pg_current_snapshot()) as is_to_come
from {schema}.audit_seal s left join {schema}.audit_log l on l.id = s.audit_id
order by s.sequence desc limit 1
"""
_UNSEALED = """
select {content} from {schema}.audit_log a
where (a.xid, a.id) > ($1::text::xid8, $2::bigint) and a.xid < pg_snapshot_xmin(pg_current_snapshot())
order by a.xid, a.id limit $3
"""
_LAST_KEPT = """
select l.xid::text as xid, l.id from {schema}.audit_seal s join {schema}.audit_log l on l.id = s.audit_id
order by s.sequence desc limit 1
"""
# By place and by id: after a restore into a server whose transaction ids start over, no new row has a later place.
_OLDEST = """
select min(w.occurred_at) from (
  (select a.occurred_at from {schema}.audit_log a
   where (a.xid, a.id) > ($1::text::xid8, $2::bigint) order by a.xid, a.id limit 1)
  union all
  (select a.occurred_at from {schema}.audit_log a
   where a.id > (select max(s.audit_id) from {schema}.audit_seal s) order by a.id limit 1)
) as w
"""
_COLUMNS = ("sequence", "audit_id", "previous_hash", "hash", "sealed_at")
log = structlog.get_logger(__name__)


class AuditBroken(Exception):
    """The row of the last seal is gone or out of place: nothing is sealed on top of it before a person has looked."""


@dataclass(frozen=True, slots=True)
class Link:
    """A sealed row: its position, its hash and the one before."""

    sequence: int
    row: asyncpg.Record
    previous: bytes
    hash: bytes

    @property
    def correlation_id(self) -> str:
        """The row's correlation id, which the announcement carries on."""
        return str(self.row["correlation_id"])


class AuditSealer:
    """The loop that seals; several processes may run one, one of them works.

    Args:
        database: the service's database under its system role.
        clock: for `sealed_at` and the age of what waits.
        schema: the service's schema.
        registry: where the figures go.
        event: what a sealed row is announced as (`platform_events.audit_recorded`); None: it is not announced.
        interval: seconds between turns.
    """

    name = "audit sealer"

    def __init__(
        self,
        database: Database,
        clock: Clock,
        *,
        schema: str,
        registry: CollectorRegistry,
        event: EventType | None,
        interval: float = 1.0,
    ) -> None:
        self.heartbeat = Heartbeat(longest_silence=max(90.0, interval * 6))
        self._database = database
        self._clock = clock
        self._schema = schema
        self._event = event
        self._interval = interval
        self._outbox = Outbox(schema)
        self._sql = {
            name: statement.format(schema=schema, content=CONTENT)
            for name, statement in {
                "lock": _LOCK, "place": _PLACE, "unsealed": _UNSEALED, "last kept": _LAST_KEPT, "oldest": _OLDEST,
            }.items()
        }  # fmt: skip
        self._sealed = Counter("pin_audit_sealed_total", "Audit rows sealed.", registry=registry)
        self._oldest = Gauge(
            "pin_audit_oldest_unsealed_age_seconds", "Age of the oldest audit row without a seal.", registry=registry
        )

    async def run(self, stop: Stop) -> None:
        """Seal until stopped; a database that is away is waited for."""
        while not stop.requested:
            self.heartbeat.beat()
            try:
                sealed = await self._turn()
            except DATABASE_ERRORS as error:
                if not is_infrastructure(error):
                    raise
                log.warning("audit not sealed", reason=str(error)[:300])
                sealed = 0
            if sealed < ROWS_PER_TURN:
                await stop.wait(self._interval)

    async def _turn(self) -> int:
        """Seal a batch, and show the age of what waits whether or not that works: an alert rests on it."""
        sealed = 0
        try:
            sealed = await self.run_once()
        finally:
            if sealed < ROWS_PER_TURN:
                await self.observe()
        return sealed

    async def run_once(self) -> int:
        """Seal one batch.

        Returns:
            How many rows were sealed; 0 as well where another process is sealing.

        Raises:
            AuditBroken: the audit row of the last seal is gone, or its transaction id is one that nobody has had yet.
            sqlalchemy.exc.DBAPIError, asyncpg.PostgresError: the database failed; nothing was sealed.
        """
        async with self._database.write() as session:
            connection = await driver_connection(session)
            if not await connection.fetchval(self._sql["lock"]):
                return 0
            head = await find_head(session, self._schema)
            rows = await connection.fetch(self._sql["unsealed"], *await self._place(connection), ROWS_PER_TURN)
            if rows:
                await self._write(session, _chained(head, rows), await self._clock.now(session))
        self._sealed.inc(len(rows))
        return len(rows)

    async def observe(self) -> None:
        """Set the age of the oldest unsealed row; after the last sealed one that is there, should some be gone."""
        async with self._database.read() as session:
            connection = await driver_connection(session)
            last = await connection.fetchrow(self._sql["last kept"]) or ("0", 0)
            oldest: datetime | None = await connection.fetchval(self._sql["oldest"], *last)
            now = await self._clock.now(session)
        self._oldest.set(0 if oldest is None else max(0.0, (now - oldest).total_seconds()))

    async def _place(self, connection: "asyncpg.Connection[asyncpg.Record]") -> tuple[str, int]:
        """Return where in the order the chain ends: transaction id and id of the last sealed row."""
        row = await connection.fetchrow(self._sql["place"])
        if row is None:
            return "0", 0
        if row["id"] is None:
            raise AuditBroken("the audit row of the last seal is gone; run `audit verify`")
        if row["is_to_come"]:
            raise AuditBroken(
                "the transaction id of the last seal's row is one that nobody has had yet: what is written now sorts"
                " before it; run `audit verify`"
            )
        return row["xid"], row["id"]

    async def _write(self, session: AsyncSession, links: Sequence[Link], now: datetime) -> None:
        sealed_at = rfc3339(now)
        async with gathered(session):
            await copy_lines(
                session, f"{self._schema}.audit_seal", _COLUMNS, [_line(link, sealed_at) for link in links]
            )
            if self._event is not None:
                await self._announce(session, links, self._event)

    async def _announce(self, session: AsyncSession, links: Sequence[Link], event: EventType) -> None:
        for correlation_id, group in groupby(links, key=attrgetter("correlation_id")):
            same, cause = list(group), Cause(correlation_id)
            try:
                await self._outbox.emit(session, [self._message(link, event) for link in same], cause)
            except MessageRefused as error:
                log.warning("audit details not announced", correlation_id=correlation_id, reason=str(error)[:300])
                short = [self._message(link, event, details={"omitted": "too large"}) for link in same]
                await self._outbox.emit(session, short, cause)

    def _message(self, link: Link, event: EventType, details: dict[str, str] | None = None) -> Message:
        row = link.row
        tenant: UUID | None = row["tenant_id"]
        payload: AuditRecordedPayload = {
            "auditId": str(row["id"]),
            "sequence": link.sequence,
            "occurredAt": rfc3339(row["occurred_at"]),
            "actor": row["actor"],
            "action": row["action"],
            "entityType": row["entity_type"],
            "entityId": str(row["entity_id"]),
            "tenantId": None if tenant is None else str(tenant),
            "correlationId": link.correlation_id,
            "details": cast("dict[str, Any]", orjson.Fragment(row["details"])) if details is None else details,
            "previousHash": link.previous.hex(),
            "hash": link.hash.hex(),
        }
        return Message(
            event,
            row["actor"] or SYSTEM_KEY,
            payload,
            row["occurred_at"],
            tenant_id=tenant,
            aggregate_id=str(row["id"]),
            event_id=uuid5(EVENTS_NAMESPACE, f"audit/{self._schema}/{row['id']}"),
        )


def _chained(head: Head, rows: Sequence[asyncpg.Record]) -> list[Link]:
    links, previous = [], head.hash
    for sequence, row in enumerate(rows, start=head.sequence + 1):
        link = Link(sequence, row, previous, link_hash(previous, sequence, row))
        links.append(link)
        previous = link.hash
    return links


def _line(link: Link, sealed_at: str) -> str:
    return f"{link.sequence}\t{link.row['id']}\t{copy_bytes(link.previous)}\t{copy_bytes(link.hash)}\t{sealed_at}"
