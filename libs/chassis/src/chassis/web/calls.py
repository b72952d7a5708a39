"""Who may call a route and with which session: scope, role and rate are checked before a transaction is opened."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final

from fastapi import Depends, Header, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import Clock
from chassis.db import Database
from chassis.idempotency import KEY_PATTERN
from chassis.identity import Forbidden, Principal, TokenVerifier, Unauthenticated
from chassis.web.answers import InputRefused, RateLimited
from chassis.web.limits import RateLimiter
from chassis.web.replays import answering_once

PLATFORM_ADMIN: Final = "platform-admin"
"""Role of the people who operate the platform across tenants; no tenant's own role is worth it."""

_bearer = HTTPBearer(auto_error=False)
_IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=KEY_PATTERN,
        description="The same request with the same key runs once and gets the same answer for at least 24 hours.",
    ),
]


@dataclass(frozen=True, slots=True)
class Call:
    """One authorised request: its session, its caller and its correlation id."""

    session: AsyncSession
    principal: Principal
    correlation_id: str
    clock: Clock

    async def now(self) -> datetime:
        """Return the service's time, as its transaction sees it."""
        return await self.clock.now(self.session)


def _call(request: Request, session: AsyncSession, principal: Principal) -> Call:
    return Call(session, principal, request.state.correlation_id, request.app.state.clock)


def principal_with(scope: str, role: str | None = None) -> Callable[..., Any]:
    """Return a dependency that yields the caller if its token carries `scope`, and `role` where one is asked for.

    Raises (in the route):
        Unauthenticated: no valid token (401).
        Forbidden: the scope or the role is missing (403).
        RateLimited: too many requests of this caller (429).
        InputRefused: a query parameter that the route doesn't have (422).
        IssuerUnavailable: the token can't be judged (503).
    """

    async def dependency(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Principal:
        if credentials is None:
            raise Unauthenticated("a bearer token is required")
        verifier: TokenVerifier = request.app.state.verifier
        principal = await verifier.verify(credentials.credentials)
        request.state.subject = principal.subject
        await _charge(request, principal)
        principal.require(scope)
        if role is not None and role not in principal.roles:
            raise Forbidden(f"role {role} is required")
        _refuse_unknown_parameters(request)
        return principal

    dependency.scope = scope  # type: ignore[attr-defined]
    dependency.role = role  # type: ignore[attr-defined]
    return dependency


def writing(scope: str, role: str | None = None) -> Any:
    """Return the dependency of a route that changes something: a `Call` whose session commits before the response."""
    return Depends(_changing(scope, role, lambda request: request.app.state.api_database), scope="function")


def reading(scope: str) -> Any:
    """Return the dependency of a route that only reads: a `Call` with a read-only session."""

    async def dependency(
        request: Request, principal: Annotated[Principal, Depends(principal_with(scope))]
    ) -> AsyncIterator[Call]:
        database: Database = request.app.state.api_database
        async with database.read(principal.actor) as session:
            yield _call(request, session, principal)

    return Depends(dependency, scope="function")


def operating(scope: str) -> Any:
    """Return the dependency of a route for the person on call: a `Call` of the system role, across tenants.

    Raises (in the route):
        Forbidden: the scope or the role `platform-admin` is missing (403).
    """
    return Depends(
        _changing(scope, PLATFORM_ADMIN, lambda request: request.app.state.system_database), scope="function"
    )


def _changing(
    scope: str, role: str | None, database_of: Callable[[Request], Database]
) -> Callable[..., AsyncIterator[Call]]:
    async def dependency(
        request: Request,
        principal: Annotated[Principal, Depends(principal_with(scope, role))],
        idempotency_key: _IdempotencyKey = None,
    ) -> AsyncIterator[Call]:
        if idempotency_key is not None:
            await request.body()  # a slow sender must not hold a transaction open
        opened: AbstractAsyncContextManager[AsyncSession] = database_of(request).write(principal.actor)
        async with opened as session, answering_once(request, session, principal, idempotency_key):
            yield _call(request, session, principal)

    return dependency


async def _charge(request: Request, principal: Principal) -> None:
    limiter: RateLimiter | None = request.app.state.rate_limiter
    if limiter is None or hasattr(request.state, "rate_limit"):
        return
    allowance = await limiter.charge(principal.tenant_id, principal.subject)
    request.state.rate_limit = allowance.headers()
    if not allowance.granted:
        raise RateLimited(allowance.wait_seconds)


def _refuse_unknown_parameters(request: Request) -> None:
    """A misspelt filter would otherwise be an unfiltered list."""
    given = request.query_params.keys()
    route = request.scope.get("route")
    if not given or not isinstance(route, APIRoute):
        return
    known = {field.alias for field in get_flat_params(route.dependant) if isinstance(field.field_info, Query)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InputRefused(f"query.{unknown[0][:64]}", "the route has no such parameter")
