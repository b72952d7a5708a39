"""What routes are made of: a router whose routes keep answers, If-Match, and what each route says it needs."""

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import AfterValidator

from chassis.preconditions import Precondition
from chassis.web.replays import Route


class Router(APIRouter):
    """A router whose routes honour Idempotency-Key.

    Args:
        prefix: of every path.
        tags: in the OpenAPI document.
    """

    def __init__(self, prefix: str = "", tags: list[str] | None = None, **settings: Any) -> None:
        super().__init__(prefix=prefix, tags=list(tags or ()), route_class=Route, **settings)


def _readable(header: str | None) -> str | None:
    """Refuse as a validation does: after the caller is known, and beside what else is wrong with the request."""
    Precondition.parse(header)
    return header


def _precondition(
    if_match: Annotated[
        str | None,
        Header(
            alias="If-Match",
            max_length=1024,
            description='The ETag of the entity as it was read, such as "7"; another version is refused with 412.',
        ),
        AfterValidator(_readable),
    ] = None,
) -> Precondition:
    return Precondition.parse(if_match)


IfMatch = Annotated[Precondition, Depends(_precondition)]
"""Parameter of a route whose callers may say which version they have seen."""


def declared_scope(route: APIRoute) -> str | None:
    """Return the scope that a route asks for; None: it is open to everybody."""
    return next((call.scope for call in _calls(route.dependant) if hasattr(call, "scope")), None)


def declared_role(route: APIRoute) -> str | None:
    """Return the role that a route asks for beside its scope."""
    return next((call.role for call in _calls(route.dependant) if getattr(call, "role", None)), None)


def _calls(dependant: Dependant) -> Iterator[Any]:
    yield dependant.call
    for inner in dependant.dependencies:
        yield from _calls(inner)
