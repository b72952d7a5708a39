"""The HTTP application of a service: every error is a problem document, every request has a correlation id and a limit.

Middleware is plain ASGI. A route opens its write session with `Depends(..., scope="function")`, so that the commit
comes before the response and a failed commit is never answered with success.
"""

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final

import orjson
import structlog
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from sqlalchemy.ext.asyncio import AsyncSession
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chassis.db import DATABASE_ERRORS, Database, is_bad_value, is_infrastructure
from chassis.identity import Forbidden, Principal, TokenVerifier, Unauthenticated
from chassis.ids import new_id
from chassis.problems import Problem
from chassis.runtime import Background

MAX_BODY_BYTES: Final = 1024 * 1024
CORRELATION_HEADER: Final = "x-request-id"
MOST_ERRORS: Final = 50
"""How many places of an invalid request are named: one of a megabyte can be wrong in a hundred thousand."""

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
log = structlog.get_logger(__name__)

Check = Callable[[], Awaitable[None]]
"""A readiness check: returns, or raises with a sentence that says what is missing."""


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """How a domain error is answered: HTTP status and problem code."""

    status: int
    code: str


class BodyTooLarge(Exception):
    """The request body is larger than the limit."""


def create_app(
    *,
    title: str,
    version: str,
    registry: CollectorRegistry,
    routers: Sequence[APIRouter] = (),
    errors: Mapping[type[Exception], ErrorAnswer] | None = None,
    background: Background | None = None,
    ready: Mapping[str, Check] | None = None,
    on_close: Sequence[Callable[[], Awaitable[None]]] = (),
    state: Mapping[str, Any] | None = None,
) -> FastAPI:
    """Build a service's application.

    Args:
        title: the service's name in its OpenAPI document.
        version: likewise.
        registry: what `/metrics` exports.
        routers: the service's own routes.
        errors: answers of domain errors; the most specific class wins.
        background: loops started and stopped with the application.
        ready: named checks of `/health/ready`.
        on_close: awaited in order after the loops have stopped.
        state: values for `app.state` (`api_database`, `system_database` and `verifier` are read by the dependencies
            below).
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if background is not None:
            background.start()
        yield
        if background is not None:
            await background.stop()
        for close in on_close:
            await close()

    app = FastAPI(title=title, version=version, lifespan=lifespan, docs_url=None, redoc_url=None)
    for name, value in (state or {}).items():
        setattr(app.state, name, value)
    app.include_router(_operations_router(registry, background, ready or {}))
    for router in routers:
        app.include_router(router)
    _install_error_handlers(app, errors or {})
    seconds = Histogram(
        "pin_http_request_duration_seconds",
        "Duration of requests.",
        ["method", "route", "status"],
        registry=registry,
    )
    app.add_middleware(RequestEnvelope, seconds=seconds)
    return app


class RequestEnvelope:
    """Correlation id, body limit, duration, answer to what nobody expected: around every request (plain ASGI)."""

    def __init__(self, app: ASGIApp, seconds: Histogram) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(CORRELATION_HEADER.encode(), b"").decode("latin-1")
        correlation_id = given if _ACCEPTABLE_ID.fullmatch(given) else str(new_id())
        scope.setdefault("state", {})["correlation_id"] = correlation_id
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", []).append((CORRELATION_HEADER.encode(), correlation_id.encode()))
            await send(message)

        with structlog.contextvars.bound_contextvars(correlation_id=correlation_id):
            try:
                await self._app(scope, _limited(receive, headers), send_with_id)
            except Exception as error:
                if status:
                    raise
                await _unexpected(Request(scope), error)(scope, receive, send_with_id)
            finally:
                route = getattr(scope.get("route"), "path", "unmatched")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._seconds.labels(method, route, str(status)).observe(time.perf_counter() - started)


def _limited(receive: Receive, headers: Mapping[bytes, bytes]) -> Receive:
    declared = headers.get(b"content-length", b"0")
    too_large = declared.isdigit() and int(declared) > MAX_BODY_BYTES
    seen = 0

    async def receive_limited() -> Message:
        nonlocal seen
        if too_large:
            raise BodyTooLarge
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > MAX_BODY_BYTES:
            raise BodyTooLarge
        return message

    return receive_limited


def _operations_router(
    registry: CollectorRegistry, background: Background | None, ready: Mapping[str, Check]
) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/health/live")
    async def live() -> Response:
        dead = background.dead() if background else {}
        if dead:
            silent = ", ".join(f"{name} for {silence:.0f} s" for name, silence in sorted(dead.items()))
            return Problem(503, "not_live", f"no progress: {silent}")
        return Response(orjson.dumps({"status": "live"}), media_type="application/json")

    @router.get("/health/ready")
    async def readiness() -> Response:
        missing = [{"location": name, "message": reason} for name, reason in [
            (name, await _reason(check)) for name, check in ready.items()
        ] if reason]  # fmt: skip
        if missing:
            names = ", ".join(entry["location"] for entry in missing)
            return Problem(503, "not_ready", f"not ready: {names}", errors=missing)
        return Response(orjson.dumps({"status": "ready"}), media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _reason(check: Check) -> str:
    try:
        await check()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""


def _install_error_handlers(app: FastAPI, errors: Mapping[type[Exception], ErrorAnswer]) -> None:
    for error_class, answer in errors.items():
        app.add_exception_handler(error_class, _domain_handler(answer))
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Unauthenticated, _unauthenticated)
    app.add_exception_handler(Forbidden, _forbidden)
    app.add_exception_handler(BodyTooLarge, _too_large)
    for trouble in DATABASE_ERRORS:
        app.add_exception_handler(trouble, _database_error)


def _domain_handler(answer: ErrorAnswer) -> Callable[[Request, Exception], Response]:
    def handle(_: Request, error: Exception) -> Response:
        return Problem(answer.status, answer.code, str(error))

    return handle


def _invalid(_: Request, error: Exception) -> Response:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    if any(problem["type"] == "json_invalid" for problem in problems):
        return Problem(400, "malformed_json", "the request body is not JSON")
    entries = [
        {"location": ".".join(str(part) for part in problem["loc"]), "message": problem["msg"]}
        for problem in problems[:MOST_ERRORS]
    ]
    return Problem(422, "validation_error", "the request is not valid", errors=entries)


def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = getattr(error, "headers", None)
    if isinstance(error.__cause__, BodyTooLarge) or isinstance(error.__context__, BodyTooLarge):
        return _too_large(_, error)
    if status == 400:
        return Problem(400, "malformed_request", "the request body can't be read")
    codes = {
        404: ("not_found", "no such resource"),
        405: ("method_not_allowed", "the method is not allowed here"),
    }
    code, detail = codes.get(status, ("http_error", str(getattr(error, "detail", ""))))
    return Problem(status, code, detail, headers=headers)


def _unauthenticated(_: Request, error: Exception) -> Response:
    return Problem(401, "unauthenticated", str(error), headers={"www-authenticate": "Bearer"})


def _forbidden(_: Request, error: Exception) -> Response:
    return Problem(403, "forbidden", str(error))


def _too_large(_: Request, __: Exception) -> Response:
    return Problem(413, "body_too_large", f"the request body is larger than {MAX_BODY_BYTES} bytes")


def _database_error(request: Request, error: Exception) -> Response:
    if is_infrastructure(error):
        log.error("database unavailable", error=str(error)[:300])
        return Problem(503, "unavailable", "the service can't reach its database", headers={"retry-after": "5"})
    if is_bad_value(error):
        log.error("value not storable", error=str(error)[:300])
        return Problem(422, "value_not_storable", "the request holds a value that can't be stored; nothing was changed")
    return _unexpected(request, error)


def _unexpected(_: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return Problem(500, "internal_error", "the request could not be handled; nothing was changed")


_bearer = HTTPBearer(auto_error=False)


def principal_with(scope: str) -> Callable[..., Principal]:
    """Return a dependency that yields the caller if its token carries `scope`.

    Raises (in the route):
        Unauthenticated: no valid token (401).
        Forbidden: the scope is missing (403).
    """

    def dependency(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Principal:
        if credentials is None:
            raise Unauthenticated("a bearer token is required")
        verifier: TokenVerifier = request.app.state.verifier
        principal = verifier.verify(credentials.credentials)
        principal.require(scope)
        return principal

    dependency.scope = scope  # type: ignore[attr-defined]
    return dependency


@dataclass(frozen=True, slots=True)
class Call:
    """One authorised request: its session, its caller and its correlation id."""

    session: AsyncSession
    principal: Principal
    correlation_id: str


def writing(scope: str) -> Any:
    """Return the dependency of a route that changes something: a `Call` whose session commits before the response."""
    return Depends(_call(scope, read_only=False), scope="function")


def reading(scope: str) -> Any:
    """Return the dependency of a route that only reads: a `Call` with a read-only session."""
    return Depends(_call(scope, read_only=True), scope="function")


PLATFORM_ADMIN: Final = "platform-admin"
"""Role of the people who operate the platform across tenants; no tenant's own role is worth it."""


def operating(scope: str) -> Any:
    """Return the dependency of a route for the person on call: a `Call` of the system role, across tenants.

    Raises (in the route):
        Forbidden: the scope or the role `platform-admin` is missing (403).
    """

    async def dependency(
        request: Request, principal: Annotated[Principal, Depends(principal_with(scope))]
    ) -> AsyncIterator[Call]:
        if PLATFORM_ADMIN not in principal.roles:
            raise Forbidden(f"role {PLATFORM_ADMIN} is required")
        database: Database = request.app.state.system_database
        async with database.write(principal.actor) as session:
            yield Call(session, principal, request.state.correlation_id)

    return Depends(dependency, scope="function")


def _call(scope: str, *, read_only: bool) -> Callable[..., AsyncIterator[Call]]:
    async def dependency(
        request: Request, principal: Annotated[Principal, Depends(principal_with(scope))]
    ) -> AsyncIterator[Call]:
        database: Database = request.app.state.api_database
        opened = database.read(principal.actor) if read_only else database.write(principal.actor)
        async with opened as session:
            yield Call(session, principal, request.state.correlation_id)

    return dependency
