"""How a service's application is put together: routes, answers to errors, limits, life of its background loops."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from prometheus_client import CollectorRegistry, Histogram

from chassis.idempotency import IdempotencyKeys
from chassis.problems import ErrorAnswer, codes_of
from chassis.runtime import Background
from chassis.web.answers import install_error_handlers
from chassis.web.cors import CrossOrigin
from chassis.web.document import install_document
from chassis.web.envelope import RequestEnvelope
from chassis.web.limits import RateLimiter
from chassis.web.operations import Check, operations_router


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
    idempotency: IdempotencyKeys | None = None,
    rate_limit: str = "",
    cors_origins: Sequence[str] = (),
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
        state: values for `app.state` (`api_database`, `system_database`, `verifier` and `clock` are read by the
            dependencies of `chassis.web`).
        idempotency: where answers are kept; without it the header Idempotency-Key is refused.
        rate_limit: requests of one principal ("600/minute"); empty: unlimited.
        cors_origins: web origins whose pages may call.

    Raises:
        ValueError: one error code would have two statuses.
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
    app.state.background = background
    app.state.idempotency = idempotency
    app.state.rate_limiter = RateLimiter(rate_limit) if rate_limit else None
    for name, value in (state or {}).items():
        setattr(app.state, name, value)
    app.include_router(operations_router(registry, background, ready or {}))
    for router in routers:
        app.include_router(router)
    codes = codes_of(errors or {})
    app.state.problem_codes = codes
    install_error_handlers(app, errors or {})
    install_document(app, codes)
    seconds = Histogram(
        "pin_http_request_duration_seconds",
        "Duration of requests.",
        ["method", "route", "status"],
        registry=registry,
    )
    app.add_middleware(RequestEnvelope, seconds=seconds)
    if cors_origins:
        app.add_middleware(CrossOrigin, origins=cors_origins)
    return app
