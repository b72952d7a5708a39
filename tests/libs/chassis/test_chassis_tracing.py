"""One trace from the request to the handler; log lines that name it; and spans that say nothing they must not."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import httpx
import orjson
import pytest
import respx
from fastapi import APIRouter
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from starlette.requests import Request

from chassis import tracing
from chassis.db import Database
from chassis.ids import new_id
from chassis.messaging import Producer
from chassis.outbox import Cause, EventType, Message, Outbox
from chassis.relay import Relay, RelayMetrics, Wakeup
from chassis.telemetry import add_trace
from chassis.testing.kafka import Event
from chassis.testing.plugin import TestBroker
from chassis.web import create_app

NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = "0af7651916cd43dd8448eb211c80319c"
SECRET = "ivan@example.com"


class Spans:
    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self.exporter = exporter

    def all(self) -> tuple[ReadableSpan, ...]:
        return self.exporter.get_finished_spans()

    def of(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.all() if span.kind == kind]


def trace_of(span: ReadableSpan) -> str:
    return trace.format_trace_id(span.get_span_context().trace_id)


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Tracing as a process configures it, into memory."""
    exporter = InMemorySpanExporter()
    configured = tracing.configure_tracing("test", None, exporter=exporter)
    assert configured is not None
    yield Spans(exporter)
    configured.close()


def app_with(database: Database, topic: str = "pin.test.v1") -> Any:
    """An application with one route that emits an event, and one that fails with somebody's address."""
    routes = APIRouter()
    event = EventType(topic, "test.noted", "/pin/test", "Note", "domain")

    @routes.post("/notes/{name}")
    async def emit(name: str, request: Request) -> dict[str, str]:
        async with database.write() as session:
            await session.execute(text("select :secret"), {"secret": SECRET})
            message = Message(event, name, {"number": 1}, NOW)
            await Outbox("crm").emit(session, [message], Cause(request.state.correlation_id))
        return tracing.current_ids()

    @routes.get("/fail")
    async def fail() -> None:
        async with database.write() as session:
            await session.execute(text(f"select '{SECRET}'::int"))

    app = create_app(title="test", version="1", registry=CollectorRegistry(), routers=[routes])
    tracing.instrument_app(app)
    return app


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test")


# --- one trace


@pytest.mark.messaging
@pytest.mark.req("EVT-107")
async def test_request_outbox_kafka_and_handler_share_one_trace(
    spans: Spans, system: Database, admin: asyncpg.Connection, broker: TestBroker, topic: str
) -> None:
    async with client_of(app_with(system, topic)) as client:
        answer = await client.post("/notes/a", headers={"traceparent": PARENT})
    assert answer.status_code == 200, answer.text
    assert answer.json()["trace_id"] == TRACE
    row = orjson.loads(await admin.fetchval("select headers from crm.outbox"))
    assert row["traceparent"].split("-")[1] == TRACE
    producer = Producer(broker.address, client_id="test")
    await Relay(system, producer, schema="crm", wakeup=Wakeup(), metrics=RelayMetrics(CollectorRegistry())).run_once()
    await producer.close()
    arrived: Event = broker.expect(topic, "test.noted")
    assert arrived.headers["traceparent"] == row["traceparent"], "sending is not the record's origin"
    with tracing.handling(arrived.headers, topic, "pin.test.readers"):
        inside = tracing.current_ids()
    assert inside["trace_id"] == TRACE
    (handled,) = spans.of(SpanKind.CONSUMER)
    assert (handled.name, trace_of(handled)) == (f"process {topic}", TRACE)
    assert handled.parent is not None
    assert trace.format_span_id(handled.parent.span_id) == row["traceparent"].split("-")[2]
    assert dict(handled.attributes or {}) == {
        "messaging.system": "kafka", "messaging.operation.name": "process", "messaging.operation.type": "process",
        "messaging.destination.name": topic, "messaging.consumer.group.name": "pin.test.readers",
        "messaging.message.id": arrived.id,
    }  # fmt: skip
    (sent,) = spans.of(SpanKind.PRODUCER)
    assert trace_of(sent) != TRACE, "a turn of the relay is a trace of its own"
    assert [trace.format_trace_id(link.context.trace_id) for link in sent.links] == [TRACE]


async def test_a_request_trace_has_a_database_span(spans: Spans, system: Database) -> None:
    async with client_of(app_with(system)) as client:
        await client.post("/notes/a", headers={"traceparent": PARENT})
    statements = [span for span in spans.of(SpanKind.CLIENT) if trace_of(span) == TRACE]
    assert any("select" in str((span.attributes or {}).get("db.statement")) for span in statements)
    (served,) = spans.of(SpanKind.SERVER)
    assert {span.resource.attributes["service.name"] for span in (served, *statements)} == {"test"}


@respx.mock
async def test_a_call_of_another_service_carries_the_trace_and_nothing_else(spans: Spans) -> None:
    route = respx.get("http://directory/people").respond(200)
    token = attach(baggage.set_baggage("tenant", SECRET))
    try:
        with tracing.handling({"traceparent": PARENT}, "t", "g"):
            async with httpx.AsyncClient() as client:
                await client.get("http://directory/people", params={"email": SECRET})
    finally:
        detach(token)
    sent = route.calls.last.request.headers
    assert sent["traceparent"].split("-")[1] == TRACE
    assert "baggage" not in sent


def test_only_allow_listed_headers_make_the_parent(spans: Spans) -> None:
    headers = {"traceparent": PARENT, "tracestate": "a=1", "baggage": "x=y", "b3": "0"}
    out: dict[str, str] = {}
    with tracing.handling(headers, "t", "g"):
        tracing.inject_trace(out)
        assert baggage.get_all() == {}
    assert out.keys() == {"traceparent", "tracestate"}


@pytest.mark.parametrize("parent", ["", "nonsense", "00-0-0-01", "ff" * 40])
def test_a_malformed_parent_begins_a_new_trace(spans: Spans, parent: str) -> None:
    with tracing.handling({"traceparent": parent}, "t", "g", batch=[{"traceparent": parent}]):
        pass
    (span,) = spans.all()
    assert (span.parent, span.links) == (None, ())


def test_a_batch_links_the_other_records_traces_within_bounds(spans: Spans) -> None:
    others = [{"traceparent": f"00-{number:032x}-b7ad6b7169203331-01"} for number in range(1, 200)]
    with tracing.handling({"traceparent": PARENT}, "t", "g", batch=[*others, others[0], {}]):
        pass
    (span,) = spans.all()
    assert trace_of(span) == TRACE
    assert len(span.links) == tracing.MOST_LINKS
    assert len({link.context.trace_id for link in span.links}) == tracing.MOST_LINKS


def test_a_handler_does_not_inherit_the_trace_of_the_loop_around_it(spans: Spans) -> None:
    with tracing.working("loop", new_id()), tracing.handling({}, "t", "g"):
        pass
    handled, worked = spans.all()
    assert trace_of(handled) != trace_of(worked)


def test_what_a_cycle_emits_belongs_to_its_trace(spans: Spans) -> None:
    headers: dict[str, str] = {}
    with tracing.working("timeline-overdue", new_id()):
        tracing.inject_trace(headers)
    (span,) = spans.all()
    assert span.name == "job timeline-overdue"
    assert headers["traceparent"].split("-")[1] == trace_of(span)


# --- what is not traced


async def test_polls_and_probes_begin_no_trace(spans: Spans, system: Database) -> None:
    await system.ping()
    async with client_of(app_with(system)) as client:
        for path in ("/health/live", "/health/ready", "/metrics"):
            await client.get(path)
    assert spans.all() == ()


def test_a_callers_decision_not_to_sample_is_followed(spans: Spans) -> None:
    with tracing.handling({"traceparent": PARENT[:-2] + "00"}, "t", "g"):
        assert tracing.current_ids()["trace_id"] == TRACE, "log lines name it all the same"
    assert spans.all() == ()


def test_of_the_traces_that_begin_here_the_share_is_kept() -> None:
    exporter = InMemorySpanExporter()
    configured = tracing.configure_tracing("test", None, ratio=0.0, exporter=exporter)
    assert configured is not None
    with tracing.working("job", new_id()):
        pass
    with tracing.handling({"traceparent": PARENT}, "t", "g"):
        pass
    configured.close()
    assert [span.kind for span in exporter.get_finished_spans()] == [SpanKind.CONSUMER]


# --- what spans do not say


async def test_no_personal_value_leaves_in_a_span(spans: Spans, system: Database) -> None:
    async with client_of(app_with(system)) as client:
        headers = {"traceparent": PARENT, "user-agent": f"agent of {SECRET}"}
        await client.post("/notes/a", params={"email": SECRET}, headers=headers)
    with respx.mock:
        respx.get(url__startswith="http://directory/").respond(200)
        with tracing.working("job", new_id()):
            async with httpx.AsyncClient() as client:
                await client.get("http://directory/people", params={"email": SECRET})
    told = " ".join(span.to_json() for span in spans.all())
    assert len(spans.all()) >= 4
    assert SECRET not in told
    assert SECRET.replace("@", "%40") not in told
    assert "/notes/a" in told
    assert "127.0.0.1" not in str([(span.attributes or {}).get("client.address") for span in spans.all()])


async def test_what_an_exception_says_stays_in_the_process(spans: Spans) -> None:
    with pytest.raises(LookupError), tracing.working("job", new_id()):
        raise LookupError(f"no account of {SECRET}")
    (span,) = spans.all()
    told = span.to_json()
    assert SECRET not in told
    assert [dict(event.attributes or {}) for event in span.events] == [{"exception.type": "LookupError"}]
    assert not span.status.is_ok


# --- log lines


def test_lines_name_the_trace_where_there_is_one(spans: Spans) -> None:
    assert add_trace(None, "info", {"event": "x"}) == {"event": "x"}
    with tracing.handling({"traceparent": PARENT}, "t", "g"):
        line = add_trace(None, "info", {"event": "x"})
    assert (line["trace_id"], len(line["span_id"])) == (TRACE, 16)


def test_without_tracing_nothing_is_added_or_imported() -> None:
    script = """
import sys
import chassis.cli, chassis.telemetry, chassis.relay
from chassis import tracing
from chassis.ids import new_id
assert tracing.configure_tracing("test", None) is None
headers = {}
with tracing.working("job", new_id()), tracing.handling({}, "t", "g"), tracing.sending([{}]):
    tracing.inject_trace(headers)
assert headers == {} and tracing.current_ids() == {} and not tracing.is_tracing()
heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.instrumentation")
print([name for name in sys.modules if name.startswith(heavy)])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_an_endpoint_that_does_not_answer_stops_nothing() -> None:
    script = """
from chassis import tracing
from chassis.ids import new_id
configured = tracing.configure_tracing("test", "http://127.0.0.1:1/v1/traces")
with tracing.working("job", new_id()):
    print(len(tracing.current_ids()))
"""
    environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == "2"
