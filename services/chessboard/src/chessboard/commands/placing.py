"""What people set up: projects, their buildings, and the objects in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import AuditRecord
from chassis.db import COPY_NULL, copy_lines, copy_text, driver_connection
from chassis.ids import new_id
from chassis.instants import rfc3339
from chessboard.commands.objects import By
from chessboard.domain import (
    BuildingNameTaken,
    BuildingNotFound,
    NumberTaken,
    ProjectNotFound,
    Status,
    StatusSource,
    ValidationError,
)
from chessboard.repository import AUDIT

_LOCK_PROJECT: Final = text("select id from chessboard.project where id = :id for no key update")
_ADD_PROJECT: Final = text(
    "insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)"
    " values (:id, :tenant, :name, 1, :at, :at)"
)
_ADD_BUILDING: Final = text(
    "insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)"
    " values (:id, :tenant, :project, :name, :sections, :at, :at) on conflict (project_id, name) do nothing"
)
_SECTIONS: Final = text("select sections from chessboard.building where id = :id and project_id = :project")
_ADD_OBJECTS: Final = """
insert into chessboard.property_object
  (id, tenant_id, project_id, building_id, section, number, floor, rooms, area, price_minor, currency, status,
   status_source, status_changed_at, version, created_at, updated_at)
select o.id, $1, $2, o.building_id, o.section, o.number, o.floor, o.rooms, o.area, o.price_minor, o.currency, o.status,
       $3, $4, 1, $4, $4
from unnest($5::uuid[], $6::uuid[], $7::int[], $8::text[], $9::int[], $10::int[], $11::numeric[], $12::bigint[],
            $13::text[], $14::text[])
  as o(id, building_id, section, number, floor, rooms, area, price_minor, currency, status)
on conflict (building_id, number) do nothing
returning id
"""
_FIRST_VERSION: Final = (
    "property_object_id", "version", "tenant_id", "from_status", "to_status", "source", "price_minor", "currency",
    "actor", "correlation_id", "changed_at",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NewObject:
    """An object to add to a building."""

    building_id: UUID
    section: int
    number: str
    floor: int
    rooms: int
    area: Decimal
    price_minor: int
    currency: str
    status: Status = Status.FREE


async def add_project(session: AsyncSession, name: str, by: By) -> UUID:
    """Add a project and return its id."""
    project_id = new_id()
    await session.execute(_ADD_PROJECT, {"id": project_id, "tenant": by.tenant_id, "name": name, "at": by.now})
    await _audit(session, [AuditRecord("project.added", "project", project_id, by.tenant_id, {})], by)
    return project_id


async def add_building(session: AsyncSession, project_id: UUID, name: str, sections: int, by: By) -> UUID:
    """Add a building to a project and return its id.

    Raises:
        ProjectNotFound: no such project in the caller's tenant.
        BuildingNameTaken: the project has a building of this name.
    """
    await lock_project(session, project_id)
    building_id = new_id()
    values = {"id": building_id, "tenant": by.tenant_id, "project": project_id, "name": name, "sections": sections}
    added = await session.execute(_ADD_BUILDING, values | {"at": by.now})
    if added.rowcount == 0:  # type: ignore[attr-defined]
        raise BuildingNameTaken(f"the project has a building {name}")
    details = {"projectId": str(project_id), "sections": sections}
    await _audit(session, [AuditRecord("building.added", "building", building_id, by.tenant_id, details)], by)
    return building_id


async def add_object(session: AsyncSession, project_id: UUID, new: NewObject, by: By) -> UUID:
    """Add an object to a building of a project and return its id.

    Raises:
        ProjectNotFound: no such project in the caller's tenant.
        BuildingNotFound: no such building in the project.
        ValidationError: the building has no such section.
        NumberTaken: the building has an object of this number.
    """
    await lock_project(session, project_id)
    sections = await session.scalar(_SECTIONS, {"id": new.building_id, "project": project_id})
    if sections is None:
        raise BuildingNotFound(f"no building {new.building_id} in the project")
    if new.section > sections:
        raise ValidationError(f"the building has {sections} sections")
    added = await write_new_objects(session, project_id, [new], StatusSource.ADMIN, by)
    if not added:
        raise NumberTaken(f"the building has an object {new.number}")
    return added[0]


async def lock_project(session: AsyncSession, project_id: UUID) -> None:
    """Keep other people from adding to a project until the transaction ends.

    Raises:
        ProjectNotFound: no such project in the caller's tenant.
    """
    if await session.scalar(_LOCK_PROJECT, {"id": project_id}) is None:
        raise ProjectNotFound(f"no project {project_id}")


async def write_new_objects(
    session: AsyncSession, project_id: UUID, objects: Sequence[NewObject], source: StatusSource, by: By
) -> list[UUID]:
    """Insert objects at version 1 with their first row of history, audit, and a request to count the project again.

    No event is emitted: no status has changed.

    Returns:
        Ids of those that were added, in order; one whose number its building has already is left out.
    """
    if not objects:
        return []
    made = {new_id(): new for new in objects}
    columns = zip(
        *(
            (at, o.building_id, o.section, o.number, o.floor, o.rooms, o.area, o.price_minor, o.currency, o.status)
            for at, o in made.items()
        ),
        strict=True,
    )
    connection = await driver_connection(session)
    shared = (by.tenant_id, project_id, source.value, by.now)
    written = {row["id"] for row in await connection.fetch(_ADD_OBJECTS, *shared, *map(list, columns))}
    added = {at: new for at, new in made.items() if at in written}
    if not added:
        return []
    lines = [_first_version(at, new, source, by) for at, new in added.items()]
    await copy_lines(session, "chessboard.property_object_version", _FIRST_VERSION, lines)
    details = {"source": source.value, "version": 1}
    record = [
        AuditRecord("property-object.added", "property-object", at, by.tenant_id, details | {"status": new.status})
        for at, new in added.items()
    ]
    await _audit(session, record, by)
    recount = [f"{project_id}\t{rfc3339(by.now)}"]
    await copy_lines(session, "chessboard.project_recalc_request", ("project_id", "requested_at"), recount)
    return list(added)


def _first_version(property_object_id: UUID, new: NewObject, source: StatusSource, by: By) -> str:
    return "\t".join(
        (
            str(property_object_id),
            "1",
            str(by.tenant_id),
            new.status.value,
            new.status.value,
            source.value,
            str(new.price_minor),
            new.currency,
            copy_text(by.user_id) if by.user_id else COPY_NULL,
            copy_text(by.correlation_id),
            rfc3339(by.now),
        )
    )


async def _audit(session: AsyncSession, records: Sequence[AuditRecord], by: By) -> None:
    await AUDIT.record(session, records, occurred_at=by.now, actor=by.user_id, correlation_id=by.correlation_id)
