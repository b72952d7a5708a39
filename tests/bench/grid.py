"""The grid of 5,000 objects over HTTP against the same rows by bare SQL, written as JSON."""

import statistics
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import asyncpg
import httpx
import orjson
from joserfc import jwt
from joserfc.jwk import OKPKey

from chassis.testing.plugin import TestDatabase
from chessboard.app import build
from chessboard.queries import GRID
from chessboard.settings import ChessboardSettings
from tests.bench.report import Figure

OBJECTS = 5000
TENANT = UUID(int=1)
KEY = OKPKey.generate_key("Ed25519", {"kid": "bench"})
COLUMNS = (
    "id", "building", "section", "floor", "number", "status", "rooms", "area", "price", "currency", "until", "source",
    "version",
)  # fmt: skip

SEED = """
insert into chessboard.property_object
  (id, tenant_id, project_id, building_id, section, number, floor, rooms, area, price_minor, currency, status,
   reserved_until, hold_deal_id, hold_booking_id, status_source, status_changed_at, version, created_at, updated_at)
select gen_random_uuid(), $1, $2, b.id, 1 + n % 4, n::text, 1 + n / 40, n % 5, 20 + n % 100, 100000000 + n, 'RUB',
       case when n % 4 = 0 then 'Reserved' else 'Free' end,
       case when n % 4 = 0 then $3::timestamptz + make_interval(mins => n) end,
       case when n % 4 = 0 then gen_random_uuid() end, case when n % 4 = 0 then gen_random_uuid() end,
       'Crm', $3, 1, $3, $3
from chessboard.building b cross join generate_series(1, $4) n where b.project_id = $2
"""


def token() -> str:
    """Return an access token of the bench's tenant."""
    claims = {
        "iss": "bench", "aud": "pin", "sub": "bench", "exp": int(time.time()) + 3600, "tenant_id": str(TENANT),
        "scope": "chessboard:objects:read", "roles": [],
    }  # fmt: skip
    return jwt.encode({"alg": "Ed25519", "kid": "bench"}, claims, KEY, algorithms=["Ed25519"])


def settings(database: TestDatabase) -> ChessboardSettings:
    """Return the settings of a chessboard on a database."""
    issuer = {"issuer": "bench", "audience": "pin", "algorithms": ["Ed25519"]}
    return ChessboardSettings(
        env="development",
        database_url=database.system_url,
        api_database_url=database.api_url,
        migrate_database_url=database.owner_url,
        kafka_bootstrap="127.0.0.1:1",
        kafka_security="plaintext",
        rate_limit="",
        jwt_issuers=[issuer | {"jwks": {"keys": [KEY.as_dict(private=False)]}}],
    )


async def seed(admin: "asyncpg.Connection[asyncpg.Record]") -> UUID:
    """Add a project with 5 buildings of 1,000 objects, a quarter of them held."""
    project, at = uuid4(), datetime.now(UTC) + timedelta(hours=1)
    await admin.execute(
        "insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)"
        " values ($1, $2, 'bench', 1, $3, $3)",
        project,
        TENANT,
        at,
    )
    await admin.execute(
        "insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)"
        " select gen_random_uuid(), $1, $2, n::text, 4, $3, $3 from generate_series(1, 5) n",
        TENANT,
        project,
        at,
    )
    await admin.execute(SEED, TENANT, project, at, OBJECTS // 5)
    await admin.execute("vacuum (analyze) chessboard.property_object")
    return project


def p99(seconds: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(seconds, n=100)[98]


async def against_bare_sql(database: TestDatabase, rounds: int = 300) -> list[Figure]:
    """Alternate requests with the bare statement under the API's role, and compare their 99th percentiles."""
    admin = await asyncpg.connect(database.admin_url)
    project = await seed(admin)
    await admin.close()
    board = build(settings(database), frozenset({"api"}))
    bare = await asyncpg.connect(database.api_url)
    await bare.execute("select set_config('app.tenant', $1, false)", str(TENANT))
    headers = {"authorization": f"Bearer {token()}"}
    transport = httpx.ASGITransport(board.app)
    seconds: dict[str, list[float]] = {"bare": [], "plain": [], "gzip": [], "unchanged": []}
    async with httpx.AsyncClient(transport=transport, base_url="http://bench", headers=headers) as client:

        async def ask(name: str, **more: str) -> httpx.Response:
            started = time.perf_counter()
            async with client.stream("GET", f"/v1/projects/{project}/grid?seconds=false", headers=more) as answer:
                _ = [chunk async for chunk in answer.aiter_raw()]
            seconds[name].append(time.perf_counter() - started)
            return answer

        async def ask_bare() -> int:
            started = time.perf_counter()
            rows = await bare.fetch(GRID, project, *[None] * 8)
            written = orjson.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows])
            seconds["bare"].append(time.perf_counter() - started)
            return len(written)

        for _ in range(rounds):
            size = await ask_bare()
            plain = await ask("plain", **{"accept-encoding": "identity"})
            await ask("gzip", **{"accept-encoding": "gzip"})
            tag = {"accept-encoding": "identity", "if-none-match": plain.headers["etag"]}
            assert (await ask("unchanged", **tag)).status_code == 304
    await bare.close()
    await board.close()
    base = p99(seconds["bare"][10:])

    def figure(name: str, what: str) -> Figure:
        mine = seconds[name][10:]
        return Figure(
            f"grid of 5,000 objects{what}, p99 against bare SQL and JSON ({size // 1000} kB)",
            ratio=p99(mine) / base,
            bar=3.0,
            lower_is_better=True,
            detail=f"{p99(mine) * 1000:.0f} ms against {base * 1000:.0f} ms; medians"
            f" {statistics.median(mine) * 1000:.0f} and {statistics.median(seconds['bare'][10:]) * 1000:.0f} ms",
        )

    return [figure("plain", ""), figure("gzip", ", compressed"), figure("unchanged", ", unchanged (304)")]
