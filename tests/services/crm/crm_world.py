"""What the tests of crm share: a database of their own, compositions of the service on it, and rows to work on.

Rows are arranged and looked at as the superuser; what is under test connects in its own roles.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
import httpx
import orjson
from joserfc import jwt
from joserfc.jwk import OKPKey

from chassis.clock import Clock, MovableClock
from chassis.db import Database
from chassis.jobs import JobDriver
from chassis.testing.plugin import TestDatabase
from crm.app import Crm, build
from crm.settings import CrmSettings

TENANT: Final = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01")
OTHER_TENANT: Final = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a02")
READ: Final = "crm:deals:read"
WRITE: Final = "crm:deals:write"
ISSUER: Final = "tests"
AUDIENCE: Final = "pin"
ALGORITHM: Final = "Ed25519"
KEY: Final = OKPKey.generate_key("Ed25519", {"kid": "tests"})
NOBODY_LISTENS: Final = "127.0.0.1:1"
"""The reserved port tcpmux: what needs the broker or the database there doesn't get it."""

CONTENT: Final = (
    "id", "deal_id", "tenant_id", "type", "occurred_at", "due_at", "payload", "actor_user_id", "actor_role",
    "created_at",
)  # fmt: skip
"""Columns of a step that never change."""

Connection = asyncpg.Connection
Row = dict[str, Any]


def trusted_issuer() -> dict[str, Any]:
    """Return the entry of PIN_JWT_ISSUERS under which the tests' tokens are accepted."""
    return {
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "algorithms": [ALGORITHM],
        "jwks": {"keys": [KEY.as_dict(private=False)]},
    }


def token(
    tenant: UUID | None = TENANT,
    *,
    scope: str = f"{READ} {WRITE}",
    seconds: int = 600,
    key: OKPKey = KEY,
    **claims: Any,
) -> str:
    """Return a signed access token; a claim given as None is left out."""
    now = int(time.time())
    all_claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "user-7",
        "iat": now,
        "exp": now + seconds,
        "tenant_id": None if tenant is None else str(tenant),
        "roles": ["MANAGER"],
        "scope": scope,
    } | claims
    present = {name: value for name, value in all_claims.items() if value is not None}
    return jwt.encode({"alg": ALGORITHM, "kid": "tests"}, present, key, algorithms=[ALGORITHM])


@dataclass
class World:
    """One test's database with crm's schema.

    Attributes:
        database: its addresses.
        admin: the superuser's connection.
        clock: the clock of every composition built here, unless another is given.
        bootstrap: the broker's address.
    """

    database: TestDatabase
    admin: "Connection[asyncpg.Record]"
    clock: MovableClock
    bootstrap: str = NOBODY_LISTENS
    _closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    @property
    def now(self) -> datetime:
        """Where the clock stands."""
        return self.clock.instant

    def ago(self, **duration: float) -> datetime:
        """Return an instant before now (negative: after)."""
        return self.now - timedelta(**duration)

    def settings(self, **overrides: Any) -> CrmSettings:
        """Return settings for this database; fields may be overridden."""
        values: dict[str, Any] = {
            "env": "development",
            "database_url": self.database.system_url,
            "api_database_url": self.database.api_url,
            "migrate_database_url": self.database.owner_url,
            "kafka_bootstrap": self.bootstrap,
            "kafka_security": "plaintext",
            "jwt_issuers": [trusted_issuer()],
        }
        return CrmSettings(**(values | overrides))

    def crm(self, *roles: str, clock: Clock | None = None, **overrides: Any) -> Crm:
        """Build a composition of the service, closed after the test."""
        built = build(self.settings(**overrides), frozenset(roles), clock or self.clock)
        self._closing.append(built.close)
        return built

    def client(self, crm: Crm | None = None, bearer: str | None = None) -> httpx.AsyncClient:
        """Return an HTTP client of a composition (a new one with the role api if none is given)."""
        transport = httpx.ASGITransport((crm or self.crm("api")).app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {bearer or token()}"}
        client = httpx.AsyncClient(transport=transport, base_url="http://crm", headers=headers)
        self._closing.append(client.aclose)
        return client

    def system(self) -> Database:
        """Return a database handle of the system role, closed after the test."""
        return self._opened(self.database.system_url)

    def api(self, pool_size: int = 5) -> Database:
        """Return a database handle of the API's role, closed after the test."""
        return self._opened(self.database.api_url, pool_size)

    async def run_job(self, batch_size: int = 500, max_batches: int = 20, **overrides: Any) -> dict[str, int]:
        """Run one cycle of timeline-overdue in a process of its own and return its counts."""
        return await self.cycle(self.job(batch_size, max_batches, **overrides))

    def job(self, batch_size: int = 500, max_batches: int = 20, **overrides: Any) -> Crm:
        """Build a process that runs jobs with the given limits."""
        limits = {
            "job_timeline_overdue_batch_size": batch_size,
            "job_timeline_overdue_max_batches": max_batches,
        }
        return self.crm("jobs", **(limits | overrides))

    @staticmethod
    async def cycle(crm: Crm) -> dict[str, int]:
        """Run one cycle of a process's timeline-overdue and return its counts."""
        return (await driver_of(crm).run_once()).counts

    async def deal(self, tenant: UUID = TENANT, status: str = "Active", title: str = "Flat 12") -> UUID:
        """Add a deal."""
        deal_id = uuid4()
        await self.admin.execute(
            "insert into crm.deal (id, tenant_id, title, status, version, created_at, updated_at)"
            " values ($1, $2, $3, $4, 1, $5, $5)",
            deal_id,
            tenant,
            title,
            status,
            self.ago(days=30),
        )
        return deal_id

    async def step(
        self,
        deal: UUID,
        *,
        due: datetime | None,
        kind: str = "DocumentRequested",
        status: str = "InProgress",
        step_id: UUID | None = None,
        payload: dict[str, Any] | None = None,
        actor: tuple[str | None, str | None] = ("user-1", "MANAGER"),
    ) -> UUID:
        """Add a step to a deal."""
        step_id = step_id or uuid4()
        await self.admin.execute(
            "insert into crm.deal_timeline_event (id, deal_id, tenant_id, type, status, occurred_at, due_at, payload,"
            " actor_user_id, actor_role, created_at, updated_at, completed_at)"
            " select $1, d.id, d.tenant_id, $3, $4::text, $5::timestamptz, $6, $7, $8, $9, $5, $5,"
            " case when $4 = 'Done' then $5::timestamptz end"
            " from crm.deal d where d.id = $2",
            step_id,
            deal,
            kind,
            status,
            self.ago(days=20),
            due,
            orjson.dumps(payload or {}).decode(),
            *actor,
        )
        return step_id

    async def due_steps(self, count: int, deal: UUID | None = None) -> list[UUID]:
        """Add steps that are due, one minute apart, the oldest first; return their ids in the job's order."""
        deal = deal or await self.deal()
        return [await self.step(deal, due=self.ago(minutes=count - number)) for number in range(count)]

    async def step_row(self, step_id: UUID) -> Row:
        """Return a step's row."""
        return dict(await self.admin.fetchrow("select * from crm.deal_timeline_event where id = $1", step_id) or {})

    async def steps_in(self, status: str) -> set[UUID]:
        """Return the ids of all steps with a status."""
        rows = await self.admin.fetch("select id from crm.deal_timeline_event where status = $1", status)
        return {row["id"] for row in rows}

    async def outbox(self) -> list[Row]:
        """Return the outbox in id order, payload and headers parsed."""
        rows = await self.admin.fetch("select *, xid::text as tx from crm.outbox order by id")
        return [
            dict(row) | {"payload": orjson.loads(row["payload"]), "headers": orjson.loads(row["headers"])}
            for row in rows
        ]

    async def audit(self, action: str | None = None) -> list[Row]:
        """Return the audit log in id order, details parsed; one action's rows if given."""
        rows = await self.admin.fetch(
            "select * from crm.audit_log where $1::text is null or action = $1 order by id", action
        )
        return [dict(row) | {"details": orjson.loads(row["details"])} for row in rows]

    async def poison(self) -> dict[UUID, Row]:
        """Return the remembered poison rows by id."""
        return {row["id"]: dict(row) for row in await self.admin.fetch("select * from crm.job_poison")}

    async def everything(self) -> list[str]:
        """Return every row of the schema as text: equal before and after means that nothing changed."""
        tables = ("deal", "deal_timeline_event", "outbox", "audit_log", "job_poison")
        return [
            f"{table} {row[0]}"
            for table in tables
            for row in await self.admin.fetch(f"select t::text from crm.{table} t order by 1")
        ]

    async def blocked_pid(self) -> int | None:
        """Return the backend of this database that waits for a lock, if one does."""
        await self.admin.execute("select pg_stat_clear_snapshot()")
        return await self.admin.fetchval(
            "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' limit 1"
        )

    async def free_steps(self) -> set[UUID]:
        """Return the steps whose rows nobody holds."""
        looker = await asyncpg.connect(self.database.admin_url)
        try:
            rows = await looker.fetch("select id from crm.deal_timeline_event for update skip locked")
        finally:
            await looker.close()
        return {row["id"] for row in rows}

    async def close(self) -> None:
        """Close what was built."""
        for close in reversed(self._closing):
            await close()

    def _opened(self, url: str, pool_size: int = 5) -> Database:
        database = Database(url, application_name="tests", pool_size=pool_size)
        self._closing.append(database.close)
        return database


def driver_of(crm: Crm) -> JobDriver:
    """Return a process's driver of timeline-overdue."""
    (driver,) = [driver for driver in crm.drivers if driver.job.name == "timeline-overdue"]
    return driver


async def scrape(crm: Crm) -> dict[str, float]:
    """Return the samples of a process's /metrics by name and labels."""
    transport = httpx.ASGITransport(crm.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://crm") as client:
        text = (await client.get("/metrics")).text
    lines: Sequence[str] = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
