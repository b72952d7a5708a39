"""The state machine of a booking as one table: state x act -> state; what isn't in it is refused.

Acts come from people (quote, cancel, ...), from the chessboard's answers, and from the clock. A booking is live from
the moment it asks for objects until nothing is held for it any more.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from crm.domain.errors import DomainError


class BookingTransitionRefused(DomainError):
    """The booking's state doesn't allow what was asked."""


class BookingState(StrEnum):
    """Where a booking is in its life."""

    DRAFT = "draft"
    QUOTED = "quoted"
    PENDING_SUPPLIER = "pending_supplier"
    HELD = "held"
    PENDING_PAYMENT = "pending_payment"
    COMMITTING = "committing"
    PARTIALLY_CONFIRMED = "partially_confirmed"
    CONFIRMED = "confirmed"
    AMENDMENT_PENDING = "amendment_pending"
    TICKETED = "ticketed"
    CANCELLATION_PENDING = "cancellation_pending"
    CANCELLED = "cancelled"
    FAILED = "failed"
    UNKNOWN = "unknown"


class BookingAct(StrEnum):
    """What can happen to a booking."""

    QUOTE = "quote"
    INVALIDATE_QUOTE = "invalidate-quote"
    ASK_HOLD = "ask-hold"
    ALL_HELD = "all-held"
    HOLD_REJECTED = "hold-rejected"
    ASK_PAYMENT = "ask-payment"
    COMMIT = "commit"
    ALL_BOOKED = "all-booked"
    SOME_BOOKED = "some-booked"
    NONE_BOOKED = "none-booked"
    COMPENSATE = "compensate"
    ASK_AMENDMENT = "ask-amendment"
    APPLY_AMENDMENT = "apply-amendment"
    REFUSE_AMENDMENT = "refuse-amendment"
    ASK_REGISTRATION = "ask-registration"
    REGISTER = "register"
    CANCEL = "cancel"
    END_WITH_DEAL = "end-with-deal"
    ALL_FREE = "all-free"
    EXPIRE = "expire"
    PROBE = "probe"
    TIME_OUT = "time-out"
    NET_FREED_DUE = "net-freed-due"
    NET_FREED_EARLY = "net-freed-early"
    RESOLVE_HELD = "resolve-held"
    RESOLVE_CONFIRMED = "resolve-confirmed"
    RESOLVE_CANCELLED = "resolve-cancelled"
    RESOLVE_FAILED = "resolve-failed"


_S, _A = BookingState, BookingAct
BEFORE: Final = frozenset({_S.DRAFT, _S.QUOTED})
"""Nothing has been asked for yet."""
TERMINAL: Final = frozenset({_S.TICKETED, _S.CANCELLED, _S.FAILED})
LIVE: Final = frozenset(BookingState) - BEFORE - TERMINAL
"""An object of the booking may be held for it: no other booking of crm may ask for the object."""
RESERVED: Final = frozenset({_S.HELD, _S.PENDING_PAYMENT})
"""Timed by ReservedUntil."""
BOOKED: Final = frozenset({_S.CONFIRMED, _S.AMENDMENT_PENDING})
"""Timed by BookedUntil."""
WAITING: Final = frozenset({_S.PENDING_SUPPLIER, _S.COMMITTING, _S.PARTIALLY_CONFIRMED, _S.CANCELLATION_PENDING})
"""An answer of the chessboard is outstanding and has a time by which it is due."""

_TABLE: Final[Mapping[BookingState, Mapping[BookingAct, BookingState]]] = {
    _S.DRAFT: {
        _A.QUOTE: _S.QUOTED,
        _A.ASK_HOLD: _S.PENDING_SUPPLIER,
        _A.CANCEL: _S.CANCELLED,
        _A.END_WITH_DEAL: _S.CANCELLED,
    },
    _S.QUOTED: {
        _A.INVALIDATE_QUOTE: _S.DRAFT,
        _A.ASK_HOLD: _S.PENDING_SUPPLIER,
        _A.CANCEL: _S.CANCELLED,
        _A.END_WITH_DEAL: _S.CANCELLED,
    },
    _S.PENDING_SUPPLIER: {
        _A.ALL_HELD: _S.HELD,
        _A.HOLD_REJECTED: _S.FAILED,
        _A.PROBE: _S.PENDING_SUPPLIER,
        _A.TIME_OUT: _S.UNKNOWN,
        _A.NET_FREED_DUE: _S.PENDING_SUPPLIER,
        _A.NET_FREED_EARLY: _S.PENDING_SUPPLIER,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
    },
    _S.HELD: {
        _A.ASK_PAYMENT: _S.PENDING_PAYMENT,
        _A.COMMIT: _S.COMMITTING,
        _A.EXPIRE: _S.CANCELLED,
        _A.CANCEL: _S.CANCELLATION_PENDING,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
        _A.NET_FREED_DUE: _S.CANCELLED,
        _A.NET_FREED_EARLY: _S.UNKNOWN,
    },
    _S.PENDING_PAYMENT: {
        _A.COMMIT: _S.COMMITTING,
        _A.EXPIRE: _S.CANCELLED,
        _A.CANCEL: _S.CANCELLATION_PENDING,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
        _A.NET_FREED_DUE: _S.CANCELLED,
        _A.NET_FREED_EARLY: _S.UNKNOWN,
    },
    _S.COMMITTING: {
        _A.ALL_BOOKED: _S.CONFIRMED,
        _A.SOME_BOOKED: _S.PARTIALLY_CONFIRMED,
        _A.NONE_BOOKED: _S.FAILED,
        _A.PROBE: _S.COMMITTING,
        _A.TIME_OUT: _S.UNKNOWN,
        _A.NET_FREED_DUE: _S.COMMITTING,
        _A.NET_FREED_EARLY: _S.COMMITTING,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
    },
    _S.PARTIALLY_CONFIRMED: {
        _A.ALL_BOOKED: _S.CONFIRMED,
        _A.COMPENSATE: _S.FAILED,
        _A.PROBE: _S.PARTIALLY_CONFIRMED,
        _A.TIME_OUT: _S.FAILED,
        _A.CANCEL: _S.CANCELLED,
        _A.NET_FREED_DUE: _S.PARTIALLY_CONFIRMED,
        _A.NET_FREED_EARLY: _S.PARTIALLY_CONFIRMED,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
    },
    _S.CONFIRMED: {
        _A.ASK_AMENDMENT: _S.AMENDMENT_PENDING,
        _A.ASK_REGISTRATION: _S.CONFIRMED,
        _A.REGISTER: _S.TICKETED,
        _A.EXPIRE: _S.CANCELLED,
        _A.CANCEL: _S.CANCELLATION_PENDING,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
        _A.NET_FREED_DUE: _S.CANCELLED,
        _A.NET_FREED_EARLY: _S.UNKNOWN,
    },
    _S.AMENDMENT_PENDING: {
        _A.APPLY_AMENDMENT: _S.CONFIRMED,
        _A.REFUSE_AMENDMENT: _S.CONFIRMED,
        _A.ASK_REGISTRATION: _S.AMENDMENT_PENDING,
        _A.REGISTER: _S.TICKETED,
        _A.EXPIRE: _S.CANCELLED,
        _A.CANCEL: _S.CANCELLATION_PENDING,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
        _A.NET_FREED_DUE: _S.CANCELLED,
        _A.NET_FREED_EARLY: _S.UNKNOWN,
    },
    _S.CANCELLATION_PENDING: {
        _A.ALL_FREE: _S.CANCELLED,
        _A.PROBE: _S.CANCELLATION_PENDING,
        _A.TIME_OUT: _S.UNKNOWN,
        _A.NET_FREED_DUE: _S.CANCELLATION_PENDING,
        _A.NET_FREED_EARLY: _S.CANCELLATION_PENDING,
    },
    _S.UNKNOWN: {
        _A.ALL_HELD: _S.HELD,
        _A.HOLD_REJECTED: _S.FAILED,
        _A.ALL_BOOKED: _S.CONFIRMED,
        _A.SOME_BOOKED: _S.PARTIALLY_CONFIRMED,
        _A.NONE_BOOKED: _S.FAILED,
        _A.ALL_FREE: _S.CANCELLED,
        _A.PROBE: _S.UNKNOWN,
        _A.RESOLVE_HELD: _S.HELD,
        _A.RESOLVE_CONFIRMED: _S.CONFIRMED,
        _A.RESOLVE_CANCELLED: _S.CANCELLED,
        _A.RESOLVE_FAILED: _S.FAILED,
        _A.END_WITH_DEAL: _S.CANCELLATION_PENDING,
    },
    _S.TICKETED: {},
    _S.CANCELLED: {},
    _S.FAILED: {},
}
BOOKING_TRANSITIONS: Final[Mapping[tuple[BookingState, BookingAct], BookingState]] = MappingProxyType(
    {(state, act): to for state, acts in _TABLE.items() for act, to in acts.items()}
)
"""The whole state machine: what isn't here is refused."""


def next_booking_state(state: BookingState, act: BookingAct) -> BookingState:
    """Return the state after an act.

    Raises:
        BookingTransitionRefused: the table has no such transition.
    """
    try:
        return BOOKING_TRANSITIONS[state, act]
    except KeyError:
        raise BookingTransitionRefused(f"{act} is not possible from {state}") from None
