"""The background jobs that crm declares; retention is a nightly purge of kept answers, dead letters and inbox marks."""

from datetime import time, timedelta
from typing import Final
from zoneinfo import ZoneInfo

from prometheus_client import CollectorRegistry

from chassis.consumers.retention import dead_letter_retention, inbox_retention
from chassis.db import Database
from chassis.idempotency import KEPT_HOURS, IdempotencyKeys
from chassis.jobs import DailyAt, Job
from chassis.retention import Kept, retention_job
from crm.jobs.bookings import BookingSweep, booking_answers, booking_expiration, booking_quotes
from crm.jobs.deals import TimelineLeftovers, TimelineOverdue
from crm.settings import CrmSettings
from crm.tables import SCHEMA

__all__ = ["NIGHTLY", "BookingSweep", "TimelineLeftovers", "TimelineOverdue", "declare_jobs"]

NIGHTLY: Final = DailyAt(time(3), ZoneInfo("UTC"))
"""03:00 in the platform calendar's zone."""


def declare_jobs(settings: CrmSettings, database: Database, registry: CollectorRegistry) -> list[Job]:
    """Return crm's jobs, ready to be driven."""
    overdue = TimelineOverdue(
        database,
        registry,
        settings.overdue_limits(),
        single_runner=settings.job_timeline_overdue_single_runner,
    )
    leftovers = TimelineLeftovers(database, registry)
    letters, inbox = dead_letter_retention(SCHEMA), inbox_retention(SCHEMA)
    kept = [
        Kept("answers", timedelta(hours=KEPT_HOURS), IdempotencyKeys(SCHEMA).purge),
        Kept("dead_letters", letters.life, letters.purge),
        Kept("inbox", inbox.life, inbox.purge),
    ]
    interval = timedelta(seconds=settings.job_timeline_overdue_interval)
    return [
        Job(overdue.name, interval, overdue.run, overdue.metrics),
        Job(leftovers.name, NIGHTLY, leftovers.run, leftovers.metrics),
        retention_job("crm_retention", database, registry, kept),
        *_of_bookings(settings, database, registry),
    ]


def _of_bookings(settings: CrmSettings, database: Database, registry: CollectorRegistry) -> list[Job]:
    made = [
        (
            booking_expiration(database, registry, settings.job_booking_expiration_batch_size),
            settings.job_booking_expiration_interval,
        ),
        (
            booking_answers(database, registry, settings.job_booking_answers_batch_size),
            settings.job_booking_answers_interval,
        ),
        (
            booking_quotes(database, registry, settings.job_booking_quotes_batch_size),
            settings.job_booking_quotes_interval,
        ),
    ]
    return [Job(sweep.name, timedelta(seconds=seconds), sweep.run, sweep.metrics) for sweep, seconds in made]
