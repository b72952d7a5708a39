"""The safety net in tests: processes that run it, holds that are over, and what a cycle said and left."""

from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg
from board_world import Row, World

from chassis.db import driver_connection
from chassis.jobs import JobDriver, Run
from chassis.runtime import Stop
from chessboard.app import Chessboard

JOB: Final = "property-object-hold-expiration"
PREFIX: Final = "chessboard_property_object_hold_expiration"
CHANGED: Final = "pin.chessboard.property-object-status-changed.v1"
GRACE: Final = timedelta(minutes=10)


def net(world: World, batch_size: int = 200, **overrides: Any) -> Chessboard:
    """Build a process that runs the jobs."""
    return world.board("jobs", job_property_object_hold_expiration_batch_size=batch_size, **overrides)


def driver_of(board: Chessboard, name: str = JOB) -> JobDriver:
    """Return a process's driver of a job."""
    (driver,) = [driver for driver in board.drivers if driver.job.name == name]
    return driver


async def cycle(board: Chessboard, stop: Stop | None = None) -> dict[str, int]:
    """Run one cycle of the safety net and return its counts without the duration."""
    counts = (await driver_of(board).run_once(stop)).counts
    return {name: count for name, count in counts.items() if name != "DurationMs"}


def counted(reserved: int = 0, booked: int = 0, skipped: int = 0, failed: int = 0) -> dict[str, int]:
    """Return what a cycle counts."""
    return {
        "ReservedReleasedCount": reserved,
        "BookedReleasedCount": booked,
        "SkippedLockedCount": skipped,
        "FailedCount": failed,
    }


async def lost(world: World, status: str = "Reserved", until: datetime | None = None, **columns: Any) -> UUID:
    """Add an object whose hold was over long ago."""
    return await world.property_object(status=status, until=until or world.ago(minutes=30), **columns)


async def lost_in_order(world: World, count: int, status: str = "Reserved") -> list[UUID]:
    """Add objects of one building whose holds were over a minute apart, the oldest first."""
    building = await world.building(await world.project())
    ages = (world.ago(minutes=20 + count - number) for number in range(count))
    return [await lost(world, status, until, building=building) for until in ages]


def told(rows: list[Row]) -> list[UUID]:
    """Return the objects that the outbox says were freed, in order."""
    return [UUID(row["payload"]["PropertyObjectId"]) for row in rows if row["topic"] == CHANGED]


async def in_status(world: World, status: str) -> set[UUID]:
    """Return the objects of a status."""
    rows = await world.admin.fetch("select id from chessboard.property_object where status = $1", status)
    return {row["id"] for row in rows}


async def unlocked(world: World) -> set[UUID]:
    """Return the objects whose rows nobody holds."""
    looker = await asyncpg.connect(world.database.admin_url)
    try:
        rows = await looker.fetch("select id from chessboard.property_object for update skip locked")
    finally:
        await looker.close()
    return {row["id"] for row in rows}


async def everything(world: World) -> list[str]:
    """Return every row that the safety net may write, as text: equal before and after means that nothing changed."""
    tables = (
        "property_object", "property_object_version", "outbox", "audit_log", "project_recalc_request", "job_poison",
        "hold_ledger", "project",
    )  # fmt: skip
    return [
        f"{table} {row[0]}"
        for table in tables
        for row in await world.admin.fetch(f"select t::text from chessboard.{table} t order by 1")
    ]


@asynccontextmanager
async def audit_log_locked(world: World):
    """Let every writer of the audit log wait: a batch stands still between its claim and its commit."""
    async with world.admin.transaction():
        await world.admin.execute("lock table chessboard.audit_log in access exclusive mode")
        yield


@asynccontextmanager
async def held_by_another(world: World, *ids: UUID):
    """Hold the rows of objects, as the consumer does while it handles them."""
    async with world.system().write() as session:
        await (await driver_connection(session)).execute(
            "select from chessboard.property_object where id = any($1::uuid[]) order by id for update", list(ids)
        )
        yield


def run_at(instant: datetime, run_id: UUID) -> Run:
    """Return a run of the job."""
    return Run(run_id, instant, Stop(), lambda: None)
