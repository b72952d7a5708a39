"""Every answer of an application that is not a success is a problem document, and none tells what is inside."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import orjson
import pytest
import structlog
from fastapi import APIRouter, Query
from joserfc import jwt
from joserfc.jwk import OKPKey
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict
from sqlalchemy import text

from chassis.clock import DatabaseClock
from chassis.db import Database
from chassis.identity import TokenVerifier
from chassis.messaging import BrokerUnavailable
from chassis.settings import JwtIssuer
from chassis.testing.plugin import DatabaseTemplates, TestDatabase
from chassis.web import MAX_BODY_BYTES, MOST_ERRORS, Call, ErrorAnswer, create_app, reading, writing

PROBLEM = "application/problem+json"
KEY = OKPKey.generate_key("Ed25519", {"kid": "test"})
ISSUER = JwtIssuer(issuer="test", audience="pin", algorithms=["Ed25519"], jwks={"keys": [KEY.as_dict(private=False)]})
SECRET = "hunter2-at-10.0.0.7"
ADD = text("insert into crm.thing (id, rank, note) values (gen_random_uuid(), :rank, :note)")


class NotThere(Exception):
    """A domain error."""


class NotThereAtAll(NotThere):
    """A more special one."""


class Body(BaseModel):
    """What the test's routes take."""

    model_config = ConfigDict(extra="forbid")
    rank: int
    note: str = ""


router = APIRouter(prefix="/v1/things")


@router.post("", status_code=201)
async def add(body: Body, call: Annotated[Call, writing("things:write")]) -> dict[str, int]:
    await call.session.execute(ADD, {"rank": body.rank, "note": body.note})
    return {"rank": body.rank}


@router.post("/json", status_code=201)
async def add_json(body: dict[str, Any], call: Annotated[Call, writing("things:write")]) -> dict[str, int]:
    await call.session.execute(text("select cast(:document as jsonb)"), {"document": json.dumps(body)})
    return {"stored": 1}


@router.get("/{thing_id}")
async def get(thing_id: UUID, call: Annotated[Call, reading("things:read")]) -> dict[str, str]:
    await call.session.execute(text("select 1"))
    return {"id": str(thing_id), "caller": call.principal.subject, "correlation": call.correlation_id}


@router.get("/{thing_id}/write-on-read")
async def write_on_read(thing_id: UUID, call: Annotated[Call, reading("things:read")]) -> None:
    await call.session.execute(ADD, {"rank": 1, "note": ""})


plain = APIRouter()


@plain.get("/raise/{kind}")
async def fail(kind: str) -> None:
    structlog.get_logger("route").info("about to fail")
    errors: dict[str, Exception] = {
        "not-there": NotThere("thing 7 is not there"),
        "not-there-at-all": NotThereAtAll("never was"),
        "unexpected": ZeroDivisionError(SECRET),
        "os": ConnectionRefusedError(SECRET),
        "driver": asyncpg.InterfaceError(f"connection is closed {SECRET}"),
        "server": asyncpg.TooManyConnectionsError(SECRET),
        "sql": asyncpg.UndefinedColumnError(SECRET),
    }
    raise errors[kind]


@plain.get("/query")
async def query(limit: Annotated[int, Query(ge=1, le=9)], name: str) -> dict[str, int]:
    return {name: limit}


@plain.post("/echo")
async def echo(body: dict[str, Any]) -> dict[str, int]:
    return {"fields": len(body)}


class Scene:
    """An application under test and a client that carries a token."""

    def __init__(self, database: Database, ready: dict[str, Any] | None = None) -> None:
        self.registry = CollectorRegistry()
        self.app = create_app(
            title="test",
            version="1",
            registry=self.registry,
            routers=[router, plain],
            errors={NotThere: ErrorAnswer(404, "not_there"), NotThereAtAll: ErrorAnswer(410, "gone")},
            ready=ready,
            state={"api_database": database, "verifier": TokenVerifier([ISSUER]), "clock": DatabaseClock()},
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://test",
            headers={"authorization": f"Bearer {token()}"},
        )

    def requests(self, **labels: str) -> float | None:
        return self.registry.get_sample_value("pin_http_request_duration_seconds_count", labels)

    def series(self) -> set[tuple[str, str, str]]:
        """Return the (method, route, status) of all series there are."""
        [family] = [f for f in self.registry.collect() if f.name == "pin_http_request_duration_seconds"]
        return {
            (s.labels["method"], s.labels["route"], s.labels["status"])
            for s in family.samples
            if s.name.endswith("_count")
        }


def token(scope: str = "things:read things:write", **claims: object) -> str:
    body = {"iss": "test", "aud": "pin", "sub": "user-1", "exp": 2**33, "tenant_id": str(UUID(int=1)), "scope": scope}
    return jwt.encode({"alg": "Ed25519", "kid": "test"}, body | claims, KEY, algorithms=["Ed25519"])


@pytest.fixture
async def scene(databases: DatabaseTemplates, opened: Callable[..., Database]) -> AsyncIterator[Scene]:
    """An application over a database that has none of its tables."""
    made = Scene(opened(databases.server.url()))
    async with made.client:
        yield made


@pytest.fixture
async def stored(scratch: TestDatabase, opened: Callable[..., Database]) -> AsyncIterator[Scene]:
    """An application over `crm.thing`."""
    made = Scene(opened(scratch.api_url))
    async with made.client:
        yield made


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """Check that an answer is a problem document in full and return it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    assert re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", answer.headers["x-request-id"])
    document: dict[str, Any] = orjson.loads(answer.content)
    assert (document["status"], document["code"]) == (status, code)
    assert document["type"] == f"urn:pin:problem:{code}"
    assert document["title"]
    assert document["detail"]
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    return document


# --- problems


async def test_an_unknown_path_is_a_problem(scene: Scene):
    problem(await scene.client.get("/no/such/path"), 404, "not_found")


async def test_a_method_that_a_path_does_not_have_is_a_problem(scene: Scene):
    answer = await scene.client.delete("/query")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize("body", [b"{", b"", b"[1,", b"\xff\xfe", b'{"a": ' * 100_000, b"nonsense"])
async def test_a_body_that_is_not_json_is_a_problem(scene: Scene, body: bytes):
    answer = await scene.client.post("/echo", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)
    problem(answer, answer.status_code, answer.json()["code"])


async def test_malformed_json_is_400(scene: Scene):
    answer = await scene.client.post("/echo", content=b'{"a": ', headers={"content-type": "application/json"})
    problem(answer, 400, "malformed_json")


@pytest.mark.parametrize("kind", ["text/plain", "application/xml", "multipart/form-data; boundary=x", ""])
async def test_a_body_of_another_kind_is_a_problem(scene: Scene, kind: str):
    answer = await scene.client.post("/echo", content=b'{"a": 1}', headers={"content-type": kind})
    assert answer.status_code in (400, 415, 422)
    problem(answer, answer.status_code, answer.json()["code"])


async def test_invalid_input_names_each_place_and_not_the_input(scene: Scene):
    answer = await scene.client.get("/query", params={"limit": "10", "other": SECRET})
    document = problem(answer, 422, "validation_error")
    assert [error["location"] for error in document["errors"]] == ["query.limit", "query.name"]
    answer = await scene.client.post("/v1/things", json={"rank": SECRET, "surplus": 1})
    document = problem(answer, 422, "validation_error")
    assert [error["location"] for error in document["errors"]] == ["body.rank", "body.surplus"]


async def test_an_id_that_is_none_is_invalid(scene: Scene):
    problem(await scene.client.get("/v1/things/7"), 422, "validation_error")


async def test_a_request_that_is_wrong_in_many_places_gets_a_short_answer(scene: Scene):
    body = {f"field{n}": n for n in range(20_000)}
    document = problem(await scene.client.post("/v1/things", json=body), 422, "validation_error")
    assert len(document["errors"]) == MOST_ERRORS


async def test_domain_errors_have_the_answer_of_their_most_special_class(scene: Scene):
    document = problem(await scene.client.get("/raise/not-there"), 404, "not_there")
    assert document["detail"] == "thing 7 is not there"
    problem(await scene.client.get("/raise/not-there-at-all"), 410, "gone")


async def test_what_nobody_expected_is_500_with_its_correlation_id_and_no_internals(scene: Scene):
    answer = await scene.client.get("/raise/unexpected", headers={"x-request-id": "req-1"})
    problem(answer, 500, "internal_error")
    assert answer.headers["x-request-id"] == "req-1"
    assert scene.requests(method="GET", route="/raise/{kind}", status="500") == 1


async def test_the_log_line_of_a_failure_carries_its_correlation_id(scene: Scene):
    lines: list[dict[str, Any]] = []

    def keep(_: object, __: str, event: dict[str, Any]) -> str:
        lines.append(event)
        raise structlog.DropEvent

    structlog.configure(processors=[structlog.contextvars.merge_contextvars, keep])
    for kind in ("unexpected", "sql", "server"):
        await scene.client.get(f"/raise/{kind}", headers={"x-request-id": "req-1"})
    said = [line["event"] for line in lines if line["event"] != "about to fail"]
    assert said == ["request failed", "request", "request failed", "request", "database unavailable", "request"]
    assert {line.get("correlation_id") for line in lines} == {"req-1"}


@pytest.mark.parametrize("kind", ["os", "driver", "server"])
async def test_a_database_that_is_away_is_503(scene: Scene, kind: str):
    answer = await scene.client.get(f"/raise/{kind}")
    problem(answer, 503, "unavailable")
    assert answer.headers["retry-after"] == "5"


async def test_an_error_in_sql_is_500(scene: Scene):
    problem(await scene.client.get("/raise/sql"), 500, "internal_error")


async def test_a_database_that_cannot_be_reached_is_503(opened: Callable[..., Database]):
    scene = Scene(opened("postgresql://nobody@127.0.0.1:1/none"))
    problem(await scene.client.get(f"/v1/things/{uuid4()}"), 503, "unavailable")
    problem(await scene.client.post("/v1/things", json={"rank": 1}), 503, "unavailable")


# --- size


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_over_the_limit_is_413(scene: Scene, declared: bool):
    body = b'{"a": "' + b"x" * MAX_BODY_BYTES + b'"}'

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    headers = {"content-type": "application/json"}
    answer = await scene.client.post("/echo", content=body if declared else chunks(), headers=headers)
    problem(answer, 413, "body_too_large")


async def test_a_body_at_the_limit_is_taken(scene: Scene):
    body = b'{"a": "' + b"x" * (MAX_BODY_BYTES - 9) + b'"}'
    assert len(body) == MAX_BODY_BYTES
    answer = await scene.client.post("/echo", content=body, headers={"content-type": "application/json"})
    assert answer.json() == {"fields": 1}


@pytest.mark.parametrize(("declared", "status"), [("0" * 5000 + "2", 200), ("9" * 5000, 413)], ids=["zeros", "nines"])
async def test_a_declared_length_of_thousands_of_digits_is_read(scene: Scene, declared: str, status: int):
    headers = {"content-type": "application/json", "content-length": declared}
    answer = await scene.client.post("/echo", content=b"{}", headers=headers)
    assert answer.status_code == status


async def test_a_false_declared_length_does_not_let_a_body_through(scene: Scene):
    body = b'{"a": "' + b"x" * MAX_BODY_BYTES + b'"}'
    headers = {"content-type": "application/json", "content-length": "10"}
    problem(await scene.client.post("/echo", content=body, headers=headers), 413, "body_too_large")


# --- who calls


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic YTpi", "Bearer a.b.c", f"Bearer {token()}x"])
async def test_no_valid_token_is_401(scene: Scene, value: str):
    answer = await scene.client.get(f"/v1/things/{uuid4()}", headers={"authorization": value})
    problem(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_a_token_without_the_scope_is_403(scene: Scene):
    for scope in ("", "things:readwrite", "things"):
        headers = {"authorization": f"Bearer {token(scope)}"}
        problem(await scene.client.get(f"/v1/things/{uuid4()}", headers=headers), 403, "forbidden")
        problem(await scene.client.post("/v1/things", json={"rank": 1}, headers=headers), 403, "forbidden")


# --- commits


async def test_a_change_is_committed_before_the_answer(stored: Scene, admin: asyncpg.Connection):
    assert (await stored.client.post("/v1/things", json={"rank": 4})).status_code == 201
    assert await admin.fetchval("select rank from crm.thing") == 4


async def test_a_failed_commit_is_never_answered_with_success(
    stored: Scene, admin: asyncpg.Connection, alter: Callable
):
    await alter(
        """
        create function crm.refuse() returns trigger language plpgsql as
          $$ begin raise exception 'hunter2-at-10.0.0.7' using errcode = 'check_violation'; end $$;
        create constraint trigger refuse after insert on crm.thing deferrable initially deferred
          for each row execute function crm.refuse();
        """,
        "drop function crm.refuse cascade",
    )
    problem(await stored.client.post("/v1/things", json={"rank": 4}), 500, "internal_error")
    assert await admin.fetchval("select count(*) from crm.thing") == 0


async def test_a_route_that_reads_cannot_write(stored: Scene, admin: asyncpg.Connection):
    problem(await stored.client.get(f"/v1/things/{uuid4()}/write-on-read"), 500, "internal_error")
    assert await admin.fetchval("select count(*) from crm.thing") == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/things", b'{"rank": 1, "note": "a\\u0000b"}'),
        ("/v1/things", b'{"rank": 99999999999}'),
        ("/v1/things/json", b'{"a": NaN}'),
        ("/v1/things/json", b'{"a": 1e999}'),
        ("/v1/things/json", b'{"a": "\\u0000"}'),
        ("/v1/things/json", b'{"a": "\\ud800"}'),
    ],
    ids=["NUL", "number", "NaN", "infinity", "NUL in JSON", "half a pair"],
)
async def test_a_value_that_the_database_cannot_keep_is_the_callers_fault(
    stored: Scene, admin: asyncpg.Connection, path: str, body: bytes
):
    answer = await stored.client.post(path, content=body, headers={"content-type": "application/json"})
    problem(answer, 422, "value_not_storable")
    assert await admin.fetchval("select count(*) from crm.thing") == 0


async def test_a_cancelled_request_gives_its_connection_back(
    scratch: TestDatabase, opened: Callable[..., Database], admin: asyncpg.Connection, eventually: Callable
):
    database = opened(scratch.api_url, pool_size=1)
    scene = Scene(database)
    async with admin.transaction():
        await admin.execute("lock table crm.thing in exclusive mode")
        waiting = asyncio.create_task(scene.client.post("/v1/things", json={"rank": 1}))

        async def blocked() -> bool:
            return bool(await admin.fetchval("select count(*) from pg_locks where not granted"))

        await eventually(blocked)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert database.engine.pool.checkedout() == 0
    assert (await scene.client.post("/v1/things", json={"rank": 2})).status_code == 201
    assert await admin.fetchval("select array_agg(rank) from crm.thing") == [2]


# --- correlation


async def test_a_correlation_id_is_taken_over_or_made(scene: Scene):
    path = f"/v1/things/{uuid4()}"
    answer = await scene.client.get(path, headers={"x-request-id": "abc-DEF_1.2:3"})
    assert answer.headers["x-request-id"] == answer.json()["correlation"] == "abc-DEF_1.2:3"
    made = [(await scene.client.get(path)).json()["correlation"] for _ in range(2)]
    assert [UUID(made_id).version for made_id in made] == [7, 7]
    assert made[0] != made[1]


@pytest.mark.parametrize(
    "hostile",
    [b"", b"x" * 65, b"a b", b"a\tb", b"<script>", b'"', b"a;b", b"\xd0\xb6", b"${jndi:ldap://x}", b"a,b", b"a%0d%0ab"],
)
async def test_a_hostile_correlation_id_is_replaced(scene: Scene, hostile: bytes):
    answer = await scene.client.get("/health/live", headers=[(b"x-request-id", hostile)])
    assert UUID(answer.headers["x-request-id"]).version == 7


async def test_a_line_break_ends_no_correlation_id():
    """An ASGI server may pass what a client library would not send."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app = create_app(title="t", version="1", registry=CollectorRegistry())
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": "/health/live", "raw_path": b"/health/live", "query_string": b"", "root_path": "",
        "headers": [(b"x-request-id", b"good\n"), (b"x-other", b"1")], "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    given = dict(sent[0]["headers"])[b"x-request-id"].decode()
    assert UUID(given).version == 7


# --- health and figures


async def test_readiness_names_what_is_missing(databases: DatabaseTemplates, opened: Callable[..., Database]):
    missing = {"kafka": BrokerUnavailable("missing topics: pin.a.v1, pin.b.v1\nand more"), "database": None}

    def check(name: str) -> Callable:
        async def run() -> None:
            if missing[name] is not None:
                raise missing[name]

        return run

    scene = Scene(opened(databases.server.url()), ready={name: check(name) for name in missing})
    document = problem(await scene.client.get("/health/ready"), 503, "not_ready")
    assert document["detail"] == "not ready: kafka"
    assert document["errors"] == [
        {"location": "kafka", "message": "BrokerUnavailable: missing topics: pin.a.v1, pin.b.v1"}
    ]
    missing["kafka"] = None
    answer = await scene.client.get("/health/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


async def test_a_database_that_is_away_is_named_by_readiness(opened: Callable[..., Database]):
    database = opened("postgresql://user:hunter2-at-10.0.0.7@127.0.0.1:1/none")
    scene = Scene(database, ready={"database": database.ping})
    document = problem(await scene.client.get("/health/ready"), 503, "not_ready")
    assert [error["location"] for error in document["errors"]] == ["database"]


async def test_health_and_metrics_need_no_token(scene: Scene):
    del scene.client.headers["authorization"]
    assert (await scene.client.get("/health/live")).json() == {"status": "live"}
    assert (await scene.client.get("/health/ready")).json() == {"status": "ready"}
    answer = await scene.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "pin_http_request_duration_seconds" in answer.text


async def test_the_route_label_is_the_template_and_never_the_path(scene: Scene):
    for _ in range(5):
        await scene.client.get(f"/v1/things/{uuid4()}")
        await scene.client.get(f"/{uuid4()}")
        await scene.client.get(f"/v1/things/{uuid4()}/{uuid4()}")
    assert scene.series() == {("GET", "/v1/things/{thing_id}", "200"), ("GET", "unmatched", "404")}
    assert scene.requests(method="GET", route="unmatched", status="404") == 10


async def test_made_up_methods_make_no_new_series(scene: Scene):
    for number in range(5):
        problem(await scene.client.request(f"BREW{number}", "/query"), 405, "method_not_allowed")
    assert {method for method, _, _ in scene.series()} == {"other"}


def test_every_route_of_the_service_is_in_its_openapi_document_and_no_operational_one(scene: Scene):
    paths = set(scene.app.openapi()["paths"])
    assert "/v1/things/{thing_id}" in paths
    assert not paths & {"/health/live", "/health/ready", "/metrics"}


async def test_interactive_documentation_is_off(scene: Scene):
    problem(await scene.client.get("/docs"), 404, "not_found")
    problem(await scene.client.get("/redoc"), 404, "not_found")


# --- life


async def test_what_is_to_be_closed_is_closed_in_order_after_the_application_ends():
    closed: list[int] = []

    def closing(number: int) -> Callable:
        async def close() -> None:
            closed.append(number)

        return close

    app = create_app(title="t", version="1", registry=CollectorRegistry(), on_close=[closing(1), closing(2)])
    async with app.router.lifespan_context(app):
        assert closed == []
    assert closed == [1, 2]
