"""Traces: one trace from a request, or a job's cycle, through outbox and Kafka to the handler of the record.

Off unless an OTLP endpoint is configured, and then nothing of OpenTelemetry is imported. No personal data and no money
leave in a span: queries of addresses, callers' addresses and what exceptions say are taken out in the one place where
spans leave the process. Only `traceparent` and `tracestate` travel; baggage doesn't.

The attribute names of the messaging conventions, which are still in development, stand here and nowhere else.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Link, Tracer

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION: Final = "messaging.destination.name"
CONSUMER_GROUP: Final = "messaging.consumer.group.name"
MESSAGE_ID: Final = "messaging.message.id"
BATCH_COUNT: Final = "messaging.batch.message_count"

PROPAGATED: Final = ("traceparent", "tracestate")
"""Headers that carry a trace; no other is passed on."""

MOST_LINKS: Final = 64
QUIET_PATHS: Final = "/health/live,/health/ready,/metrics"
REDACTED: Final = "[redacted]"
_ADDRESSES: Final = frozenset({"http.url", "http.target", "url.full", "url.path"})
_WITHHELD: Final = frozenset(
    {
        "url.query", "client.address", "client.port", "http.client_ip", "net.peer.ip", "network.peer.address",
        "http.user_agent", "user_agent.original", "db.statement.parameters", "enduser.id",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tracing:
    """The tracing of this process; `close` sends what is left."""

    provider: "TracerProvider"
    tracer: "Tracer"

    def close(self) -> None:
        """Send what is left and leave the libraries as they were."""
        from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor
        from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor

        global _current  # noqa: PLW0603 - one tracing per process
        _current = None
        AsyncPGInstrumentor().uninstrument()  # type: ignore[no-untyped-call]
        HTTPXClientInstrumentor().uninstrument()
        self.provider.shutdown()


_current: Tracing | None = None


def configure_tracing(
    service: str, endpoint: str | None, ratio: float = 1.0, exporter: "SpanExporter | None" = None
) -> Tracing | None:
    """Set up tracing for this process.

    Args:
        service: `service.name`.
        endpoint: where spans go by OTLP over HTTP (`http://host:4318/v1/traces`); None: tracing stays off.
        ratio: share of traces that begin here and are kept; a caller's decision is followed.
        exporter: in place of the endpoint (tests).

    Returns:
        The tracing, or None where it is off.
    """
    if endpoint is None and exporter is None:
        return None
    from opentelemetry import propagate
    from opentelemetry.instrumentation.asyncpg import AsyncPGInstrumentor
    from opentelemetry.instrumentation.httpx import HTTPXClientInstrumentor
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    global _current  # noqa: PLW0603 - one tracing per process
    resource = Resource.create({"service.name": service, "service.namespace": "pin"})
    provider = TracerProvider(resource=resource, sampler=_sampler(ratio))
    provider.add_span_processor(SimpleSpanProcessor(_scrubbing(exporter)) if exporter else _batching(str(endpoint)))
    propagate.set_global_textmap(TraceContextTextMapPropagator())
    AsyncPGInstrumentor().instrument(tracer_provider=provider)  # type: ignore[no-untyped-call]
    HTTPXClientInstrumentor().instrument(tracer_provider=provider)
    _current = Tracing(provider, provider.get_tracer("chassis"))
    return _current


def instrument_app(app: "FastAPI") -> None:
    """Give every request of an application a span, except for probes; before it serves."""
    if _current is None:
        return
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor

    FastAPIInstrumentor.instrument_app(app, tracer_provider=_current.provider, excluded_urls=QUIET_PATHS)


def is_tracing() -> bool:
    """Tell whether this process traces, for who would have to prepare something for a span."""
    return _current is not None


def current_ids() -> dict[str, str]:
    """Return `trace_id` and `span_id` of the current span; nothing where there is none."""
    if _current is None:
        return {}
    from opentelemetry.trace import format_span_id, format_trace_id, get_current_span

    context = get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


def inject_trace(headers: dict[str, str]) -> None:
    """Add the current span's trace context to a record's headers."""
    if _current is None:
        return
    from opentelemetry import propagate

    propagate.inject(headers)


def working(job: str, run_id: UUID) -> AbstractContextManager[None]:
    """Return a span around one cycle of a job; what the cycle emits belongs to its trace."""
    if _current is None:
        return nullcontext()
    return _span(_current, f"job {job}", "INTERNAL", {"pin.job": job, "pin.run_id": str(run_id)})


def sending(records: Sequence[Mapping[str, str]]) -> AbstractContextManager[None]:
    """Return a producer span around the sending of records, linked to the traces in which they were emitted.

    Args:
        records: the headers of each record; the first MOST_LINKS different traces are linked.
    """
    if _current is None:
        return nullcontext()
    attributes = {SYSTEM: "kafka", OPERATION_NAME: "send", OPERATION_TYPE: "send", BATCH_COUNT: len(records)}
    return _span(_current, "send", "PRODUCER", attributes, links=_links(records))


def handling(
    headers: Mapping[str, str], topic: str, consumer: str, batch: Sequence[Mapping[str, str]] = ()
) -> AbstractContextManager[None]:
    """Return a `process` span around the handling of a record, in the trace in which the record was emitted.

    Args:
        headers: the record's headers; other names than PROPAGATED are ignored.
        topic: where it was read.
        consumer: the consumer group.
        batch: headers of the other records that are handled in the same go; their traces are linked.
    """
    if _current is None:
        return nullcontext()
    attributes: dict[str, Any] = {
        SYSTEM: "kafka",
        OPERATION_NAME: "process",
        OPERATION_TYPE: "process",
        DESTINATION: topic,
        CONSUMER_GROUP: consumer,
        MESSAGE_ID: headers.get("ce_id", ""),
    }
    if batch:
        attributes[BATCH_COUNT] = 1 + len(batch)
    return _span(_current, f"process {topic}", "CONSUMER", attributes, parent=headers, links=_links(batch))


@contextmanager
def _span(
    tracing: Tracing,
    name: str,
    kind: str,
    attributes: Mapping[str, Any],
    *,
    parent: Mapping[str, str] | None = None,
    links: Sequence["Link"] = (),
) -> Iterator[None]:
    from opentelemetry.trace import SpanKind

    context = None if parent is None else _extracted(parent)
    with tracing.tracer.start_as_current_span(
        name, context=context, kind=SpanKind[kind], attributes=dict(attributes), links=list(links)
    ):
        yield


def _extracted(headers: Mapping[str, str]) -> Any:
    from opentelemetry import propagate
    from opentelemetry.context import Context

    return propagate.extract({name: headers[name] for name in PROPAGATED if name in headers}, context=Context())


def _links(records: Sequence[Mapping[str, str]]) -> list["Link"]:
    from opentelemetry.trace import Link, get_current_span

    different = dict.fromkeys(record["traceparent"] for record in records if "traceparent" in record)
    contexts = [
        get_current_span(_extracted({"traceparent": parent})).get_span_context()
        for parent in list(different)[:MOST_LINKS]
    ]
    return [Link(context) for context in contexts if context.is_valid]


def _sampler(ratio: float) -> "Sampler":
    """Follow the caller's decision; of what begins here keep a share, and no call of a library that begins nothing."""
    from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
    from opentelemetry.trace import SpanKind

    share = TraceIdRatioBased(ratio)

    class Entrances(Sampler):
        """A statement or call without a parent is a poll: a trace of it would say nothing, every second."""

        def should_sample(self, parent_context: Any, trace_id: int, name: str, kind: Any = None, *more: Any,
                          **named: Any) -> SamplingResult:  # fmt: skip
            """Drop calls that begin a trace."""
            if kind == SpanKind.CLIENT:
                return SamplingResult(Decision.DROP)
            return share.should_sample(parent_context, trace_id, name, kind, *more, **named)

        def get_description(self) -> str:
            """Return what it does."""
            return f"Entrances({ratio})"

    return ParentBased(root=Entrances())


def _batching(endpoint: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(_scrubbing(OTLPSpanExporter(endpoint=endpoint)))


def _scrubbing(exporter: "SpanExporter") -> "SpanExporter":
    """Return an exporter that passes on spans without what must not leave the process."""
    from opentelemetry.sdk.trace.export import SpanExporter

    class Scrubbing(SpanExporter):
        """Passes on scrubbed spans."""

        def export(self, spans: Sequence["ReadableSpan"]) -> Any:
            """Export spans, scrubbed."""
            return exporter.export([_scrubbed(span) for span in spans])

        def shutdown(self) -> None:
            """End the exporter."""
            exporter.shutdown()

        def force_flush(self, timeout_millis: int = 30_000) -> bool:
            """Send what is waiting."""
            return exporter.force_flush(timeout_millis)

    return Scrubbing()


def _scrubbed(span: "ReadableSpan") -> "ReadableSpan":
    """Return a copy without queries and callers' addresses; of an exception only its class is told."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.trace import Status

    events = [Event(event.name, _only_type(event.attributes or {}), event.timestamp) for event in span.events]
    return ReadableSpan(
        name=span.name,
        context=span.get_span_context(),
        parent=span.parent,
        resource=span.resource,
        attributes={name: _clean(name, value) for name, value in (span.attributes or {}).items()},
        events=events,
        links=span.links,
        kind=span.kind,
        status=Status(span.status.status_code),
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def _only_type(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name == "exception.type"}


def _clean(name: str, value: Any) -> Any:
    if name in _WITHHELD:
        return REDACTED
    return value.partition("?")[0] if name in _ADDRESSES and isinstance(value, str) else value
