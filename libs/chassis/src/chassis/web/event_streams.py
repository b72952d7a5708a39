"""Server-sent events: what a subscription yields is written until it ends, the caller leaves or its token expires.

Whatever ends a stream, none of its tasks outlives it.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Final

from fastapi import Response
from starlette.types import Receive, Scope, Send

from chassis.identity import Principal
from chassis.live import Subscription

LAST_SEND_SECONDS: Final = 1.0
"""For the last chunk of an answer whose reader may have stopped reading."""

LONGEST_SECONDS: Final = 86_400.0
"""A stream is opened anew after a day at the latest."""

_HEADERS: Final[Mapping[str, str]] = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(Response):
    """An answer of server-sent events.

    Args:
        watching: opens the subscription when the answer begins.
        principal: the caller; its token's expiry ends the stream.
        status_code: of the answer.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        watching: Callable[[], AbstractContextManager[Subscription]],
        principal: Principal,
        status_code: int = 200,
    ) -> None:
        self.status_code = status_code
        self.background = None
        self._watching = watching
        self._principal = principal
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Write until the end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with self._watching() as subscription:
            tasks = [
                asyncio.create_task(one) for one in (_write(subscription, send), _gone(receive), subscription.ended())
            ]
            try:
                seconds = min(max(self._principal.accepted_for, 0), LONGEST_SECONDS)
                await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception) and not isinstance(outcome, OSError):
                raise outcome
        try:
            async with asyncio.timeout(LAST_SEND_SECONDS):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            return


async def _write(subscription: Subscription, send: Send) -> None:
    while (chunk := await subscription.next()) is not None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
