"""Walks every route of a service's application as people who must not get in, and tells what they saw.

Nothing here names a route: what there is comes from the application, and bodies from its OpenAPI document. A service
whose paths have parameters keeps a `route_samples.py` beside its tests, with `async def make(admin, tenant)` that adds
rows of one tenant and returns a value for each path parameter.
"""

import importlib
import importlib.util
import inspect
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import asyncpg
import httpx
import orjson
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts
from joserfc import jwt
from joserfc.jwk import OKPKey
from sqlalchemy import text

from chassis.db import Database
from chassis.settings import ServiceSettings
from chassis.web import PLATFORM_ADMIN, declared_role, declared_scope

ROOT: Final = Path(__file__).resolve().parents[2]
OPEN: Final = frozenset({"/health/live", "/health/ready", "/metrics", "/openapi.json"})
"""Routes that everybody may call; a new one is added here on purpose or not at all."""

OWNER, STRANGER = UUID(int=0xA), UUID(int=0xB)
KEY: Final = OKPKey.generate_key("Ed25519", {"kid": "walk"})
ISSUER: Final = {"issuer": "walk", "audience": "pin", "algorithms": ["Ed25519"]}
Samples = Callable[["asyncpg.Connection[Any]", UUID], Awaitable[Mapping[str, Any]]]


def services() -> dict[str, Path]:
    """Return package -> folder of every service that has an application."""
    return {path.parent.name: path.parents[2] for path in sorted((ROOT / "services").glob("*/src/*/app.py"))}


def settings_of(package: str) -> type[ServiceSettings]:
    """Return the settings class of a service."""
    module = importlib.import_module(f"{package}.settings")
    [found] = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, ServiceSettings) and value is not ServiceSettings
    ]
    return found


def samples_of(package: str) -> Samples | None:
    """Return what makes a service's sample rows, if it has that."""
    for folder in (package, package.replace("_", "-")):
        path = ROOT / "tests" / "services" / folder / "route_samples.py"
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"route_samples_{package}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.make
    return None


def variables() -> dict[str, str]:
    """Return the environment variables that make a service accept the walk's tokens."""
    issuer = ISSUER | {"jwks": {"keys": [KEY.as_dict(private=False)]}}
    return {"PIN_JWT_ISSUERS": orjson.dumps([issuer]).decode(), "PIN_RATE_LIMIT": ""}


def token(tenant: UUID, scope: str, *roles: str) -> dict[str, str]:
    """Return the header of a caller."""
    claims = {
        "iss": "walk", "aud": "pin", "sub": f"user-of-{tenant.int}", "exp": int(time.time()) + 600,
        "tenant_id": str(tenant), "scope": scope, "roles": list(roles),
    }  # fmt: skip
    signed = jwt.encode({"alg": "Ed25519", "kid": "walk"}, claims, KEY, algorithms=["Ed25519"])
    return {"authorization": f"Bearer {signed}"}


@dataclass(frozen=True)
class Door:
    """One route and one of its methods, with a request that a rightful caller could send."""

    method: str
    path: str
    url: str
    body: Any
    streams: bool
    scope: str | None
    role: str | None

    @property
    def named(self) -> str:
        """Method and template."""
        return f"{self.method} {self.path}"

    @property
    def leads_to_one(self) -> bool:
        """Whether it leads to one resource (and not to a list, or nothing yet)."""
        return self.url != self.path


def doors(app: FastAPI, values: Mapping[str, Any]) -> Iterator[Door]:
    """Yield every door of an application but the open ones."""
    document = app.openapi()
    for context in iter_route_contexts(app.routes):
        path, route = context.path_format or context.path or "", context.original_route
        if path in OPEN:
            continue
        known = route if isinstance(route, APIRoute) else None
        for method in sorted((context.methods or {"GET"}) - {"HEAD"}):
            operation = document["paths"].get(path, {}).get(method.lower(), {})
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            yield Door(
                method,
                path,
                re.sub(r"{(\w+)}", lambda found: str(values.get(found[1], found[0])), path),
                None if body is None else example(body, document),
                "text/event-stream" in operation.get("responses", {}).get("200", {}).get("content", {}),
                declared_scope(known) if known else None,
                declared_role(known) if known else None,
            )


def example(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    """Return the smallest value that a JSON schema of the document takes."""
    if "$ref" in schema:
        return example(document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document)
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return example(next(s for s in schema[choice] if s.get("type") != "null"), document)
    if "examples" in schema:
        return schema["examples"][0]
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type", "object")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(properties[name], document) for name in schema.get("required", ())}
    if kind == "array":
        return [example(schema["items"], document)] * schema.get("minItems", 0)
    if kind == "string":
        texts = {"date-time": "2026-11-30T09:00:00Z", "date": "2026-11-30", "uuid": str(UUID(int=7))}
        return texts.get(schema.get("format", ""), "x" * max(1, schema.get("minLength", 1)))
    return {"integer": schema.get("minimum", 1), "number": schema.get("minimum", 1), "boolean": True}.get(kind)


async def walk(app: FastAPI, admin: "asyncpg.Connection[Any]", schema: str, samples: Samples | None) -> list[str]:
    """Try every door as nobody, without its scope, without its role, and as a stranger; return what was wrong."""
    values = await samples(admin, OWNER) if samples else {}
    before = await rows_of(admin, schema, OWNER)
    found: list[str] = []
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
        for door in doors(app, values):
            found += [f"{door.named}: {wrong}" async for wrong in _wrong_with(client, door, values)]
    if await rows_of(admin, schema, OWNER) != before:
        found.append("a stranger changed rows of the owner")
    return found + await left_on_connections(app.state.api_database)


async def _wrong_with(client: httpx.AsyncClient, door: Door, values: Mapping[str, Any]):
    async def ask(headers: Mapping[str, str]) -> httpx.Response:
        return await client.request(door.method, door.url, json=door.body, headers=headers)

    if "{" in door.url:
        yield "route_samples.py has no value for its path"
    if door.scope is None:
        yield "it asks for no scope and is not in the list of open routes"
        return
    if (status := (await ask({})).status_code) != 401:
        yield f"without a token it answers {status}"
    for scope in ("", "other:things:read", door.scope + ":more", door.scope.rpartition(":")[0]):
        if (status := (await ask(token(OWNER, scope, PLATFORM_ADMIN))).status_code) != 403:
            yield f"with the scope {scope!r} it answers {status}"
    roles = () if door.role is None else (door.role,)
    if door.role is not None:
        others = ((), ("ADMIN",), (door.role.swapcase(),), ("MANAGER", f"{door.role}-x"))
        for wrong in others:
            if (status := (await ask(token(OWNER, door.scope, *wrong))).status_code) != 403:
                yield f"with the roles {wrong} it answers {status}"
    if door.role == PLATFORM_ADMIN:
        return  # of the platform, across tenants
    shown = 503 if door.streams else 200  # nobody has read Kafka yet; a stranger is told nothing of that
    if door.method == "GET" and (status := (await ask(token(OWNER, door.scope, *roles))).status_code) != shown:
        yield f"its owner gets {status}, so that the walk shows nothing"
    answer = await ask(token(STRANGER, door.scope, *roles))
    if door.leads_to_one and answer.status_code != 404:
        yield f"a stranger gets {answer.status_code}"
    if seen := [name for name, value in values.items() if str(value) in answer.text and not door.leads_to_one]:
        yield f"a stranger sees {', '.join(seen)}"


async def rows_of(admin: "asyncpg.Connection[Any]", schema: str, tenant: UUID) -> list[str]:
    """Return all rows of a tenant as text."""
    tables = await admin.fetch(
        "select table_name from information_schema.columns where table_schema = $1 and column_name = 'tenant_id'"
        " order by 1",
        schema,
    )
    return [
        row[0]
        for table in tables
        for row in await admin.fetch(
            f'select t::text from {schema}."{table[0]}" t where tenant_id = $1 order by 1', tenant
        )
    ]


async def left_on_connections(database: Database) -> list[str]:
    """Return a sentence per setting of a caller that a pooled connection still has."""
    names = ("app.tenant", "app.partner", "app.user", "app.roles")
    async with database.engine.connect() as connection:
        left = [
            (name, value)
            for name in names
            if (value := await connection.scalar(text("select current_setting(:name, true)"), {"name": name}))
        ]
    return [f"{name} is left on a pooled connection: {value}" for name, value in left]
