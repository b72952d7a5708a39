"""The background jobs that chessboard declares.

retention: a nightly purge of kept answers, settled dead letters and old inbox marks.
"""

from datetime import timedelta

from prometheus_client import CollectorRegistry

from chassis.consumers.retention import dead_letter_retention, inbox_retention
from chassis.db import Database
from chassis.idempotency import KEPT_HOURS, IdempotencyKeys
from chassis.jobs import Job
from chassis.retention import Kept, retention_job
from chessboard.settings import ChessboardSettings
from chessboard.tables import SCHEMA


def declare_jobs(
    settings: ChessboardSettings,  # noqa: ARG001 - every service's jobs are declared with these
    database: Database,
    registry: CollectorRegistry,
) -> list[Job]:
    """Return chessboard's jobs, ready to be driven."""
    letters, inbox = dead_letter_retention(SCHEMA), inbox_retention(SCHEMA)
    kept = [
        Kept("answers", timedelta(hours=KEPT_HOURS), IdempotencyKeys(SCHEMA).purge),
        Kept("dead_letters", letters.life, letters.purge),
        Kept("inbox", inbox.life, inbox.purge),
    ]
    return [retention_job("chessboard_retention", database, registry, kept)]
