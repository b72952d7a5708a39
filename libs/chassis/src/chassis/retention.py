"""The nightly job that deletes what has done its duty, in bounded transactions: no purge is ever one huge DELETE."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from prometheus_client import CollectorRegistry
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import Database
from chassis.jobs import DailyAt, Job, JobMetrics, JobResult, Run

ROWS: Final = 1000
"""Rows of one transaction."""

NIGHTLY: Final = DailyAt(time(3, 30), ZoneInfo("UTC"))


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept for a while.

    Attributes:
        name: of the count in the job's result.
        life: how long rows are kept.
        purge: deletes, in the session's transaction, at most so many rows older than an instant; returns how many.
    """

    name: str
    life: timedelta
    purge: Callable[[AsyncSession, datetime, int], Awaitable[int]]


def retention_job(prefix: str, database: Database, registry: CollectorRegistry, kept: Sequence[Kept]) -> Job:
    """Return the job `retention` of a service.

    Args:
        prefix: of its metrics, `<context>_retention`.
        database: under the system role.
        registry: where the metrics are registered.
        kept: what it purges.
    """
    metrics = JobMetrics(prefix, registry, phases=[each.name for each in kept])

    async def run(run: Run) -> JobResult:
        counts = {}
        for each in kept:
            counts[each.name] = await _purge(database, run, each)
            metrics.items.labels(each.name).inc(counts[each.name])
        return JobResult(counts)

    return Job("retention", NIGHTLY, run, metrics)


async def _purge(database: Database, run: Run, kept: Kept) -> int:
    total = 0
    while not run.stop.requested:
        async with database.write() as session:
            deleted = await kept.purge(session, run.as_of - kept.life, ROWS)
        run.beat()
        total += deleted
        if deleted < ROWS:
            break
    return total
