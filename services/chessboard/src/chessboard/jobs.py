"""The background jobs that chessboard declares.

property-object-hold-expiration: the safety net under CRM's releases; the batch of each phase is one transaction, a
failed one rolls back whole and the next cycle repeats it.
project-aggregates-recalc: counts the free objects of projects again, some time after they were asked about first.
retention: a nightly purge of kept answers, settled dead letters and old inbox marks.
"""

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram

from chassis.consumers.retention import dead_letter_retention, inbox_retention
from chassis.db import Database
from chassis.idempotency import KEPT_HOURS, IdempotencyKeys
from chassis.instants import rfc3339
from chassis.jobs import Job, JobMetrics, JobResult, Run
from chassis.retention import Kept, retention_job
from chessboard import aggregates, commands, expired_holds
from chessboard.domain import ExpirationLimits, LostBecause, Phase, StatusChanged
from chessboard.radar import Radar
from chessboard.settings import ChessboardSettings
from chessboard.tables import SCHEMA

SETTLED: Final = timedelta(seconds=10)
"""After this time a change that was given an instant is taken to be committed."""
REPORTED: Final = timedelta(days=1)
"""The period over which report-only mode tells how late CRM's releases come."""
log = structlog.get_logger(__name__)


class PropertyObjectHoldExpiration:
    """Frees objects whose hold is over by more than the grace: reserved ones first, then booked ones.

    Args:
        database: under the system role.
        registry: where the metrics are registered.
        limits: the batch size of a phase, and the grace.
        radar: says why a release was lost.
        report_only: free nothing, and tell what would be freed.
    """

    name = expired_holds.JOB

    def __init__(
        self,
        database: Database,
        registry: CollectorRegistry,
        limits: ExpirationLimits,
        radar: Radar,
        *,
        report_only: bool = False,
    ) -> None:
        self._database = database
        self._limits = limits
        self._radar = radar
        self._report_only = report_only
        self._measured: datetime | None = None
        prefix = "chessboard_property_object_hold_expiration"
        self.metrics = JobMetrics(prefix, registry, phases=[phase.value for phase in Phase])
        self._lost = Counter(
            f"{prefix}_lost_releases_total", "Releases that CRM did not bring.", ["cause"], registry=registry
        )
        for cause in LostBecause:
            self._lost.labels(cause.value)
        self._overdue = Histogram(
            f"{prefix}_overdue_seconds",
            "Time from the end of a hold to the cycle that freed it, or would have.",
            registry=registry,
            buckets=(60, 120, 300, 600, 660, 720, 900, 1800, 3600, 7200, 21_600, 86_400),
        )
        self._delay = Histogram(
            "chessboard_property_object_release_delay_seconds",
            "Time from the end of a hold to CRM's release, for those that came after it.",
            registry=registry,
            buckets=(1, 2, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600),
        )

    def opening(self, run: Run) -> dict[str, Any]:
        """Return what the log line of a cycle's begin says."""
        return {"runId": str(run.id), "AsOf": rfc3339(run.as_of), "HoldGrace": str(self._limits.hold_grace)}

    async def run(self, run: Run) -> JobResult:
        """Run one cycle and return its counts."""
        started = time.perf_counter()
        await self._measure_delays(run)
        counts = dict.fromkeys((f"{phase.value.capitalize()}ReleasedCount" for phase in Phase), 0)
        counts |= {"SkippedLockedCount": 0, "FailedCount": 0}
        for phase in Phase:
            if run.stop.requested:
                break
            if self._report_only:
                counts[f"{phase.value.capitalize()}WouldReleaseCount"] = await self._report(run, phase)
                continue
            batch = await self._release(run, phase)
            counts[f"{phase.value.capitalize()}ReleasedCount"] = len(batch.released)
            counts["SkippedLockedCount"] += batch.skipped_locked
            counts["FailedCount"] += batch.failed
            run.beat()
        async with self._database.read() as session:
            backlog = await expired_holds.count_backlog(session, run.as_of, self._limits.hold_grace)
        self.metrics.backlog.set(backlog)
        return JobResult(counts | {"DurationMs": round((time.perf_counter() - started) * 1000)})

    async def _release(self, run: Run, phase: Phase) -> commands.Expired:
        async with self._database.write() as session:
            batch = await commands.release_expired_holds(session, run, phase, self._limits)
        self.metrics.items.labels(phase.value).inc(len(batch.released))
        self.metrics.skip_locked.inc(batch.skipped_locked)
        self.metrics.errors.inc(batch.failed)
        if batch.released:
            await self._tell(run, batch.released)
        return batch

    async def _tell(self, run: Run, lost: Sequence[StatusChanged]) -> None:
        """Warn of each release that was lost, once it is committed that the safety net did it."""
        causes = await self._radar.explain(lost, run.as_of, self._limits.hold_grace)
        for change in lost:
            cause = causes[change.property_object_id]
            hold, until = change.previous_hold, change.previous_until
            overdue = 0.0 if until is None else (run.as_of - until).total_seconds()
            self._lost.labels(cause.value).inc()
            self._overdue.observe(overdue)
            log.warning(
                "lost CRM release",
                PropertyObjectId=str(change.property_object_id),
                TenantId=str(change.tenant_id),
                ProjectId=str(change.project_id),
                HoldDealId=None if hold is None else str(hold.deal_id),
                HoldBookingId=None if hold is None else str(hold.booking_id),
                FromStatus=change.from_status.value,
                expiredTimer=None if until is None else rfc3339(until),
                overdueBy=overdue,
                cause=cause.value,
            )

    async def _report(self, run: Run, phase: Phase) -> int:
        """Tell of the first holds that would be freed; nothing is locked."""
        grace, size = self._limits.hold_grace, self._limits.batch_size
        async with self._database.read() as session:
            rows = await expired_holds.look(session, phase, run.as_of, grace, size)
        log.info("batch selected", phase=phase.value, count=len(rows), reportOnly=True)
        for row in rows:
            overdue = (run.as_of - row["until"]).total_seconds()
            self._overdue.observe(overdue)
            log.info("would be freed", PropertyObjectId=str(row["id"]), phase=phase.value, overdueBy=overdue)
        return len(rows)

    async def _measure_delays(self, run: Run) -> None:
        """Measure how late CRM's releases came since the last cycle; in report-only mode tell of a whole day's."""
        until = run.as_of - SETTLED
        since = self._measured or until - timedelta(minutes=1)
        async with self._database.read() as session:
            for delay in await expired_holds.read_delays(session, since, until):
                self._delay.observe(delay)
            day = await expired_holds.read_delays(session, until - REPORTED, until) if self._report_only else []
        self._measured = until
        if day:
            log.info("delays of CRM's releases", count=len(day), **_quantiles(day))


def _quantiles(delays: list[float]) -> dict[str, float]:
    ranked = sorted(delays)
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p999": 0.999, "longest": 1.0}
    return {name: ranked[max(0, -int(-share * len(ranked) // 1) - 1)] for name, share in shares.items()}


class ProjectAggregatesRecalc:
    """Counts the free objects of projects whose first request is older than the debounce time.

    Args:
        database: under the system role.
        registry: where the metrics are registered.
        debounce: how long a project's first request waits for others.
        batch_size: projects of one transaction.
    """

    name = "project-aggregates-recalc"

    def __init__(self, database: Database, registry: CollectorRegistry, debounce: timedelta, batch_size: int) -> None:
        self._database = database
        self._debounce = debounce
        self._batch_size = batch_size
        self.metrics = JobMetrics("chessboard_project_aggregates_recalc", registry)
        self._requests = Counter(
            "chessboard_project_aggregates_recalc_requests_total",
            "Requests to count a project again that were settled.",
            registry=registry,
        )

    async def run(self, run: Run) -> JobResult:
        """Run one cycle and return its counts."""
        projects = requests = 0
        asked_before = run.as_of - self._debounce
        while not run.stop.requested:
            async with self._database.write() as session:
                ids = await aggregates.claim_projects(session, asked_before, self._batch_size)
                settled = await aggregates.count_again(session, ids, run.as_of) if ids else 0
            run.beat()
            projects, requests = projects + len(ids), requests + settled
            self.metrics.items.inc(len(ids))
            self._requests.inc(settled)
            if len(ids) < self._batch_size:
                break
        async with self._database.read() as session:
            waiting = await aggregates.count_waiting(session, asked_before)
        self.metrics.backlog.set(waiting)
        return JobResult({"projects": projects, "requests": requests, "waiting": waiting})


def declare_jobs(
    settings: ChessboardSettings, database: Database, registry: CollectorRegistry, *, consumer: str
) -> list[Job]:
    """Return chessboard's jobs, ready to be driven.

    Args:
        settings: the service's.
        database: under the system role.
        registry: where their metrics are registered.
        consumer: the group that does CRM's releases.
    """
    silence = settings.job_property_object_hold_expiration_silence
    expiration = PropertyObjectHoldExpiration(
        database,
        registry,
        settings.expiration_limits(),
        Radar(database, settings.kafka, consumer, silence),
        report_only=settings.job_property_object_hold_expiration_report_only,
    )
    recalc = ProjectAggregatesRecalc(
        database,
        registry,
        settings.job_project_aggregates_recalc_debounce,
        settings.job_project_aggregates_recalc_batch_size,
    )
    letters, inbox = dead_letter_retention(SCHEMA), inbox_retention(SCHEMA)
    kept = [
        Kept("answers", timedelta(hours=KEPT_HOURS), IdempotencyKeys(SCHEMA).purge),
        Kept("dead_letters", letters.life, letters.purge),
        Kept("inbox", inbox.life, inbox.purge),
    ]
    every = timedelta(seconds=settings.job_property_object_hold_expiration_interval)
    counting = timedelta(seconds=settings.job_project_aggregates_recalc_interval)
    return [
        Job(expiration.name, every, expiration.run, expiration.metrics, opening=expiration.opening),
        Job(recalc.name, counting, recalc.run, recalc.metrics),
        retention_job("chessboard_retention", database, registry, kept),
    ]
