"""Reads for HTTP: straight SQL to what a page shows, under the caller's row level security."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from asyncpg import Record
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.db import driver_connection
from chessboard.domain import BuildingNotFound, ProjectNotFound, PropertyObjectNotFound, Status, StatusSource

_PROJECT: Final = "id, name, property_objects_free_count, aggregates_as_of, version, created_at, updated_at"
_ONE_PROJECT = text(f"select {_PROJECT} from chessboard.project where id = :id")
_PROJECTS = text(
    f"select {_PROJECT} from chessboard.project where (cast(:after as uuid) is null or id < :after)"
    " order by id desc limit :limit"
)
_BUILDING: Final = "id, project_id, name, sections, created_at, updated_at"
_ONE_BUILDING = text(f"select {_BUILDING} from chessboard.building where id = :id")
_BUILDINGS = text(
    f"select {_BUILDING} from chessboard.building where project_id = :project"
    " and (cast(:after as uuid) is null or id < :after) order by id desc limit :limit"
)
_OBJECT: Final = (
    "id, project_id, building_id, section, number, floor, rooms, area, price_minor, currency, status, status_source,"
    " reserved_until, booked_until, hold_deal_id, hold_booking_id, sold_at, status_changed_at, version, created_at,"
    " updated_at"
)
_ONE_OBJECT = text(f"select {_OBJECT} from chessboard.property_object where id = :id")
_OBJECTS = text(
    f"select {_OBJECT} from chessboard.property_object where project_id = :project"
    " and (cast(:status as text) is null or status = :status)"
    " and (cast(:after as uuid) is null or id < :after) order by id desc limit :limit"
)
_HISTORY = text(
    "select version, from_status, to_status, source, reserved_until, booked_until, hold_deal_id, hold_booking_id,"
    " price_minor, currency, actor, correlation_id, changed_at from chessboard.property_object_history"
    " where property_object_id = :id and (cast(:after as bigint) is null or version < :after)"
    " order by version desc limit :limit"
)
GRID: Final = """
select id::text, building_id::text, section, floor, number, status, rooms, area::float8, price_minor, currency,
       coalesce(reserved_until, booked_until), status_source, version
from chessboard.property_object
where project_id = $1
  and case when $2::text[] is null then status <> 'Hidden' else status = any($2) end
  and ($3::int[] is null or rooms = any($3))
  and ($4::bigint is null or price_minor >= $4) and ($5::bigint is null or price_minor <= $5)
  and ($6::numeric is null or area >= $6) and ($7::numeric is null or area <= $7)
  and ($8::uuid is null or building_id = $8) and ($9::int is null or section = $9)
order by building_id, floor desc, section, length(number), number
"""
_GRID_BUILDINGS: Final = (
    "select id::text, name, sections from chessboard.building where project_id = $1 order by length(name), name"
)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GridFilter:
    """Which objects of a project the grid shows; what is None doesn't narrow it.

    Attributes:
        statuses: hidden objects are shown only where they are named here.
        price_min: in minor units, inclusive, as the other bounds.
    """

    statuses: Sequence[Status] | None = None
    rooms: Sequence[int] | None = None
    price_min: int | None = None
    price_max: int | None = None
    area_min: Decimal | None = None
    area_max: Decimal | None = None
    building_id: UUID | None = None
    section: int | None = None


@dataclass(slots=True)
class _Floors:
    """The floors of one building while they are gathered, in the order of rows."""

    floors: list[Json] = field(default_factory=list)
    floor: int | None = None
    section: int | None = None
    objects: list[Json] = field(default_factory=list)

    def place(self, floor: int, section: int, cell: Json) -> None:
        if floor != self.floor:
            self.floor, self.section = floor, None
            self.floors.append({"floor": floor, "sections": []})
        if section != self.section:
            self.section, self.objects = section, []
            self.floors[-1]["sections"].append({"section": section, "objects": self.objects})
        self.objects.append(cell)


async def get_project(session: AsyncSession, project_id: UUID) -> RowMapping:
    """Return one project.

    Raises:
        ProjectNotFound: the caller's tenant has no such project.
    """
    row = (await session.execute(_ONE_PROJECT, {"id": project_id})).mappings().one_or_none()
    if row is None:
        raise ProjectNotFound(f"no project {project_id}")
    return row


async def list_projects(session: AsyncSession, *, limit: int, after: UUID | None) -> Sequence[RowMapping]:
    """Return projects of the caller's tenant, newest first, after the given one."""
    return (await session.execute(_PROJECTS, {"limit": limit, "after": after})).mappings().all()


async def get_building(session: AsyncSession, building_id: UUID) -> RowMapping:
    """Return one building.

    Raises:
        BuildingNotFound: the caller's tenant has no such building.
    """
    row = (await session.execute(_ONE_BUILDING, {"id": building_id})).mappings().one_or_none()
    if row is None:
        raise BuildingNotFound(f"no building {building_id}")
    return row


async def list_buildings(
    session: AsyncSession, project_id: UUID, *, limit: int, after: UUID | None
) -> Sequence[RowMapping]:
    """Return buildings of a project, newest first, after the given one.

    Raises:
        ProjectNotFound: the caller's tenant has no such project.
    """
    await get_project(session, project_id)
    found = await session.execute(_BUILDINGS, {"project": project_id, "limit": limit, "after": after})
    return found.mappings().all()


async def get_object(session: AsyncSession, property_object_id: UUID) -> RowMapping:
    """Return one object.

    Raises:
        PropertyObjectNotFound: the caller's tenant has no such object.
    """
    row = (await session.execute(_ONE_OBJECT, {"id": property_object_id})).mappings().one_or_none()
    if row is None:
        raise PropertyObjectNotFound(f"no property object {property_object_id}")
    return row


async def list_objects(
    session: AsyncSession, project_id: UUID, *, limit: int, after: UUID | None, status: Status | None
) -> Sequence[RowMapping]:
    """Return objects of a project, hidden ones too, newest first, after the given one.

    Raises:
        ProjectNotFound: the caller's tenant has no such project.
    """
    await get_project(session, project_id)
    values = {"project": project_id, "limit": limit, "after": after, "status": status}
    return (await session.execute(_OBJECTS, values)).mappings().all()


async def list_versions(
    session: AsyncSession, property_object_id: UUID, *, limit: int, after: int | None
) -> Sequence[RowMapping]:
    """Return what an object's versions were, newest first, below the given one.

    Raises:
        PropertyObjectNotFound: the caller's tenant has no such object.
    """
    await get_object(session, property_object_id)
    found = await session.execute(_HISTORY, {"id": property_object_id, "limit": limit, "after": after})
    return found.mappings().all()


async def get_grid(
    session: AsyncSession, project_id: UUID, chosen: GridFilter, now: datetime, grace: timedelta, *, seconds: bool
) -> Json:
    """Return the grid of a project, ready to be written as JSON: buildings, their floors from the top, their sections.

    Args:
        session: of the caller.
        project_id: the project.
        chosen: which objects; floors and buildings without one are left out.
        now: the instant of the countdown.
        grace: how long the safety net waits after a hold has expired.
        seconds: count the seconds that are left, which makes every second's answer another one.

    Raises:
        ProjectNotFound: the caller's tenant has no such project.
    """
    await get_project(session, project_id)
    connection = await driver_connection(session)
    statuses = None if chosen.statuses is None else [status.value for status in chosen.statuses]
    rooms = None if chosen.rooms is None else list(chosen.rooms)
    rows = await connection.fetch(
        GRID,
        project_id,
        statuses,
        rooms,
        chosen.price_min,
        chosen.price_max,
        chosen.area_min,
        chosen.area_max,
        chosen.building_id,
        chosen.section,
    )
    floors = _by_building(rows, now, grace, seconds=seconds)
    buildings = [
        {"id": one, "name": name, "sections": sections, "floors": floors[one].floors}
        for one, name, sections in await connection.fetch(_GRID_BUILDINGS, project_id)
        if one in floors
    ]
    return {"projectId": str(project_id), "buildings": buildings}


def _by_building(rows: Sequence[Record], now: datetime, grace: timedelta, *, seconds: bool) -> dict[str, _Floors]:
    found: dict[str, _Floors] = {}
    for row in rows:
        one, building, section, floor, number, status, rooms, area, price, currency, until, source, version = row
        cell: Json = {
            "id": one,
            "number": number,
            "status": status,
            "rooms": rooms,
            "area": area,
            "priceMinor": price,
            "currency": currency,
            "version": version,
        }
        if until is not None:
            cell |= _countdown(until, now, grace, seconds=seconds)
        elif source == StatusSource.EXPIRATION_JOB and status == Status.FREE:
            cell["holdState"] = "released_by_safety_net"
        if building not in found:
            found[building] = _Floors()
        found[building].place(floor, section, cell)
    return found


def _countdown(until: datetime, now: datetime, grace: timedelta, *, seconds: bool) -> Json:
    running = until >= now
    countdown: Json = {"until": until, "holdState": "running" if running else "grace"}
    if not running:
        countdown["graceUntil"] = until + grace
    if seconds:
        countdown["secondsLeft"] = max(0, int((until - now).total_seconds()))
    return countdown
