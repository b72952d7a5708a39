"""What a service lets its callers do at once, from where, and what it writes down about them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any
from uuid import UUID

import asyncpg
import httpx
import pytest
import structlog
import time_machine
import uvicorn
from fastapi import Depends, HTTPException
from joserfc import jwt
from joserfc.jwk import OKPKey
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, field_validator
from sqlalchemy import text
from structlog.testing import capture_logs

from chassis.clock import DatabaseClock
from chassis.db import Database
from chassis.idempotency import IdempotencyKeys
from chassis.identity import Principal, TokenVerifier
from chassis.problems import CODES
from chassis.settings import JwtIssuer
from chassis.testing.plugin import TestDatabase
from chassis.web import Call, Router, create_app, principal_with, writing
from chassis.web import operations as operations_module

KEY = OKPKey.generate_key("Ed25519", {"kid": "k"})
FAR = JwtIssuer(issuer="far", audience="pin", algorithms=["Ed25519"], jwks_url="http://127.0.0.1:1/keys")
ISSUER = JwtIssuer(issuer="i", audience="pin", algorithms=["Ed25519"], jwks={"keys": [KEY.as_dict(private=False)]})
router = Router()


class Body(BaseModel):
    """What the test's route takes."""

    name: str

    @field_validator("name")
    @classmethod
    def _is_odd(cls, value: str) -> str:
        if len(value) % 2 == 0:
            raise ValueError("must have an odd length")
        return value


@router.get("/who/{number}")
async def who(number: int, caller: Annotated[Principal, Depends(principal_with("any"))]) -> str:
    return f"{caller.subject} {number}"


@router.post("/names")
async def names(body: Body, caller: Annotated[Principal, Depends(principal_with("any"))]) -> str:
    return body.name + caller.subject


@router.post("/things", status_code=201)
async def add(body: dict[str, int], call: Annotated[Call, writing("any")]) -> int:
    statement = text("insert into crm.thing (id, rank) values (gen_random_uuid(), :rank)")
    await call.session.execute(statement, {"rank": body["rank"]})
    return body["rank"]


@router.post("/touch", status_code=201)
async def touch(call: Annotated[Call, writing("any")]) -> int:
    await call.session.execute(text("insert into crm.thing (id, rank) values (gen_random_uuid(), 1)"))
    return 1


def app_with(**settings: Any) -> Any:
    state = {"verifier": TokenVerifier([ISSUER, FAR]), "clock": DatabaseClock(), **settings.pop("state", {})}
    return create_app(title="t", version="1", registry=CollectorRegistry(), routers=[router], state=state, **settings)


def client_of(
    app: Any, subject: str = "u", tenant: int = 1, issuer: str = "i", scope: str = "any"
) -> httpx.AsyncClient:
    claims = {
        "iss": issuer,
        "aud": "pin",
        "sub": subject,
        "exp": 2**33,
        "tenant_id": str(UUID(int=tenant)),
        "scope": scope,
    }
    token = jwt.encode({"alg": "Ed25519", "kid": "k"}, claims, KEY, algorithms=["Ed25519"])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://t", headers={"authorization": f"Bearer {token}"})


# Rate.


async def test_a_principal_beyond_its_rate_is_told_when_to_come_back_and_others_are_served():
    app = app_with(rate_limit="3/minute")
    client = client_of(app)
    with time_machine.travel(datetime(2026, 11, 30, 9, 0, tzinfo=UTC), tick=False) as clock:
        answers = [await client.get("/who/1") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert [answer.headers["ratelimit-remaining"] for answer in answers] == ["2", "1", "0", "0"]
        refused = answers[-1]
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.json()["code"] == "rate_limited"
        assert refused.headers["ratelimit-limit"] == "3"
        assert 1 <= int(refused.headers["retry-after"]) <= 61
        for other in (client_of(app, subject="v"), client_of(app, tenant=2)):
            assert (await other.get("/who/1")).status_code == 200
        clock.shift(121)
        assert (await client.get("/who/1")).status_code == 200


@pytest.mark.parametrize(("rate", "spread"), [("3/minute", 0), ("7/minute", 5), ("10/second", 0), ("2/hour", 1000)])
async def test_retry_after_is_long_enough_and_not_longer(rate: str, spread: int):
    app = app_with(rate_limit=rate)
    client = client_of(app)
    with time_machine.travel(datetime(2026, 11, 30, 9, 0, 12, tzinfo=UTC), tick=False) as clock:
        for _ in range(4):
            while (answer := await client.get("/who/1")).status_code == 200:
                clock.shift(spread)
            wait = int(answer.headers["retry-after"])
            if wait > 1:
                clock.shift(wait - 1.001)
                assert (await client.get("/who/1")).status_code == 429
                clock.shift(1.002)
            else:
                clock.shift(1.001)
            assert (await client.get("/who/1")).status_code == 200


async def test_refused_requests_count_and_open_routes_do_not():
    app = app_with(rate_limit="2/minute")
    client = client_of(app, scope="other")
    assert [(await client.get("/who/1")).status_code for _ in range(3)] == [403, 403, 429]
    assert (await client.get("/health/live")).status_code == 200


async def test_who_is_not_known_is_not_counted():
    app = app_with(rate_limit="1/minute")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        assert {(await client.get("/who/1")).status_code for _ in range(3)} == {401}


async def test_without_a_rate_there_is_no_limit():
    answers = await asyncio.gather(*(client_of(app_with()).get("/who/1") for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    assert "ratelimit-limit" not in answers[0].headers


# Web origins.

ASK = {"origin": "https://app.example", "access-control-request-method": "POST"}


async def test_pages_of_a_listed_origin_may_call_and_read_the_answer():
    client = client_of(app_with(cors_origins=["https://app.example"]))
    asked = await client.options(
        "/names", headers=ASK | {"access-control-request-headers": "if-match, idempotency-key"}
    )
    assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://app.example")
    for path in ("/who/1", "/who/x", "/nothing"):
        answer = await client.get(path, headers={"origin": "https://app.example"})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "etag" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "https://app.example.evil.example", "null", "http://app.example"]
)
async def test_pages_of_another_origin_may_not(origin: str):
    client = client_of(app_with(cors_origins=["https://app.example"]))
    asked = await client.options("/names", headers=ASK | {"origin": origin})
    assert (asked.status_code, asked.headers["content-type"]) == (400, "application/problem+json")
    assert asked.json()["code"] == "cors_refused"
    answer = await client.get("/who/1", headers={"origin": origin})
    assert "access-control-allow-origin" not in answer.headers


async def test_without_a_list_no_page_may():
    client = client_of(app_with())
    assert (await client.options("/names", headers=ASK)).status_code == 405
    assert "access-control-allow-origin" not in (await client.get("/who/1", headers=ASK)).headers


# Log.


async def test_each_request_is_one_line_without_its_query_and_body():
    client = client_of(app_with())
    structlog.configure(processors=[structlog.contextvars.merge_contextvars])
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as lines:
        await client.get("/who/17?secret=hunter2", headers={"x-request-id": "r-1"})
        await client.post("/names", json={"name": "hunter2"})
        await client.get("/health/live")
    for line in lines:
        assert isinstance(line.pop("ms"), float)
    assert "hunter2" not in str(lines)
    assert lines[0]["correlation_id"] == "r-1"
    seen = [(line["log_level"], line["method"], line["route"], line["status"], line["subject"]) for line in lines]
    assert seen == [
        ("info", "GET", "/who/{number}", 422, "u"),
        ("info", "POST", "/names", 200, "u"),
        ("debug", "GET", "/health/live", 200, None),
    ]
    assert {line["event"] for line in lines} == {"request"}


# Answers.


async def test_the_words_of_a_check_come_without_the_librarys_prefix():
    answer = await client_of(app_with()).post("/names", json={"name": "even"})
    assert answer.json()["errors"] == [{"location": "body.name", "message": "must have an odd length"}]


@pytest.mark.parametrize("status", [400, 402, 404, 406, 409, 415, 418, 429, 500, 503])
async def test_a_refusal_of_the_framework_is_a_problem_and_no_bare_detail(status: int):
    refusing = Router()

    @refusing.get("/refuse")
    async def refuse() -> None:
        raise HTTPException(status, "no", headers={"x-why": "because"})

    app = app_with()
    app.include_router(refusing)
    answer = await client_of(app).get("/refuse")
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert set(answer.json()) == {"type", "title", "status", "code", "detail"}
    assert answer.json()["code"] in CODES


async def test_answers_are_not_for_caches():
    client = client_of(app_with())
    for path in ("/who/1", "/who/x", "/nothing"):
        assert (await client.get(path)).headers["cache-control"] == "no-store"


async def test_a_token_whose_issuer_is_away_is_503_and_not_the_callers_fault():
    answer = await client_of(app_with(), issuer="far").get("/who/1")
    assert (answer.status_code, answer.json()["code"]) == (503, "issuer_unavailable")
    assert int(answer.headers["retry-after"]) > 0


# Readiness.


async def test_a_check_that_hangs_is_named_after_a_bounded_time(monkeypatch: pytest.MonkeyPatch):
    assert operations_module.CHECK_SECONDS <= 3
    monkeypatch.setattr(operations_module, "CHECK_SECONDS", 0.05)
    ended: list[str] = []

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hangs")

    async def fine() -> None:
        return

    async def slow_itself() -> None:
        raise TimeoutError("its own")

    client = client_of(app_with(ready={"one": hangs, "two": fine, "three": hangs, "four": slow_itself}))
    async with asyncio.timeout(5):
        answer = await client.get("/health/ready")
    assert answer.status_code == 503
    assert answer.json()["errors"] == [
        {"location": "one", "message": "no answer within 0.05 s"},
        {"location": "three", "message": "no answer within 0.05 s"},
        {"location": "four", "message": "TimeoutError: its own"},
    ]
    assert ended == ["hangs", "hangs"]


# A client that goes away.


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """Serve an application on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    yield listener.getsockname()[1]
    server.should_exit = True
    await running
    listener.close()


def raw_request(client: httpx.AsyncClient, body: bytes, declared: int, path: str = "/things") -> bytes:
    bearer = client.headers["authorization"]
    return (
        f"POST {path} HTTP/1.1\r\nhost: t\r\nauthorization: {bearer}\r\ncontent-type: application/json\r\n"
        f"idempotency-key: k\r\ncontent-length: {declared}\r\n\r\n"
    ).encode() + body


@pytest.mark.parametrize("path", ["/things", "/touch"])
async def test_a_client_that_leaves_in_the_middle_of_its_body_changes_nothing_and_holds_no_connection(
    path: str, scratch: TestDatabase, opened: Callable[..., Database], admin: asyncpg.Connection, eventually: Callable
):
    database = opened(scratch.api_url, pool_size=1)
    app = app_with(state={"api_database": database}, idempotency=IdempotencyKeys("crm"))
    with capture_logs() as lines:
        async with served(app) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw_request(client_of(app), b'{"ra', 11, path))
            await writer.drain()
            writer.close()
            await eventually(lambda: any(line["event"] == "request" for line in lines))
    assert database.engine.pool.checkedout() == 0
    assert await admin.fetchval("select count(*) from crm.thing") == 0
    assert not [line for line in lines if line["log_level"] == "error"]


async def test_a_request_that_came_whole_runs_to_its_end_though_the_client_has_left(
    scratch: TestDatabase, opened: Callable[..., Database], admin: asyncpg.Connection, eventually: Callable
):
    """And its retry under the same key gets the answer that the client missed."""
    database = opened(scratch.api_url, pool_size=1)
    app = app_with(state={"api_database": database}, idempotency=IdempotencyKeys("crm"))
    client = client_of(app)
    async with served(app) as port, admin.transaction():
        await admin.execute("lock table crm.thing in exclusive mode")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_request(client, b'{"rank": 4}', 11))
        await writer.drain()

        async def blocked() -> bool:
            return bool(await admin.fetchval("select count(*) from pg_locks where not granted"))

        await eventually(blocked)
        writer.close()
    assert database.engine.pool.checkedout() == 0
    again = await client.post("/things", json={"rank": 4}, headers={"idempotency-key": "k"})
    assert (again.status_code, again.headers.get("idempotency-replayed")) == (201, "true")
    assert await admin.fetchval("select array_agg(rank) from crm.thing") == [4]


async def test_a_key_whose_answer_is_never_handed_over_is_not_committed(
    scratch: TestDatabase, opened: Callable[..., Database], admin: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
):
    app = app_with(state={"api_database": opened(scratch.api_url)}, idempotency=IdempotencyKeys("crm"))
    monkeypatch.setattr("chassis.web.replays._Attempt.settle", lambda *_: asyncio.sleep(0))
    answer = await client_of(app).post("/things", json={"rank": 4}, headers={"idempotency-key": "k"})
    assert answer.status_code == 500
    assert await admin.fetchval("select count(*) from crm.thing") == 0
    assert await admin.fetchval("select count(*) from crm.idempotency_key") == 0
