"""HTTP routes of bookings under /v1/bookings: parse, call one command or query, answer.

What is asked of the chessboard is answered later: the routes show the state in which that is waited for.
"""

from datetime import datetime
from typing import Annotated, Final, Literal
from uuid import UUID

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import RowMapping

from chassis.identity import Forbidden
from chassis.preconditions import entity_tag
from chassis.web import Body, Call, IfMatch, Instant, Keyset, Router, reading, writing
from crm import commands, queries
from crm.api.errors import Currency, Money, by_of, refuse_partners
from crm.domain import MOST_OBJECTS, Asked, BookingState, Outcome, Reason

READ: Final = "crm:bookings:read"
WRITE: Final = "crm:bookings:write"
BOOKINGS: Final = Keyset("bookings", UUID)


class DraftBooking(Body):
    """A booking to draft; a partner drafts for itself."""

    deal_id: UUID
    property_object_ids: list[UUID] = Field(min_length=1, max_length=MOST_OBJECTS)
    partner_id: UUID | None = None


class QuoteBooking(Body):
    """A price, in minor units, and how long it holds."""

    price_minor: Money
    currency: Currency
    expires_at: Instant


class ReserveBooking(Body):
    """Until when the objects are to be held."""

    reserved_until: Instant


class CommitBooking(Body):
    """Until when the booked objects are to be kept."""

    booked_until: Instant


class AmendBooking(Body):
    """What is to change: the price, or something that only its supplier knows."""

    price_minor: Money | None = None


class DecideAmendment(Body):
    """What became of the change that was asked for."""

    outcome: Literal["applied", "refused"]


class ResolveBooking(Body):
    """What a person found out about a booking that was unknown."""

    state: Literal["held", "confirmed", "cancelled", "failed"]


class ObjectView(Body):
    """One object of a booking: what was asked of the chessboard last, and its answer."""

    property_object_id: UUID
    asked: Asked | None
    outcome: Outcome | None


class BookingView(Body):
    """A booking in a list."""

    id: UUID
    deal_id: UUID
    partner_id: UUID | None
    state: BookingState
    reason: Reason | None
    version: int
    property_object_ids: list[UUID]
    price_minor: int | None
    currency: str | None
    quote_expires_at: datetime | None
    reserved_until: datetime | None
    booked_until: datetime | None
    registration_asked_at: datetime | None
    created_at: datetime
    updated_at: datetime


class BookingPage(Body):
    """Bookings, newest first; `next` goes into `after` for the following page."""

    items: list[BookingView]
    next: str | None


class BookingDetail(BookingView):
    """A booking as its page shows it."""

    objects: list[ObjectView]


class HistoryView(Body):
    """One transition of a booking."""

    version: int
    from_state: BookingState
    to_state: BookingState
    reason: Reason | None
    actor: str | None
    changed_at: datetime


class BookingHistory(Body):
    """All transitions of a booking, the first one first."""

    items: list[HistoryView]


router = Router(prefix="/v1/bookings", tags=["bookings"])


@router.post("", status_code=201)
async def draft_booking(response: Response, body: DraftBooking, call: Annotated[Call, writing(WRITE)]) -> BookingDetail:
    """Draft a booking for an active deal."""
    own = call.principal.partner_id
    if own is not None and body.partner_id not in (None, own):
        raise Forbidden("a partner books for itself")
    new = commands.NewBooking(body.deal_id, body.property_object_ids, own or body.partner_id)
    booking = await commands.draft_booking(call.session, new, await by_of(call))
    response.headers["location"] = f"/v1/bookings/{booking.id}"
    return await _shown(response, call, booking.id)


@router.get("")
async def list_bookings(
    call: Annotated[Call, reading(READ)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
    state: BookingState | None = None,
    deal_id: Annotated[UUID | None, Query(alias="dealId")] = None,
) -> BookingPage:
    """List bookings that the caller may see, newest first."""
    position = BOOKINGS.position(after)
    rows = await queries.list_bookings(
        call.session, limit=limit + 1, after=position[0] if position else None, state=state, deal_id=deal_id
    )
    page = BOOKINGS.page(rows, limit, lambda row: (row["id"],))
    return BookingPage(items=[BookingView.model_validate(row) for row in page.items], next=page.next)


@router.get("/{booking_id}")
async def get_booking(response: Response, booking_id: UUID, call: Annotated[Call, reading(READ)]) -> BookingDetail:
    """Return one booking with its objects."""
    return await _shown(response, call, booking_id)


@router.get("/{booking_id}/history")
async def get_booking_history(
    response: Response, booking_id: UUID, call: Annotated[Call, reading(READ)]
) -> BookingHistory:
    """Return a booking's transitions; the ETag is the booking's."""
    version, rows = await queries.get_booking_history(call.session, booking_id)
    response.headers["etag"] = entity_tag(version)
    return BookingHistory(items=[HistoryView.model_validate(row) for row in rows])


@router.post("/{booking_id}/quote")
async def quote_booking(
    response: Response, booking_id: UUID, body: QuoteBooking, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Promise a price for some time."""
    refuse_partners(call)
    price = commands.Price(body.price_minor, body.currency, body.expires_at)
    await commands.quote_booking(call.session, booking_id, price, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/reserve", status_code=202)
async def reserve_booking(
    response: Response,
    booking_id: UUID,
    body: ReserveBooking,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE)],
) -> BookingDetail:
    """Ask that every object be held; the answer comes later."""
    await commands.reserve_booking(call.session, booking_id, body.reserved_until, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/payment")
async def ask_payment(
    response: Response, booking_id: UUID, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Wait for the payment of a held booking."""
    await commands.ask_payment(call.session, booking_id, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/commit", status_code=202)
async def commit_booking(
    response: Response, booking_id: UUID, body: CommitBooking, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Decide to book, within the partner's limit; it is confirmed once every object is booked."""
    await commands.commit_booking(call.session, booking_id, body.booked_until, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/cancel", status_code=202)
async def cancel_booking(
    response: Response, booking_id: UUID, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Cancel a booking; it is cancelled once every object is free."""
    await commands.cancel_booking(call.session, booking_id, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/amend")
async def amend_booking(
    response: Response, booking_id: UUID, body: AmendBooking, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Ask that a confirmed booking be changed."""
    await commands.ask_amendment(call.session, booking_id, body.price_minor, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/amendment")
async def decide_amendment(
    response: Response,
    booking_id: UUID,
    body: DecideAmendment,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE)],
) -> BookingDetail:
    """Say whether the change that was asked for is applied; not for partners."""
    refuse_partners(call)
    is_applied = body.outcome == "applied"
    await commands.decide_amendment(call.session, booking_id, await by_of(call), expected, is_applied=is_applied)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/registration")
async def ask_registration(
    response: Response, booking_id: UUID, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Note that the registrar was asked."""
    await commands.ask_registration(call.session, booking_id, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/register")
async def register_booking(
    response: Response, booking_id: UUID, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> BookingDetail:
    """Note that the booking is registered: its objects are sold; not for partners."""
    refuse_partners(call)
    await commands.register_booking(call.session, booking_id, await by_of(call), expected)
    return await _shown(response, call, booking_id)


@router.post("/{booking_id}/resolve")
async def resolve_booking(
    response: Response,
    booking_id: UUID,
    body: ResolveBooking,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE)],
) -> BookingDetail:
    """Decide what became of a booking that is unknown; not for partners."""
    refuse_partners(call)
    await commands.resolve_booking(call.session, booking_id, BookingState(body.state), await by_of(call), expected)
    return await _shown(response, call, booking_id)


async def _shown(response: Response, call: Call, booking_id: UUID) -> BookingDetail:
    """Return a booking as its page shows it, and its version as the answer's ETag."""
    row, objects = await queries.get_booking(call.session, booking_id)
    response.headers["etag"] = entity_tag(row["version"])
    return BookingDetail.model_validate({**row, "objects": [_object(one) for one in objects]})


def _object(row: RowMapping) -> ObjectView:
    return ObjectView.model_validate(row)
