"""Routes of property objects: what people do to one by hand, and what became of it over time."""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, Final
from uuid import UUID

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import RowMapping

from chassis.preconditions import entity_tag
from chassis.web import Body, Call, IfMatch, Keyset, Router, StorableText, reading, writing
from chessboard import commands, queries
from chessboard.api.errors import READ, SALES_ADMIN, WRITE, by
from chessboard.domain import (
    HIGHEST_FLOOR,
    HIGHEST_PRICE,
    LARGEST_AREA,
    LONGEST_NUMBER,
    LOWEST_FLOOR,
    MOST_ROOMS,
    MOST_SECTIONS,
    Status,
    StatusSource,
)

OBJECTS: Final = Keyset("property-objects", UUID)
"""The order of a project's objects: the newest first."""

VERSIONS: Final = Keyset("property-object-versions", int)
"""The order of an object's history: the last version first."""

Price = Annotated[int, Field(ge=0, le=HIGHEST_PRICE, description="In minor units of the currency.")]
Currency = Annotated[str, Field(pattern="^[A-Z]{3}$", examples=["RUB"])]


class AddObject(Body):
    """An object to add; it is free."""

    building_id: UUID
    section: int = Field(ge=1, le=MOST_SECTIONS)
    number: StorableText = Field(min_length=1, max_length=LONGEST_NUMBER, pattern=r"^\S(.*\S)?$")
    floor: int = Field(ge=LOWEST_FLOOR, le=HIGHEST_FLOOR)
    rooms: int = Field(ge=0, le=MOST_ROOMS)
    area: Decimal = Field(gt=0, le=LARGEST_AREA, decimal_places=2)
    price_minor: Price
    currency: Currency


class ChangePrice(Body):
    """The new price of an object."""

    price_minor: Price
    currency: Currency


class ObjectView(Body):
    """A property object as its page shows it."""

    id: UUID
    project_id: UUID
    building_id: UUID
    section: int
    number: str
    floor: int
    rooms: int
    area: float
    price_minor: int
    currency: str
    status: Status
    status_source: StatusSource
    reserved_until: datetime | None
    booked_until: datetime | None
    hold_deal_id: UUID | None
    hold_booking_id: UUID | None
    sold_at: datetime | None
    status_changed_at: datetime
    version: int
    created_at: datetime
    updated_at: datetime


class ObjectPage(Body):
    """Property objects, newest first; `next` goes into `after` for the following page."""

    items: list[ObjectView]
    next: str | None


class VersionView(Body):
    """What one version of an object was, who made it, and the request, event or run by which."""

    version: int
    from_status: Status
    to_status: Status
    source: StatusSource
    reserved_until: datetime | None
    booked_until: datetime | None
    hold_deal_id: UUID | None
    hold_booking_id: UUID | None
    price_minor: int
    currency: str
    actor: str | None
    correlation_id: str
    changed_at: datetime


class HistoryPage(Body):
    """Versions of an object, the last one first; `next` goes into `after` for the following page."""

    items: list[VersionView]
    next: str | None


router = Router(prefix="/v1", tags=["property objects"])


@router.post("/projects/{project_id}/property-objects", status_code=201)
async def add_object(
    response: Response, project_id: UUID, body: AddObject, call: Annotated[Call, writing(WRITE, SALES_ADMIN)]
) -> ObjectView:
    """Add an object to a building of a project."""
    new = commands.NewObject(**body.model_dump())
    added = await commands.add_object(call.session, project_id, new, await by(call))
    response.headers["location"] = f"/v1/property-objects/{added}"
    return _tagged(response, await queries.get_object(call.session, added))


@router.get("/projects/{project_id}/property-objects")
async def list_objects(
    project_id: UUID,
    call: Annotated[Call, reading(READ)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
    status: Status | None = None,
) -> ObjectPage:
    """List objects of a project, hidden ones too, newest first."""
    position = OBJECTS.position(after)
    rows = await queries.list_objects(
        call.session, project_id, limit=limit + 1, after=position[0] if position else None, status=status
    )
    page = OBJECTS.page(rows, limit, lambda row: (row["id"],))
    return ObjectPage(items=[ObjectView.model_validate(row) for row in page.items], next=page.next)


@router.get("/property-objects/{property_object_id}")
async def get_object(response: Response, property_object_id: UUID, call: Annotated[Call, reading(READ)]) -> ObjectView:
    """Return one object."""
    return _tagged(response, await queries.get_object(call.session, property_object_id))


@router.get("/property-objects/{property_object_id}/history")
async def get_history(
    property_object_id: UUID,
    call: Annotated[Call, reading(READ)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
) -> HistoryPage:
    """Return what an object's versions were, and who made them, the last one first."""
    position = VERSIONS.position(after)
    rows = await queries.list_versions(
        call.session, property_object_id, limit=limit + 1, after=position[0] if position else None
    )
    page = VERSIONS.page(rows, limit, lambda row: (row["version"],))
    return HistoryPage(items=[VersionView.model_validate(row) for row in page.items], next=page.next)


@router.post("/property-objects/{property_object_id}/hide")
async def hide_object(
    response: Response,
    property_object_id: UUID,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE, SALES_ADMIN)],
) -> ObjectView:
    """Take a free object out of the grid."""
    await commands.hide_object(call.session, property_object_id, await by(call), expected)
    return _tagged(response, await queries.get_object(call.session, property_object_id))


@router.post("/property-objects/{property_object_id}/unhide")
async def unhide_object(
    response: Response,
    property_object_id: UUID,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE, SALES_ADMIN)],
) -> ObjectView:
    """Put a hidden object back into the grid, free."""
    await commands.unhide_object(call.session, property_object_id, await by(call), expected)
    return _tagged(response, await queries.get_object(call.session, property_object_id))


@router.post("/property-objects/{property_object_id}/sell")
async def sell_object(
    response: Response,
    property_object_id: UUID,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE, SALES_ADMIN)],
) -> ObjectView:
    """Mark a free object as sold outside of CRM."""
    await commands.sell_object(call.session, property_object_id, await by(call), expected)
    return _tagged(response, await queries.get_object(call.session, property_object_id))


@router.post("/property-objects/{property_object_id}/price")
async def change_price(
    response: Response,
    property_object_id: UUID,
    body: ChangePrice,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE, SALES_ADMIN)],
) -> ObjectView:
    """Change the price of an object that is not sold; the price that it has already changes nothing."""
    await commands.reprice_object(
        call.session, property_object_id, body.price_minor, body.currency, await by(call), expected
    )
    return _tagged(response, await queries.get_object(call.session, property_object_id))


def _tagged(response: Response, found: RowMapping) -> ObjectView:
    """Return an object as its page shows it, and its version as the answer's ETag."""
    response.headers["etag"] = entity_tag(found["version"])
    return ObjectView.model_validate(found)
