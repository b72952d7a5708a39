"""HTTP routes of chessboard under /v1: parse, call one command or query, answer.

Bodies are camelCase, instants carry an offset, unknown fields are refused, and so is what the database can't keep.
"""

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from fastapi import Query, Response

from chassis.preconditions import entity_tag
from chassis.problems import ErrorAnswer
from chassis.web import Body, Call, Keyset, Router, reading
from chessboard import queries
from chessboard.domain import (
    HoldMismatch,
    ProjectNotFound,
    PropertyObjectNotFound,
    StatusTransitionRefused,
    ValidationError,
    VersionConflict,
)

READ: Final = "chessboard:objects:read"
WRITE: Final = "chessboard:objects:write"
ERRORS: Final[dict[type[Exception], ErrorAnswer]] = {
    ValidationError: ErrorAnswer(422, "validation_error"),
    ProjectNotFound: ErrorAnswer(404, "project_not_found"),
    PropertyObjectNotFound: ErrorAnswer(404, "property_object_not_found"),
    StatusTransitionRefused: ErrorAnswer(409, "status_transition_refused"),
    HoldMismatch: ErrorAnswer(409, "CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH"),
    VersionConflict: ErrorAnswer(409, "version_conflict"),
}
PROJECTS: Final = Keyset("projects", UUID)
"""The order of the list of projects: ids are made in time order, the newest comes first."""


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


router = Router(prefix="/v1/projects", tags=["projects"])


@router.get("")
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


@router.get("/{project_id}")
async def get_project(response: Response, project_id: UUID, call: Annotated[Call, reading(READ)]) -> ProjectView:
    """Return one project."""
    project = await queries.get_project(call.session, project_id)
    response.headers["etag"] = entity_tag(project["version"])
    return ProjectView.model_validate(project)
