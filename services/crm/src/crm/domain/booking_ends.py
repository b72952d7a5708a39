"""How a deal's end ends its bookings: completing sells what is confirmed, cancelling releases all that may be held."""

from collections.abc import Sequence
from datetime import datetime

from crm.domain.booking_objects import BookingsNotConfirmed, Reason
from crm.domain.booking_states import LIVE, BookingState
from crm.domain.bookings import Booking
from crm.domain.deals import DealStatus


def end_bookings(bookings: Sequence[Booking], status: DealStatus, now: datetime) -> list[Booking]:
    """End a deal's bookings with it; return those that changed.

    Raises:
        BookingsNotConfirmed: the deal was completed and one is live but not confirmed.
    """
    if status is DealStatus.CANCELLED:
        ended = [booking for booking in bookings if booking.state is not BookingState.CANCELLATION_PENDING]
        for booking in ended:
            booking.cancel(Reason.DEAL_CANCELLED, now)
        return ended
    if open_ones := [booking for booking in bookings if booking.state in LIVE - {BookingState.CONFIRMED}]:
        raise BookingsNotConfirmed(f"booking {open_ones[0].id} is {open_ones[0].state}")
    for booking in bookings:
        if booking.state is BookingState.CONFIRMED:
            booking.register(now, Reason.DEAL_COMPLETED)
        else:
            booking.cancel(Reason.DEAL_COMPLETED, now)
    return list(bookings)
