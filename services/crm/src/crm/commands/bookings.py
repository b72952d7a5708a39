"""Use cases of bookings that people and partners ask for.

Each locks the booking, its objects' claims and, where money is decided, the partner's limit; the decision and what it
asks of others are one transaction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.audit import AuditRecord
from chassis.ids import new_id
from chassis.preconditions import ANY_VERSION, Precondition
from crm import repository
from crm.commands.settling import AUDIT, By, Why, change_of, settle
from crm.domain import (
    Booking,
    BookingObject,
    BookingState,
    DealNotActive,
    DealStatus,
    ObjectClaim,
    Reason,
    require_objects,
)


@dataclass(frozen=True, slots=True)
class NewBooking:
    """A booking to draft."""

    deal_id: UUID
    property_object_ids: Sequence[UUID]
    partner_id: UUID | None


@dataclass(frozen=True, slots=True)
class Price:
    """What a booking costs and how long that holds."""

    minor: int
    currency: str
    expires_at: datetime


async def draft_booking(session: AsyncSession, new: NewBooking, by: By) -> Booking:
    """Draft a booking for an active deal; nothing is asked for yet.

    Raises:
        DealNotFound: no such deal in the caller's tenant.
        DealNotActive: it has ended.
        ValidationError: there is no object, there are too many, or one comes twice.
    """
    require_objects(new.property_object_ids)
    deal = await repository.get_deal_for_update(session, new.deal_id)
    if deal.status is not DealStatus.ACTIVE:
        raise DealNotActive(f"deal {deal.id} is {deal.status}")
    objects = [BookingObject(one, ObjectClaim(one)) for one in new.property_object_ids]
    booking = Booking(new_id(), by.tenant_id, deal.id, new.partner_id, by.now, by.now, objects)
    await repository.add_booking(session, booking)
    record = AuditRecord("booking.drafted", "booking", booking.id, by.tenant_id, {"objects": len(objects)})
    await AUDIT.record(session, [record], occurred_at=by.now, actor=by.user_id, correlation_id=by.correlation_id)
    return booking


async def quote_booking(
    session: AsyncSession, booking_id: UUID, price: Price, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Promise a price for some time.

    Raises:
        BookingNotFound, BookingTransitionRefused, ValidationError, PreconditionFailed: as their names say.
    """

    def act(booking: Booking) -> None:
        booking.quote(price.minor, price.currency, price.expires_at, by.now)

    return await _change(session, booking_id, act, by, expected)


async def reserve_booking(
    session: AsyncSession, booking_id: UUID, reserved_until: datetime, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Ask the chessboard to hold every object until an instant.

    Raises:
        ObjectTaken: another live booking has one of them.
        QuoteExpired: there was a quote and its life is over.
        BookingNotFound, BookingTransitionRefused, ValidationError, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.ask_hold(reserved_until, by.now), by, expected)


async def ask_payment(session: AsyncSession, booking_id: UUID, by: By, expected: Precondition = ANY_VERSION) -> Booking:
    """Wait for the payment of a held booking.

    Raises:
        ReservationExpired: its time is over.
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.ask_payment(by.now), by, expected)


async def commit_booking(
    session: AsyncSession, booking_id: UUID, booked_until: datetime, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Decide to book: the partner's limit is checked under its lock, and every object is asked to be booked.

    Raises:
        ReservationExpired: the reservation's time is over.
        BookingNotPriced, PartnerLimitExceeded: the partner's limit can't be judged, or doesn't cover the price.
        BookingNotFound, BookingTransitionRefused, ValidationError, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.book(booked_until, by.now), by, expected)


async def cancel_booking(
    session: AsyncSession, booking_id: UUID, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Cancel a booking and ask that what may be held for it be released.

    Raises:
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.cancel(Reason.CANCELLED, by.now), by, expected)


async def ask_amendment(
    session: AsyncSession, booking_id: UUID, price_minor: int | None, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Ask that a confirmed booking be changed.

    Raises:
        ReservationExpired: its time is over.
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.ask_amendment(price_minor, by.now), by, expected)


async def decide_amendment(
    session: AsyncSession, booking_id: UUID, by: By, expected: Precondition = ANY_VERSION, *, is_applied: bool
) -> Booking:
    """Apply or refuse the change that was asked for; a higher price is checked against the partner's limit.

    Raises:
        ReservationExpired: its time is over.
        PartnerLimitExceeded: the limit doesn't cover the difference.
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """

    def act(booking: Booking) -> None:
        booking.decide_amendment(by.now, is_applied=is_applied)

    return await _change(session, booking_id, act, by, expected)


async def ask_registration(
    session: AsyncSession, booking_id: UUID, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Note that the registrar was asked; the booking stays as it is.

    Raises:
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """
    act = Booking.ask_registration
    return await _change(session, booking_id, lambda one: act(one, by.now), by, expected, note="registration-asked")


async def register_booking(
    session: AsyncSession, booking_id: UUID, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """End a booking well: it is registered, and its objects are sold.

    Raises:
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.register(by.now), by, expected)


async def resolve_booking(
    session: AsyncSession, booking_id: UUID, to: BookingState, by: By, expected: Precondition = ANY_VERSION
) -> Booking:
    """Let a person decide what became of a booking that is unknown.

    Raises:
        ReservationExpired: it can't be held or confirmed any more.
        BookingNotFound, BookingTransitionRefused, PreconditionFailed: as their names say.
    """
    return await _change(session, booking_id, lambda one: one.resolve(to, by.now), by, expected)


async def _change(
    session: AsyncSession,
    booking_id: UUID,
    act: Callable[[Booking], None],
    by: By,
    expected: Precondition,
    note: str | None = None,
) -> Booking:
    booking = await repository.get_booking_for_update(session, booking_id)
    expected.check(booking.version)
    act(booking)
    await settle(session, [change_of(booking, note)], Why.of(by))
    return booking
