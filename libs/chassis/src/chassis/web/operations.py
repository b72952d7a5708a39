"""Routes for those who run the service: liveness by progress, readiness in bounded time, metrics. Open to everybody."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import orjson
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from chassis.problems import Problem
from chassis.runtime import Background

CHECK_SECONDS: Final = 3.0
"""Longest wait for one readiness check; all run at once."""

Check = Callable[[], Awaitable[None]]
"""A readiness check: returns, or raises with a sentence that says what is missing."""


def operations_router(
    registry: CollectorRegistry, background: Background | None, ready: Mapping[str, Check]
) -> APIRouter:
    """Return the routes /health/live, /health/ready and /metrics."""
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
        reasons = await asyncio.gather(*map(_reason, ready.values()))
        missing = [{"location": name, "message": reason} for name, reason in zip(ready, reasons, strict=True) if reason]
        if missing:
            names = ", ".join(entry["location"] for entry in missing)
            return Problem(503, "not_ready", f"not ready: {names}", errors=missing)
        return Response(orjson.dumps({"status": "ready"}), media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


async def _reason(check: Check) -> str:
    limit = asyncio.timeout(CHECK_SECONDS)
    try:
        async with limit:
            await check()
    except Exception as error:
        if limit.expired():
            return f"no answer within {CHECK_SECONDS:g} s"
        return (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]
    return ""
