"""Where Idempotency-Key meets HTTP: the answer is kept in the transaction of the command, and replayed as it was.

`answering_once` claims the key beside the route's session; `Route` hands the finished answer over before that session
commits. An answer that isn't handed over fails the request: no key is ever committed without its answer.
"""

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock
from chassis.idempotency import KEPT_HEADERS, IdempotencyKeys, KeptAnswer, KeyOf, fingerprint_of
from chassis.identity import Principal
from chassis.web.answers import KeyNotSupported

REPLAYED_HEADER: Final = "idempotency-replayed"


class Replayed(Exception):
    """The answer to this request is kept already."""

    def __init__(self, kept: KeptAnswer) -> None:
        super().__init__("the answer is kept")
        self.kept = kept

    def answer(self) -> Response:
        """Return the kept answer, marked as such."""
        answer = Response(self.kept.body, self.kept.status, dict(self.kept.headers))
        answer.headers[REPLAYED_HEADER] = "true"
        return answer


@dataclass
class _Attempt:
    """A claimed key that waits for its answer."""

    keys: IdempotencyKeys
    session: AsyncSession
    key: KeyOf
    settled: bool = field(default=False, init=False)

    async def settle(self, answer: Response) -> None:
        if 200 <= answer.status_code < 300:
            headers = {name: value for name, value in answer.headers.items() if name in KEPT_HEADERS}
            await self.keys.keep(self.session, self.key, KeptAnswer(answer.status_code, headers, bytes(answer.body)))
        else:
            await self.keys.forget(self.session, self.key)
        self.settled = True


@asynccontextmanager
async def answering_once(
    request: Request, session: AsyncSession, principal: Principal, key: str | None
) -> AsyncIterator[None]:
    """Claim the request's key, if it has one, for the session's transaction.

    Raises:
        Replayed: the answer is kept already.
        KeyReused, RequestInProgress: as `IdempotencyKeys.claim`.
        KeyNotSupported: the route is none of `Route`, or the service keeps no answers.
    """
    if key is None:
        yield
        return
    route, keys = request.scope.get("route"), request.app.state.idempotency
    if not isinstance(route, Route) or keys is None:
        raise KeyNotSupported(key)
    clock: Clock = request.app.state.clock
    whose = KeyOf(principal.tenant_id, principal.subject, f"{request.method} {route.path}", key)
    path = f"{request.url.path}?{request.url.query}"
    fingerprint = fingerprint_of(request.method, path, await request.body())
    kept = await keys.claim(session, whose, fingerprint, await clock.now(session))
    if kept is not None:
        raise Replayed(kept)
    attempt = request.state.idempotent_attempt = _Attempt(keys, session, whose)
    yield
    if not attempt.settled:
        raise RuntimeError("the answer was not handed over")


class Route(APIRoute):
    """A route that keeps and replays its answers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, which runs inside the sessions that the route's dependencies opened."""
        handle = super().get_route_handler()

        async def handle_once(request: Request) -> Response:
            try:
                answer = await handle(request)
            except Replayed as replayed:
                return replayed.answer()
            attempt: _Attempt | None = getattr(request.state, "idempotent_attempt", None)
            if attempt is not None:
                await attempt.settle(answer)
            return answer

        return handle_once
