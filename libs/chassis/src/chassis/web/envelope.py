"""What is around every request: correlation id, body limit, duration, access log, answer to what nobody expected."""

import re
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog
from fastapi import Request
from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chassis.ids import new_id
from chassis.web.answers import BodyTooLarge, unexpected
from chassis.web.sizes import MAX_BODY_BYTES

__all__ = ["CORRELATION_HEADER", "MAX_BODY_BYTES", "BodyTooLarge", "RequestEnvelope"]

CORRELATION_HEADER: Final = "x-request-id"

_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_QUIET: Final = frozenset({"/health/live", "/health/ready", "/metrics"})
"""Asked every few seconds by machines: logged at level DEBUG."""
_STREAM: Final = b"text/event-stream"
_MOST_DIGITS: Final = len(str(MAX_BODY_BYTES))
_ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
log = structlog.get_logger(__name__)


class RequestEnvelope:
    """Correlation id, body limit, duration, access log, answer to what nobody expected (plain ASGI)."""

    def __init__(self, app: ASGIApp, seconds: Histogram) -> None:
        self._app = app
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["correlation_id"] = correlation_id = _correlation_id(headers)
        started = time.perf_counter()
        status = 0
        begun: float | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status = message["status"]
                if any(
                    value.startswith(_STREAM) for name, value in message.get("headers", ()) if name == b"content-type"
                ):
                    begun = time.perf_counter()  # a stream's length says nothing of how fast we answer
                added = {CORRELATION_HEADER: correlation_id} | state.get("rate_limit", {})
                answered = message.setdefault("headers", [])
                if not any(name.lower() == b"cache-control" for name, _ in answered):
                    added["cache-control"] = "no-store"
                answered.extend((name.encode(), value.encode()) for name, value in added.items())
            await send(message)

        with structlog.contextvars.bound_contextvars(correlation_id=correlation_id):
            try:
                await self._app(scope, _limited(receive, headers), send_with_headers)
            except Exception as error:
                if status:
                    raise
                await unexpected(Request(scope), error)(scope, receive, send_with_headers)
            finally:
                self._note(scope, status, (begun or time.perf_counter()) - started)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._seconds.labels(method, route, str(status)).observe(seconds)
        say = log.debug if route in _QUIET else log.info
        subject = scope["state"].get("subject")
        say("request", method=method, route=route, status=status, ms=round(seconds * 1000, 1), subject=subject)


def _correlation_id(headers: Mapping[bytes, bytes]) -> str:
    given = headers.get(CORRELATION_HEADER.encode(), b"").decode("latin-1")
    return given if _ACCEPTABLE_ID.fullmatch(given) else str(new_id())


def _limited(receive: Receive, headers: Mapping[bytes, bytes]) -> Receive:
    declared = headers.get(b"content-length", b"").lstrip(b"0")
    # Zeros before a number are allowed; int() refuses thousands of digits, and as many are above the limit anyway.
    too_large = declared.isdigit() and (len(declared) > _MOST_DIGITS or int(declared) > MAX_BODY_BYTES)
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
