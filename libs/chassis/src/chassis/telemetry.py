"""Logs as JSON lines on standard output, and one Prometheus registry per process.

Every line carries the correlation id of its request or job run, and its trace where there is one. Personal data and
money stay out: a processor blanks the keys that could carry them, whatever a call site passes.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import orjson
import structlog
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from chassis.tracing import REDACTED, current_ids

SENSITIVE: Final = frozenset(
    {
        "amount", "authorization", "body", "cookie", "email", "full_name", "headers", "name_of_person", "password",
        "payload", "phone", "price", "secret", "token",
    }
)  # fmt: skip


DEEPEST: Final = 6
"""Levels of nested values that a log line shows."""


def redact(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blank the values of sensitive keys of a log event, at any depth (structlog processor)."""
    for key, value in event.items():
        if key.lower() in SENSITIVE:
            event[key] = REDACTED
        elif key != "exc_info" and not key.startswith("_"):
            event[key] = _blanked(value, DEEPEST)
    return event


def _blanked(value: Any, depth: int) -> Any:
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if depth == 0:
        return "..."
    if isinstance(value, Mapping):
        return {
            key: REDACTED if str(key).lower() in SENSITIVE else _blanked(inner, depth - 1)
            for key, inner in value.items()
        }
    return [_blanked(inner, depth - 1) for inner in value]


def _serialized(event: Mapping[str, Any], **_: Any) -> str:
    """Return an event as one line of JSON, whatever is in it: no line is lost to a value that JSON doesn't know."""
    try:
        return orjson.dumps(event, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        plain = {
            key: value if isinstance(value, str) and value.isprintable() else repr(value)
            for key, value in event.items()
        }
        return orjson.dumps(plain).decode()


def first_lines(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Keep the first line of what each exception says: in the others the database quotes a row (processor)."""
    waiting = event.get("exception")
    stacks = list(waiting) if isinstance(waiting, list) else []
    for stack in stacks:
        stack["exc_value"] = stack["exc_value"].partition("\n")[0]
        stacks += [inner for group in stack.get("exceptions", ()) for inner in group]
    return event


def add_trace(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put trace and span of the current span into a log event (structlog processor)."""
    event.update(current_ids())
    return event


def configure_logging(level: str, service: str) -> None:
    """Send structlog's and the standard library's records to standard output as JSON lines.

    Args:
        level: DEBUG, INFO, WARNING or ERROR.
        service: value of the key `service` of every line.
    """

    def add_service(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_service,
        add_trace,
        redact,
        structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False)),
        first_lines,
    ]
    renderer = structlog.processors.JSONRenderer(serializer=_serialized)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.captureWarnings(capture=True)
    root.setLevel(level)
    for noisy in ("aiokafka", "uvicorn.access", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def new_registry() -> CollectorRegistry:
    """Return a registry that also exports the process's own figures (memory, CPU, open files)."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
