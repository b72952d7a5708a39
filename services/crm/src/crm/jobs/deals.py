"""The jobs of deals.

timeline-overdue: each batch is one transaction; a failed one rolls back whole and the next cycle repeats it.
timeline-leftovers: a nightly look for what that job and the commands should never leave.
"""

import structlog
from prometheus_client import CollectorRegistry, Counter

from chassis.db import Database
from chassis.jobs import JobMetrics, JobResult, Run
from crm import commands, repository
from crm.domain import BatchResult, OverdueLimits

log = structlog.get_logger(__name__)


class TimelineOverdue:
    """Moves steps whose due time has come to Overdue, batch by batch, until none is left or the limit is reached."""

    name = "timeline-overdue"

    def __init__(
        self,
        database: Database,
        registry: CollectorRegistry,
        limits: OverdueLimits,
        *,
        single_runner: bool = False,
    ) -> None:
        self._database = database
        self._limits = limits
        self._single_runner = single_runner
        self.metrics = JobMetrics("crm_timeline_overdue", registry)
        self._not_runner = Counter(
            "crm_timeline_overdue_single_runner_skips_total",
            "Batches left to the process that holds the single-runner lock.",
            registry=registry,
        )

    async def run(self, run: Run) -> JobResult:
        """Run one cycle and return its counts."""
        processed = skipped = failed = batches = 0
        after = None
        while batches < self._limits.max_batches_per_cycle and not run.stop.requested:
            batch = await self._run_batch(run, after)
            run.beat()
            batches += 1
            after = batch.cursor
            processed += batch.processed_count
            skipped += batch.skipped_locked
            failed += batch.failed_count
            if not batch.has_more:
                break
        self.metrics.backlog.set(await self._backlog(run))
        return JobResult({"processed": processed, "batches": batches, "skipped_locked": skipped, "failed": failed})

    async def _run_batch(self, run: Run, after: commands.Cursor | None) -> BatchResult:
        async with self._database.write() as session:
            if self._single_runner and not await repository.try_single_runner(session):
                self._not_runner.inc()
                return BatchResult(processed_count=0, has_more=False)
            batch = await commands.mark_overdue_steps(session, run, self._limits, after)
        self.metrics.items.inc(batch.processed_count)
        self.metrics.skip_locked.inc(batch.skipped_locked)
        self.metrics.errors.inc(batch.failed_count)
        if batch.processed_count or batch.skipped_locked:
            log.info("batch committed", processed=batch.processed_count, skipped_locked=batch.skipped_locked)
        return batch

    async def _backlog(self, run: Run) -> int:
        async with self._database.read() as session:
            return await repository.count_overdue_backlog(session, run.as_of)


class TimelineLeftovers:
    """Reports steps that are open although their deal has ended: the command that ends a deal leaves none."""

    name = "timeline-leftovers"

    def __init__(self, database: Database, registry: CollectorRegistry) -> None:
        self._database = database
        self.metrics = JobMetrics("crm_timeline_leftovers", registry)

    async def run(self, run: Run) -> JobResult:
        """Count the leftovers and log the first of them; changes nothing."""
        async with self._database.read() as session:
            count, first = await repository.find_leftover_steps(session)
        self.metrics.backlog.set(count)
        for step_id, deal_id in first:
            log.error("step left open", step=str(step_id), deal=str(deal_id), run_id=str(run.id))
        return JobResult({"leftovers": count})
