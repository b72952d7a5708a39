"""Every route of every service keeps out whom it must; and the walk that shows it notices when one doesn't."""

import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from fastapi import APIRouter, Depends, FastAPI
from sqlalchemy import text

sys.path.insert(0, str(Path(__file__).parent))

from route_walk import OPEN, doors, samples_of, services, settings_of, variables, walk

from chassis import db
from chassis.identity import Principal
from chassis.testing.plugin import DatabaseTemplates
from chassis.web import PLATFORM_ADMIN, Call, Router, operating, principal_with, reading, writing
from chassis.web.document import described_routes
from chassis.web.replays import Route

NOBODY_LISTENS = "127.0.0.1:1"
Served = Callable[[str], Any]


@pytest.fixture
async def served(databases: DatabaseTemplates, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Builds a service on a fresh database: `app, admin = await served(package)`."""
    for name in [name for name in os.environ if name.startswith("PIN_") and name not in ("PIN_KAFKA", "PIN_CASES")]:
        monkeypatch.delenv(name)
    async with AsyncExitStack() as stack:

        async def serve(package: str) -> "tuple[FastAPI, asyncpg.Connection[Any]]":
            return await stack.enter_async_context(_served(databases, package, monkeypatch))

        yield serve


@asynccontextmanager
async def _served(databases: DatabaseTemplates, package: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    database = await databases.make(package, services()[package] / "migrations")
    for name, value in (database.variables(NOBODY_LISTENS) | variables()).items():
        monkeypatch.setenv(name, value)
    built = importlib.import_module(f"{package}.app").build(settings_of(package)(), frozenset({"api"}))
    admin = await asyncpg.connect(database.admin_url)
    yield built.app, admin
    await built.close()
    await admin.close()
    await databases.drop(database)


@pytest.mark.parametrize("package", services())
async def test_every_route_keeps_out_whom_it_must(served: Served, package: str):
    app, admin = await served(package)
    assert len(list(doors(app, {}))) >= 3, "the walk finds the routes"
    assert await walk(app, admin, package, samples_of(package)) == []


@pytest.mark.parametrize("package", services())
async def test_every_route_that_changes_something_keeps_its_answers(served: Served, package: str):
    app, _ = await served(package)
    assert keeping_no_answers(app) == [], "made with chassis.web.Router"


def keeping_no_answers(app: FastAPI) -> list[str]:
    """Return the routes that change something and could not honour an Idempotency-Key."""
    return [
        f"{method} {path}"
        for path, method, route in described_routes(app)
        if method != "get" and not isinstance(route, Route)
    ]


def test_the_open_routes_are_few():
    assert {"/health/live", "/health/ready", "/metrics", "/openapi.json"} == OPEN


# The walk seen failing.


async def findings(served: Served, *routers: APIRouter) -> list[str]:
    app, admin = await served("crm")
    for router in routers:
        app.include_router(router)
    return await walk(app, admin, "crm", samples_of("crm"))


async def test_a_route_without_a_scope_is_found(served: Served):
    router = APIRouter()

    @router.get("/v1/deals-export")
    async def export() -> str:
        return "everything"

    assert await findings(served, router) == [
        "GET /v1/deals-export: it asks for no scope and is not in the list of open routes"
    ]


async def test_a_route_whose_path_has_no_sample_is_found(served: Served):
    router = Router()

    @router.get("/v1/nowhere/{nowhere_id}")
    async def nowhere(nowhere_id: str, call: Annotated[Call, reading("crm:deals:read")]) -> str:
        return nowhere_id + call.correlation_id

    found = await findings(served, router)
    assert "GET /v1/nowhere/{nowhere_id}: route_samples.py has no value for its path" in found


async def test_a_route_that_reads_past_row_level_security_is_found(served: Served):
    """With the system role's session, as somebody might open it by mistake."""
    router = Router()

    @router.get("/v1/all-deals")
    async def all_deals(call: Annotated[Call, reading("crm:deals:read")]) -> list[str]:
        async with app.state.system_database.read() as session:
            rows = await session.execute(text("select id from crm.deal"))
            return [str(row.id) for row in rows] + [call.correlation_id]

    app, admin = await served("crm")
    app.include_router(router)
    assert await walk(app, admin, "crm", samples_of("crm")) == ["GET /v1/all-deals: a stranger sees deal_id"]


async def test_a_route_of_the_platform_that_does_not_look_at_the_role_is_found(served: Served):
    """Its dependency says that it asks for a role, and forgets to."""
    router = Router()
    forgetful = principal_with("crm:admin")
    forgetful.role = PLATFORM_ADMIN  # type: ignore[attr-defined]

    @router.post("/v1/admin/jobs")
    async def run_job(call: Annotated[Call, operating("crm:admin")]) -> str:
        return call.correlation_id

    @router.post("/v1/admin/forgetful")
    async def run_forgetful(caller: Annotated[Principal, Depends(forgetful)]) -> str:
        return caller.subject

    found = await findings(served, router)
    assert "POST /v1/admin/forgetful: with the roles () it answers 200" in found
    assert not [sentence for sentence in found if "/v1/admin/jobs" in sentence]


async def test_a_route_for_a_tenants_role_that_does_not_look_at_it_or_at_the_tenant_is_found(served: Served):
    router = Router()
    forgetful = principal_with("crm:deals:write")
    forgetful.role = "SALES_ADMIN"  # type: ignore[attr-defined]

    @router.post("/v1/deals/{deal_id}/forgetful")
    async def run_forgetful(deal_id: UUID, caller: Annotated[Principal, Depends(forgetful)]) -> str:
        return f"{deal_id} {caller.subject}"

    @router.post("/v1/deals/{deal_id}/careless")
    async def run_careless(deal_id: UUID, call: Annotated[Call, writing("crm:deals:write", "SALES_ADMIN")]) -> str:
        return f"{deal_id} {call.correlation_id}"

    found = await findings(served, router)
    assert "POST /v1/deals/{deal_id}/forgetful: with the roles () it answers 200" in found
    assert [one for one in found if "careless" in one] == ["POST /v1/deals/{deal_id}/careless: a stranger gets 200"]


@pytest.mark.parametrize("table", ["deal", "deal_timeline_event"])
async def test_row_level_security_switched_off_is_found(served: Served, table: str):
    app, admin = await served("crm")
    await admin.execute(f"alter table crm.{table} disable row level security")
    found = await walk(app, admin, "crm", samples_of("crm"))
    if table == "deal":
        assert "GET /v1/deals: a stranger sees deal_id" in found
        assert "GET /v1/deals/{deal_id}: a stranger gets 200" in found
        assert "a stranger changed rows of the owner" in found
    else:
        assert found == [], "steps are reached through their deal alone"


async def test_a_setting_left_on_a_pooled_connection_is_found(served: Served, monkeypatch: pytest.MonkeyPatch):
    for_the_session = db._OPEN.text
    for name in ("tenant", "user"):
        for_the_session = for_the_session.replace(f":{name}, true)", f":{name}, false)")
    assert for_the_session != db._OPEN.text
    monkeypatch.setattr(db, "_OPEN", text(for_the_session))
    found = await findings(served)
    assert [sentence.partition(":")[0] for sentence in found] == [
        "app.tenant is left on a pooled connection", "app.user is left on a pooled connection",
    ]  # fmt: skip


async def test_a_door_that_is_shut_to_its_owner_too_is_found(served: Served):
    async def of_nothing(_: object, __: UUID) -> Mapping[str, Any]:
        return {"deal_id": uuid4()}

    app, admin = await served("crm")
    found = await walk(app, admin, "crm", of_nothing)
    assert "GET /v1/deals/{deal_id}: its owner gets 404, so that the walk shows nothing" in found


async def test_a_route_that_writes_without_keeping_answers_is_found(served: Served):
    router = APIRouter()

    @router.post("/v1/plain")
    async def plain(call: Annotated[Call, writing("crm:deals:write")]) -> str:
        return call.correlation_id

    app, _ = await served("crm")
    app.include_router(router)
    assert keeping_no_answers(app) == ["post /v1/plain"]
