"""What the tests of chessboard share: a database of their own, compositions of the service on it, and rows to work on.

Rows are arranged and looked at as the superuser; what is under test connects in its own roles.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
import httpx
import orjson
from joserfc import jwt
from joserfc.jwk import OKPKey

from chassis.clock import Clock, MovableClock
from chassis.db import Database
from chassis.testing.plugin import TestDatabase
from chessboard.app import Chessboard, build
from chessboard.settings import ChessboardSettings

TENANT: Final = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01")
OTHER_TENANT: Final = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a02")
READ: Final = "chessboard:objects:read"
WRITE: Final = "chessboard:objects:write"
ISSUER: Final = "tests"
AUDIENCE: Final = "pin"
ALGORITHM: Final = "Ed25519"
KEY: Final = OKPKey.generate_key("Ed25519", {"kid": "tests"})
NOBODY_LISTENS: Final = "127.0.0.1:1"
"""The reserved port tcpmux: what needs the broker or the database there doesn't get it."""

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
    """One test's database with chessboard's schema.

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

    def settings(self, **overrides: Any) -> ChessboardSettings:
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
        return ChessboardSettings(**(values | overrides))

    def board(self, *roles: str, clock: Clock | None = None, **overrides: Any) -> Chessboard:
        """Build a composition of the service, closed after the test."""
        built = build(self.settings(**overrides), frozenset(roles), clock or self.clock)
        self._closing.append(built.close)
        return built

    def client(self, board: Chessboard | None = None, bearer: str | None = None) -> httpx.AsyncClient:
        """Return an HTTP client of a composition (a new one with the role api if none is given)."""
        transport = httpx.ASGITransport((board or self.board("api")).app, raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {bearer or token()}"}
        client = httpx.AsyncClient(transport=transport, base_url="http://chessboard", headers=headers)
        self._closing.append(client.aclose)
        return client

    def system(self) -> Database:
        """Return a database handle of the system role, closed after the test."""
        return self._opened(self.database.system_url)

    def api(self, pool_size: int = 5) -> Database:
        """Return a database handle of the API's role, closed after the test."""
        return self._opened(self.database.api_url, pool_size)

    async def project(self, tenant: UUID = TENANT, name: str = "Riverside") -> UUID:
        """Add a project."""
        project_id = uuid4()
        await self.admin.execute(
            "insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)"
            " values ($1, $2, $3, 1, $4, $4)",
            project_id,
            tenant,
            name,
            self.ago(days=90),
        )
        return project_id

    async def building(self, project: UUID, name: str | None = None, sections: int = 2) -> UUID:
        """Add a building to a project."""
        building_id = uuid4()
        await self.admin.execute(
            "insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)"
            " select $1, p.tenant_id, p.id, $3, $4, $5, $5 from chessboard.project p where p.id = $2",
            building_id,
            project,
            name or f"Building {building_id}",
            sections,
            self.ago(days=90),
        )
        return building_id

    async def property_object(
        self,
        building: UUID | None = None,
        *,
        status: str = "Free",
        until: datetime | None = None,
        deal: UUID | None = None,
        booking: UUID | None = None,
        tenant: UUID = TENANT,
        source: str | None = None,
        version: int = 1,
        **columns: Any,
    ) -> UUID:
        """Add an object; a held one gets a deal, a booking and a time unless they are given."""
        building = building or await self.building(await self.project(tenant))
        object_id = columns.pop("id", None) or uuid4()
        held = status in ("Reserved", "Booked")
        until = until or self.ago(hours=-1)
        values = {
            "section": 1,
            "number": str(object_id)[:12],
            "floor": 3,
            "rooms": 2,
            "area": Decimal("54.30"),
            "price_minor": 1_250_000_000,
            "currency": "RUB",
            "status": status,
            "reserved_until": until if status == "Reserved" else None,
            "booked_until": until if status == "Booked" else None,
            "hold_deal_id": (deal or uuid4()) if held else None,
            "hold_booking_id": (booking or uuid4()) if held else None,
            "sold_at": self.ago(days=1) if status == "Sold" else None,
            "status_source": source or ("Crm" if held else "Import"),
            "status_changed_at": self.ago(days=1),
            "version": version,
            "created_at": self.ago(days=90),
            "updated_at": self.ago(days=1),
        } | columns
        names = ", ".join(values)
        places = ", ".join(f"${number}" for number in range(3, len(values) + 3))
        await self.admin.execute(
            f"insert into chessboard.property_object (id, tenant_id, project_id, building_id, {names})"
            f" select $1, b.tenant_id, b.project_id, b.id, {places} from chessboard.building b where b.id = $2",
            object_id,
            building,
            *values.values(),
        )
        return object_id

    async def object_row(self, object_id: UUID) -> Row:
        """Return an object's row."""
        return dict(
            await self.admin.fetchrow("select * from chessboard.property_object where id = $1", object_id) or {}
        )

    async def history(self, object_id: UUID) -> list[Row]:
        """Return an object's versions, the oldest first."""
        rows = await self.admin.fetch(
            "select * from chessboard.property_object_version where property_object_id = $1 order by version", object_id
        )
        return [dict(row) for row in rows]

    async def ledger(self, object_id: UUID) -> dict[UUID, Row]:
        """Return an object's rows of the hold ledger by booking."""
        rows = await self.admin.fetch("select * from chessboard.hold_ledger where property_object_id = $1", object_id)
        return {row["booking_id"]: dict(row) for row in rows}

    async def recalc_requests(self) -> list[UUID]:
        """Return the projects of the requests to count again, in order."""
        rows = await self.admin.fetch("select project_id from chessboard.project_recalc_request order by id")
        return [row["project_id"] for row in rows]

    async def events(self, topic: str) -> list[Row]:
        """Return the payloads that wait in the outbox for a topic, in order."""
        return [row["payload"] for row in await self.outbox() if row["topic"] == topic]

    async def outbox(self) -> list[Row]:
        """Return the outbox in id order, payload and headers parsed."""
        rows = await self.admin.fetch("select *, xid::text as tx from chessboard.outbox order by id")
        return [
            dict(row) | {"payload": orjson.loads(row["payload"]), "headers": orjson.loads(row["headers"])}
            for row in rows
        ]

    async def audit(self, action: str | None = None) -> list[Row]:
        """Return the audit log in id order, details parsed; one action's rows if given."""
        rows = await self.admin.fetch(
            "select * from chessboard.audit_log where $1::text is null or action = $1 order by id", action
        )
        return [dict(row) | {"details": orjson.loads(row["details"])} for row in rows]

    async def poison(self) -> dict[UUID, Row]:
        """Return the remembered poison rows by id."""
        return {row["id"]: dict(row) for row in await self.admin.fetch("select * from chessboard.job_poison")}

    async def blocked_pid(self) -> int | None:
        """Return the backend of this database that waits for a lock, if one does."""
        await self.admin.execute("select pg_stat_clear_snapshot()")
        return await self.admin.fetchval(
            "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' limit 1"
        )

    async def close(self) -> None:
        """Close what was built."""
        for close in reversed(self._closing):
            await close()

    def _opened(self, url: str, pool_size: int = 5) -> Database:
        database = Database(url, application_name="tests", pool_size=pool_size)
        self._closing.append(database.close)
        return database


async def scrape(board: Chessboard) -> dict[str, float]:
    """Return the samples of a process's /metrics by name and labels."""
    transport = httpx.ASGITransport(board.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://chessboard") as client:
        text = (await client.get("/metrics")).text
    lines: Sequence[str] = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
