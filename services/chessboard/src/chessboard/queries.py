"""Reads for HTTP: straight SQL to what a page shows, under the caller's row level security."""

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncSession

from chessboard.domain import ProjectNotFound

_PROJECT: Final = "id, name, property_objects_free_count, aggregates_as_of, version, created_at, updated_at"
_ONE_PROJECT = text(f"select {_PROJECT} from chessboard.project where id = :id")
_PROJECTS = text(
    f"select {_PROJECT} from chessboard.project where (cast(:after as uuid) is null or id < :after)"
    " order by id desc limit :limit"
)


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
