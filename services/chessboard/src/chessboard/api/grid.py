"""The route of the grid: floors by sections, as sales people look at it."""

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Literal
from uuid import UUID

import orjson
from fastapi import Query, Request, Response

from chassis.web import Body, Call, Router, reading, represent
from chessboard import queries
from chessboard.api.errors import READ
from chessboard.domain import HIGHEST_PRICE, LARGEST_AREA, MOST_ROOMS, MOST_SECTIONS, Status

HoldState = Literal["running", "grace", "released_by_safety_net"]


class GridCell(Body):
    """An object in the grid.

    A held one has `until` and `holdState` (running, or expired and in grace: `graceUntil`), and `secondsLeft` unless
    the caller counts them itself. A free one whose last hold was ended by the safety net says so in `holdState`.
    """

    id: UUID
    number: str
    status: Status
    rooms: int
    area: float
    price_minor: int
    currency: str
    version: int
    until: datetime | None = None
    hold_state: HoldState | None = None
    grace_until: datetime | None = None
    seconds_left: int | None = None


class GridSection(Body):
    """The objects of one section on one floor, in the order of numbers."""

    section: int
    objects: list[GridCell]


class GridFloor(Body):
    """The sections of a floor that have objects to show."""

    floor: int
    sections: list[GridSection]


class GridBuilding(Body):
    """A building's floors from the top."""

    id: UUID
    name: str
    sections: int
    floors: list[GridFloor]


class GridView(Body):
    """The grid of a project."""

    project_id: UUID
    buildings: list[GridBuilding]


router = Router(prefix="/v1/projects", tags=["grid"])


@router.get(
    "/{project_id}/grid",
    response_model=GridView,
    response_model_exclude_unset=True,
    responses={304: {"description": "The grid is as If-None-Match says that the caller has it."}},
)
async def get_grid(
    request: Request,
    project_id: UUID,
    call: Annotated[Call, reading(READ)],
    status: Annotated[list[Status] | None, Query(max_length=5)] = None,
    rooms: Annotated[list[Annotated[int, Query(ge=0, le=MOST_ROOMS)]] | None, Query(max_length=20)] = None,
    price_min: Annotated[int | None, Query(alias="priceMin", ge=0, le=HIGHEST_PRICE)] = None,
    price_max: Annotated[int | None, Query(alias="priceMax", ge=0, le=HIGHEST_PRICE)] = None,
    area_min: Annotated[Decimal | None, Query(alias="areaMin", ge=0, le=LARGEST_AREA)] = None,
    area_max: Annotated[Decimal | None, Query(alias="areaMax", ge=0, le=LARGEST_AREA)] = None,
    building: UUID | None = None,
    section: Annotated[int | None, Query(ge=1, le=MOST_SECTIONS)] = None,
    *,
    seconds: bool = True,
) -> Response:
    """Return the grid of a project; hidden objects are in it only where `status` asks for them.

    The ETag is of the whole answer. `seconds=false` leaves `secondsLeft` out, so that the answer stays the same until
    an object changes or a hold expires: for callers who ask again and again, and count down to `until` themselves.
    """
    chosen = queries.GridFilter(status, rooms, price_min, price_max, area_min, area_max, building, section)
    grace: timedelta = request.app.state.hold_grace
    grid = await queries.get_grid(call.session, project_id, chosen, await call.now(), grace, seconds=seconds)
    return await represent(request, orjson.dumps(grid, option=orjson.OPT_UTC_Z))
