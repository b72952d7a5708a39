"""Composition root of chessboard: settings become a database, a relay, consumers, jobs and an HTTP application."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

from fastapi import FastAPI

from chassis import job_admin
from chassis.audit import AuditSealer
from chassis.clock import Clock, DatabaseClock
from chassis.consumers import ConsumerLoop, ConsumerMetrics, ParkedKeysLoop, admin
from chassis.consumers.handling import Handling
from chassis.consumers.lag import LagWatch
from chassis.db import Database
from chassis.idempotency import IdempotencyKeys
from chassis.identity import TokenVerifier
from chassis.job_records import JobRecords
from chassis.jobs import JobDriver
from chassis.live import LiveTail
from chassis.messaging import Producer, require_topics
from chassis.relay import Floor, OutboxWatch, Relay, RelayMetrics, Wakeup
from chassis.runtime import Background, Loop
from chassis.telemetry import new_registry
from chassis.web import create_app
from chessboard import api, consumers, jobs, messages, repository
from chessboard.settings import ChessboardSettings
from chessboard.tables import SCHEMA

STATUS_CHANGED_LAG: Final = "chessboard_property_object_status_changed_delivery_lag_seconds"


@dataclass(frozen=True, slots=True)
class Chessboard:
    """A wired chessboard process."""

    app: FastAPI
    drivers: Sequence[JobDriver]
    relays: Sequence[Relay]
    handlings: Sequence[Handling]
    close: Callable[[], Awaitable[None]]


def build(settings: ChessboardSettings, roles: frozenset[str], clock: Clock | None = None) -> Chessboard:
    """Wire chessboard for the given roles (api, consumers, relay, jobs); nothing is opened before the application
    starts."""
    clock = clock or DatabaseClock()
    registry = new_registry()
    registry.register(repository.VERSION_CONFLICTS)
    wakeup = Wakeup()
    system = Database(settings.database_url, application_name="chessboard", on_commit=wakeup.set)
    api_database = Database(settings.api_database_url, application_name="chessboard-api", on_commit=wakeup.set)
    producer = Producer(settings.kafka, client_id="chessboard-relay")
    metrics = RelayMetrics(registry, {messages.STATUS_CHANGED_TOPIC: STATUS_CHANGED_LAG})
    floor = Floor(SCHEMA)
    relays = [
        Relay(
            system,
            producer,
            schema=SCHEMA,
            wakeup=wakeup,
            metrics=metrics,
            relays=settings.relay_workers,
            interval=settings.relay_interval,
            name=f"relay {number}",
            floor=floor,
            clock=clock,
        )
        for number in range(settings.relay_workers)
    ]
    consumed = consumers.declare_consumers(registry)
    consumer_metrics = ConsumerMetrics(registry)
    handlings = [Handling(system, consumer, SCHEMA, clock, consumer_metrics) for consumer in consumed]
    declared = jobs.declare_jobs(settings, system, registry, consumer=consumers.CRM_PROPERTY_OBJECT_STATUS)
    drivers = [JobDriver(job, system, clock, JobRecords(SCHEMA)) for job in declared]
    sealer = AuditSealer(system, clock, schema=SCHEMA, registry=registry, event=messages.AUDIT_RECORDED)
    live = LiveTail(settings.kafka, messages.STATUS_CHANGED_TOPIC, api.read_change, registry)
    loops: list[Loop] = []
    topics = {event.topic for event in messages.PUBLISHED}
    if "api" in roles:
        loops.append(live)
    if "consumers" in roles:
        for handling in handlings:
            loops += [ConsumerLoop(handling, settings.kafka), ParkedKeysLoop(handling)]
            topics |= handling.consumer.topics
    if "relay" in roles:
        watch = LagWatch(settings.kafka, registry, declared=consumed)
        loops += [*relays, OutboxWatch(system, SCHEMA, metrics, floor=floor), watch]
    if "jobs" in roles:
        loops += [*drivers, sealer]

    async def kafka_is_ready() -> None:
        await require_topics(settings.kafka, topics)

    async def close() -> None:
        await producer.close()
        await system.close()
        await api_database.close()

    app = create_app(
        title="chessboard",
        version=version("chessboard"),
        registry=registry,
        routers=[*api.ROUTERS, job_admin.router("chessboard", SCHEMA, declared), admin.router("chessboard", SCHEMA)]
        if "api" in roles
        else [],
        errors=api.ERRORS | admin.ERRORS | job_admin.ERRORS,
        background=Background(loops, registry),
        ready={"database": api_database.ping, "kafka": kafka_is_ready},
        on_close=[close],
        idempotency=IdempotencyKeys(SCHEMA),
        rate_limit=settings.rate_limit,
        cors_origins=settings.cors_origins,
        state={
            "api_database": api_database,
            "system_database": system,
            "verifier": TokenVerifier(settings.jwt_issuers),
            "clock": clock,
            "live": live,
            "hold_grace": settings.hold_grace,
        },
    )
    return Chessboard(app, drivers, relays, handlings, close)
