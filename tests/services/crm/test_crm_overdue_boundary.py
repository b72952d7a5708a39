"""timeline-overdue towards the outside: no route, no permission, no Redis, no call of another service; its contract."""

import re
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from crm_world import READ, WRITE, World
from fastapi.routing import APIRoute

import crm
from chassis.contracts import Contract, DeclaredMessage
from chassis.platform_events import audit_recorded, quarantined
from crm import messages
from crm.api.deals import router
from crm.domain import CLOSES, DealTimelineEventType
from crm.settings import CrmSettings

ROOT = Path(__file__).resolve().parents[3]
TOPIC = "pin.crm.timeline-overdue.v1"
SOURCES = sorted(Path(crm.__file__).parent.glob("**/*.py"))


@pytest.fixture(scope="module")
def declared() -> DeclaredMessage:
    """The event as the registry declares it."""
    contract = Contract(ROOT / "contracts/crm.asyncapi.yaml")
    (message,) = [message for message in contract.messages() if message.topic == TOPIC]
    return message


def needed(package: str, seen: set[str]) -> set[str]:
    """Return every distribution that a package needs to run, directly or through others."""
    for line in requires(package) or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name is not None and "extra ==" not in line and (found := name[0].lower()) not in seen:
            seen.add(found)
            try:
                needed(found, seen)
            except ModuleNotFoundError:  # for another platform
                continue
    return seen


@pytest.mark.req("TLO-19")
def test_job_has_no_route(world: World) -> None:
    app = world.crm("api", "jobs", "relay").app
    document = app.openapi()
    assert document["paths"]
    for path, methods in document["paths"].items():
        assert not re.search(r"job|overdue|worker|cycle|tick", path), path
        for operation in methods.values():
            assert not re.search(r"job|worker|cycle|tick|mark", operation["operationId"]), operation["operationId"]
    hidden = set(paths_of(app.routes)) - set(document["paths"])
    assert {path for path in hidden if re.search(r"job|overdue", path)} == {
        "/v1/admin/jobs", "/v1/admin/jobs/{name}/pause", "/v1/admin/jobs/{name}/resume", "/v1/admin/jobs/{name}/run",
    }, "the person on call has some, which no tenant's role opens"  # fmt: skip


def paths_of(routes: Iterable[Any]) -> Iterator[str]:
    """Yield the path of every route, those of included routers too."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from paths_of(inner.routes)
        else:
            yield route.path


@pytest.mark.req("TLO-19")
def test_job_has_no_permission() -> None:
    scopes: set[str] = set()

    def walk(dependant: Any) -> None:
        if scope := getattr(dependant.call, "scope", None):
            scopes.add(scope)
        for inner in dependant.dependencies:
            walk(inner)

    for route in router.routes:
        assert isinstance(route, APIRoute)
        walk(route.dependant)
    assert scopes == {READ, WRITE}, "deals are read and written; nothing allows or forbids the job"


@pytest.mark.req("TLO-11")
def test_nothing_of_redis_or_another_lock_service_is_needed() -> None:
    packages = needed("crm", set())
    assert {"chassis", "asyncpg", "sqlalchemy"} <= packages
    assert not {
        name for name in packages if re.search(r"redis|redlock|valkey|memcache|etcd|zookeeper|kazoo|consul", name)
    }
    assert not [name for name in CrmSettings.model_fields if "redis" in name]
    lock = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"^(redis|hiredis|valkey|redlock)", lock, re.MULTILINE)


@pytest.mark.req("TLO-09")
def test_service_has_no_client_of_another_service() -> None:
    """Messenger and notifications hear of it through the outbox alone; chassis fetches keys of token issuers."""
    assert [requirement for requirement in requires("crm") or [] if "extra" not in requirement] == ["chassis"]
    imports = [
        line for path in SOURCES for line in path.read_text().splitlines() if re.match(r"\s*(from|import) ", line)
    ]
    assert imports
    assert not [line for line in imports if re.search(r"\b(httpx|urllib|http\.client|socket|smtplib|aiokafka)\b", line)]


@pytest.mark.req("TLO-10")
def test_event_catalog_lists_the_event_beside_the_others(declared: DeclaredMessage) -> None:
    assert (declared.name, declared.type) == ("DealTimelineOverdueEvent", TOPIC)
    contract = Contract(ROOT / "contracts/crm.asyncapi.yaml")
    of_the_platform = {quarantined("crm"), audit_recorded("crm")}
    assert {(message.topic, message.type) for message in contract.messages()} == {
        (event.topic, event.type) for event in {*messages.PUBLISHED, *of_the_platform}
    }
    assert len(messages.PUBLISHED) > 1


@pytest.mark.req("TLO-09", "TLO-59b", "TLO-59c", "TLO-61b")
def test_messenger_and_notifications_are_its_two_consumers(declared: DeclaredMessage) -> None:
    assert declared.governance["producer"] == "crm"
    assert sorted(declared.governance["consumers"]) == ["messenger", "notifications"]


@pytest.mark.req("TLO-48", "TLO-49")
def test_contract_of_the_event_is_six_fields_of_ids_an_enum_and_instants(declared: DeclaredMessage) -> None:
    fields = declared.payload["properties"]
    assert sorted(fields) == sorted(declared.payload["required"])
    assert {name: field.get("format") or field["type"] for name, field in fields.items()} == {
        "DealId": "uuid",
        "TimelineEventId": "uuid",
        "TenantId": "uuid",
        "Type": "string",
        "DueAt": "date-time",
        "OverdueAt": "date-time",
    }
    assert fields["Type"]["enum"] == [kind.value for kind in DealTimelineEventType]
    assert set(CLOSES) < set(DealTimelineEventType)
