"""The OpenAPI document of a service: every refusal is declared as a problem document with its codes."""

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts

from chassis.problems import MEDIA_TYPE, Code
from chassis.web.routes import declared_role, declared_scope

_PROBLEM: Final[dict[str, Any]] = {
    "title": "Problem",
    "description": "RFC 9457 problem details; `code` is stable, `detail` is for people.",
    "type": "object",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["location", "message"],
                "properties": {"location": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
_SHAPES_OF_THE_FRAMEWORK: Final = ("HTTPValidationError", "ValidationError")


def install_document(app: FastAPI, codes: Mapping[str, Code]) -> None:
    """Make an application answer /openapi.json with our document, built once.

    Args:
        app: with all its routes.
        codes: every code that it may answer with.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, codes)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, codes: Mapping[str, Code]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    shapes = document.setdefault("components", {}).setdefault("schemas", {})
    for name in _SHAPES_OF_THE_FRAMEWORK:
        shapes.pop(name, None)
    shapes["Problem"] = _PROBLEM
    used: set[int] = set()
    for path, method, route in described_routes(app):
        operation = document["paths"][path][method]
        statuses = _statuses(path, method, operation)
        operation["responses"].pop("422", None)
        operation["responses"] |= {str(s): {"$ref": f"#/components/responses/Problem{s}"} for s in sorted(statuses)}
        operation["x-required-scope"] = declared_scope(route)
        if declared_role(route):
            operation["x-required-role"] = declared_role(route)
        used |= statuses
    document["components"]["responses"] = {f"Problem{status}": _refusal(status, codes) for status in sorted(used)}
    return document


def described_routes(app: FastAPI) -> list[tuple[str, str, APIRoute]]:
    """Return (path, method in lower case, route) of every route in an application's OpenAPI document."""
    return [
        (str(context.path_format), method.lower(), context.original_route)
        for context in iter_route_contexts(app.routes)
        if isinstance(context.original_route, APIRoute) and context.include_in_schema
        for method in sorted(context.methods or ())
    ]


def _statuses(path: str, method: str, operation: Mapping[str, Any]) -> set[int]:
    headers = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "header"}
    statuses = {422, 503}
    if operation.get("security"):
        statuses |= {401, 403, 429}
    if "{" in path:
        statuses.add(404)
    if method != "get":
        statuses.add(409)
    if "If-Match" in headers:
        statuses.add(412)
    if "requestBody" in operation or "Idempotency-Key" in headers:
        statuses |= {400, 413}
    return statuses


def _refusal(status: int, codes: Mapping[str, Code]) -> dict[str, Any]:
    said = [f"- `{name}`: {code.meaning}" for name, code in sorted(codes.items()) if code.status == status]
    return {
        "description": "\n".join(said) or "Refused.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
