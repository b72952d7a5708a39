"""A file of objects, imported: new ones are added, changed ones changed, and what is as the file says stays untouched.

What is held or sold keeps its status, and what is sold its price. Importing the same file again writes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import AuditRecord
from chassis.db import driver_connection
from chessboard import repository
from chessboard.commands.objects import By
from chessboard.commands.placing import NewObject, lock_project, write_new_objects
from chessboard.domain import (
    Change,
    ImportLine,
    ImportRefused,
    LineError,
    PropertyObject,
    Sheet,
    Status,
    StatusSource,
    VersionConflict,
)
from chessboard.repository import AUDIT

_BUILDINGS: Final = "select id, name, sections from chessboard.building where project_id = $1"
_KNOWN: Final = """
select o.id, o.building_id, o.number from chessboard.property_object as o
join unnest($1::uuid[], $2::text[]) as w(building_id, number)
  on o.building_id = w.building_id and o.number = w.number
"""
_MEASURE: Final = """
update chessboard.property_object as o
set section = c.section, floor = c.floor, rooms = c.rooms, area = c.area
from unnest($1::uuid[], $2::int[], $3::int[], $4::int[], $5::numeric[]) as c(id, section, floor, rooms, area)
where o.id = c.id
"""


@dataclass(slots=True)
class ImportReport:
    """What became of a file.

    Attributes:
        lines: of objects in the file.
        applied: whether anything that is counted here was written.
        kept: lines whose price or status was not taken over, since the object is held or sold.
        errors: of the lines that were left out.
    """

    lines: int
    applied: bool
    created: int = 0
    changed: int = 0
    unchanged: int = 0
    kept: int = 0
    errors: Sequence[LineError] = ()


@dataclass(slots=True)
class _Plan:
    """What is to be written."""

    new: list[NewObject] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    measured: list[tuple[PropertyObject, ImportLine]] = field(default_factory=list)


async def import_objects(
    session: AsyncSession, project_id: UUID, sheet: Sheet, by: By, *, dry_run: bool = False, valid_only: bool = False
) -> ImportReport:
    """Bring the objects of a project to what a file says.

    Args:
        session: an open write session of the API's role.
        project_id: the project in whose buildings the objects stand.
        sheet: the file, read.
        by: who imports it.
        dry_run: only tell what would become of it.
        valid_only: leave lines with errors out; otherwise one error refuses the file.

    Raises:
        ProjectNotFound: no such project in the caller's tenant.
        ImportRefused: a line is not valid; nothing was written.
    """
    await lock_project(session, project_id)
    placed, errors = await _placed(session, project_id, sheet)
    if errors and not (dry_run or valid_only):
        raise ImportRefused(errors)
    report = ImportReport(sheet.count, applied=not dry_run, errors=errors)
    known = await _known(session, list(placed))
    found = await repository.find_for_update(session, known.values())
    plan = _Plan()
    for place, line in placed.items():
        if place in known:
            _compare(found[known[place]], line, plan, report, by)
        else:
            report.created += 1
            plan.new.append(_new(place[0], line))
    if not dry_run:
        await _write(session, project_id, plan, by)
    return report


async def _placed(
    session: AsyncSession, project_id: UUID, sheet: Sheet
) -> tuple[dict[tuple[UUID, str], ImportLine], list[LineError]]:
    """Return the lines by building and number, and all errors in the order of lines."""
    rows = await (await driver_connection(session)).fetch(_BUILDINGS, project_id)
    buildings = {row["name"]: (row["id"], row["sections"]) for row in rows}
    placed, errors = {}, list(sheet.errors)
    for line in sheet.lines:
        building = buildings.get(line.building)
        if building is None:
            errors.append(LineError(line.line, "building", "unknown_building", "the project has no such building"))
        elif line.section > building[1]:
            message = f"the building has {building[1]} sections"
            errors.append(LineError(line.line, "section", "unknown_section", message))
        else:
            placed[building[0], line.number] = line
    return placed, sorted(errors, key=lambda error: error.line)


async def _known(session: AsyncSession, places: Sequence[tuple[UUID, str]]) -> dict[tuple[UUID, str], UUID]:
    """Return the ids of the objects that there are already."""
    if not places:
        return {}
    rows = await (await driver_connection(session)).fetch(_KNOWN, *map(list, zip(*places, strict=True)))
    return {(row["building_id"], row["number"]): row["id"] for row in rows}


def _compare(found: PropertyObject, line: ImportLine, plan: _Plan, report: ImportReport, by: By) -> None:
    """Plan what makes an object what its line says."""
    changes: list[Change] = []
    kept = False
    if (line.price_minor, line.currency) != (found.price_minor, found.currency):
        if found.status is Status.SOLD:
            kept = True
        else:
            changes.append(found.reprice(line.price_minor, line.currency, by.now))
    if line.status is not None and line.status is not found.status:
        match found.status:
            case Status.FREE:
                changes.append(found.hide(StatusSource.IMPORT, by.now))
            case Status.HIDDEN:
                changes.append(found.unhide(StatusSource.IMPORT, by.now))
            case Status.RESERVED | Status.BOOKED | Status.SOLD:
                kept = kept or line.status is Status.HIDDEN
    plan.changes += changes
    measures = (line.section, line.floor, line.rooms, line.area)
    measured = measures != (found.section, found.floor, found.rooms, found.area)
    if measured:
        plan.measured.append((found, line))
    report.kept += kept
    report.changed += bool(changes or measured)
    report.unchanged += not (changes or measured)


def _new(building_id: UUID, line: ImportLine) -> NewObject:
    return NewObject(
        building_id,
        line.section,
        line.number,
        line.floor,
        line.rooms,
        line.area,
        line.price_minor,
        line.currency,
        line.status or Status.FREE,
    )


async def _write(session: AsyncSession, project_id: UUID, plan: _Plan, by: By) -> None:
    if len(await write_new_objects(session, project_id, plan.new, StatusSource.IMPORT, by)) < len(plan.new):
        raise VersionConflict("an object of the file was added in the meantime")
    if await repository.write_changes(session, plan.changes, by.origin):
        raise VersionConflict("an object of the file has changed in the meantime")
    if not plan.measured:
        return
    rows = [(found.id, line.section, line.floor, line.rooms, line.area) for found, line in plan.measured]
    await (await driver_connection(session)).execute(_MEASURE, *map(list, zip(*rows, strict=True)))
    records = [
        AuditRecord(
            "property-object.measured", "property-object", found.id, found.tenant_id, {"version": found.version}
        )
        for found, _ in plan.measured
    ]
    await AUDIT.record(session, records, occurred_at=by.now, actor=by.user_id, correlation_id=by.correlation_id)
