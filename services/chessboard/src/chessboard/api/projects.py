"""Routes of projects and their buildings."""

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import RowMapping

from chassis.preconditions import entity_tag
from chassis.web import Body, Call, Keyset, Router, StorableText, reading, writing
from chessboard import commands, queries
from chessboard.api.errors import READ, SALES_ADMIN, WRITE, by
from chessboard.domain import LONGEST_NAME, MOST_SECTIONS

PROJECTS: Final = Keyset("projects", UUID)
"""The order of the list of projects: ids are made in time order, the newest comes first."""

BUILDINGS: Final = Keyset("buildings", UUID)
"""Likewise of a project's buildings."""


class AddProject(Body):
    """A project to add."""

    name: StorableText = Field(min_length=1, max_length=LONGEST_NAME)


class ProjectView(Body):
    """A project, with the count of its free objects as of its last count."""

    id: UUID
    name: str
    property_objects_free_count: int
    aggregates_as_of: datetime | None
    version: int
    created_at: datetime
    updated_at: datetime


class ProjectPage(Body):
    """Projects, newest first; `next` goes into `after` for the following page."""

    items: list[ProjectView]
    next: str | None


class AddBuilding(Body):
    """A building to add; its name is the one by which imported files call it."""

    name: StorableText = Field(min_length=1, max_length=LONGEST_NAME, pattern=r"^\S(.*\S)?$")
    sections: int = Field(ge=1, le=MOST_SECTIONS)


class BuildingView(Body):
    """A building and how many sections it has."""

    id: UUID
    project_id: UUID
    name: str
    sections: int
    created_at: datetime
    updated_at: datetime


class BuildingPage(Body):
    """Buildings, newest first; `next` goes into `after` for the following page."""

    items: list[BuildingView]
    next: str | None


router = Router(prefix="/v1", tags=["projects"])


@router.post("/projects", status_code=201)
async def add_project(
    response: Response, body: AddProject, call: Annotated[Call, writing(WRITE, SALES_ADMIN)]
) -> ProjectView:
    """Add a project."""
    project_id = await commands.add_project(call.session, body.name, await by(call))
    response.headers["location"] = f"/v1/projects/{project_id}"
    return _tagged(response, await queries.get_project(call.session, project_id))


@router.get("/projects")
async def list_projects(
    call: Annotated[Call, reading(READ)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
) -> ProjectPage:
    """List projects of the caller's tenant, newest first."""
    position = PROJECTS.position(after)
    rows = await queries.list_projects(call.session, limit=limit + 1, after=position[0] if position else None)
    page = PROJECTS.page(rows, limit, lambda row: (row["id"],))
    return ProjectPage(items=[ProjectView.model_validate(row) for row in page.items], next=page.next)


@router.get("/projects/{project_id}")
async def get_project(response: Response, project_id: UUID, call: Annotated[Call, reading(READ)]) -> ProjectView:
    """Return one project."""
    return _tagged(response, await queries.get_project(call.session, project_id))


@router.post("/projects/{project_id}/buildings", status_code=201)
async def add_building(
    response: Response, project_id: UUID, body: AddBuilding, call: Annotated[Call, writing(WRITE, SALES_ADMIN)]
) -> BuildingView:
    """Add a building to a project."""
    building_id = await commands.add_building(call.session, project_id, body.name, body.sections, await by(call))
    response.headers["location"] = f"/v1/buildings/{building_id}"
    return BuildingView.model_validate(await queries.get_building(call.session, building_id))


@router.get("/projects/{project_id}/buildings")
async def list_buildings(
    project_id: UUID,
    call: Annotated[Call, reading(READ)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
) -> BuildingPage:
    """List buildings of a project, newest first."""
    position = BUILDINGS.position(after)
    rows = await queries.list_buildings(
        call.session, project_id, limit=limit + 1, after=position[0] if position else None
    )
    page = BUILDINGS.page(rows, limit, lambda row: (row["id"],))
    return BuildingPage(items=[BuildingView.model_validate(row) for row in page.items], next=page.next)


@router.get("/buildings/{building_id}")
async def get_building(building_id: UUID, call: Annotated[Call, reading(READ)]) -> BuildingView:
    """Return one building."""
    return BuildingView.model_validate(await queries.get_building(call.session, building_id))


def _tagged(response: Response, project: RowMapping) -> ProjectView:
    response.headers["etag"] = entity_tag(project["version"])
    return ProjectView.model_validate(project)
