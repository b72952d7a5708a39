"""What a booking is made of: its objects, crm's claims on them, its money, and the events that tell of it.

A claim hands out one sequence per object, whatever booking asks: that orders all requests about the object, and one
live booking at a time may ask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

from crm.domain.booking_states import BOOKED, RESERVED, BookingAct, BookingState
from crm.domain.errors import DomainError, ValidationError

ANSWER_TIMEOUT: Final = timedelta(minutes=1)
"""How long an answer of the chessboard may take before it is asked again, and then before the booking is unknown."""
OPERATION_TIMEOUT: Final = timedelta(minutes=10)
"""How long a booking may be confirmed in part before it is undone; in the middle the rest is asked for again."""
PROBE_AGAIN: Final = timedelta(minutes=15)
"""How often an unknown booking asks again."""

ANSWER_WITHIN: Final = {
    BookingState.PENDING_SUPPLIER: ANSWER_TIMEOUT,
    BookingState.COMMITTING: ANSWER_TIMEOUT,
    BookingState.CANCELLATION_PENDING: ANSWER_TIMEOUT,
    BookingState.PARTIALLY_CONFIRMED: OPERATION_TIMEOUT / 2,
    BookingState.UNKNOWN: PROBE_AGAIN,
}
KEEPS_RESERVED_UNTIL: Final = (
    RESERVED
    | BOOKED
    | {BookingState.PENDING_SUPPLIER, BookingState.COMMITTING, BookingState.PARTIALLY_CONFIRMED, BookingState.UNKNOWN}
)
KEEPS_BOOKED_UNTIL: Final = BOOKED | {BookingState.COMMITTING, BookingState.PARTIALLY_CONFIRMED, BookingState.UNKNOWN}
RESOLUTIONS: Final = {
    BookingState.HELD: BookingAct.RESOLVE_HELD,
    BookingState.CONFIRMED: BookingAct.RESOLVE_CONFIRMED,
    BookingState.CANCELLED: BookingAct.RESOLVE_CANCELLED,
    BookingState.FAILED: BookingAct.RESOLVE_FAILED,
}
"""How a person may end that a booking is unknown."""


class ObjectTaken(DomainError):
    """Another live booking has the object."""


class PartnerLimitExceeded(DomainError):
    """The partner has no limit, one in another currency, or less left than the booking costs."""


MOST_OBJECTS: Final = 20


class BookingNotFound(DomainError):
    """No such booking among those that the caller may see."""


class QuoteExpired(DomainError):
    """The quote's life is over; a new one is needed."""


class ReservationExpired(DomainError):
    """The time of the booking is over, though nobody has said so yet."""


class BookingNotPriced(DomainError):
    """A partner's booking can't be committed without a price."""


class BookingsNotConfirmed(DomainError):
    """The deal can't be completed: a booking of it is live but not confirmed."""


class BookingNotDue(DomainError):
    """The booking has no timer, or it has not passed."""


class Asked(StrEnum):
    """The newest request about an object."""

    HOLD = "hold"
    COMMIT = "commit"
    RELEASE = "release"
    SELL = "sell"


class Outcome(StrEnum):
    """What the chessboard answered, as it says it."""

    HELD = "held"
    BOOKED = "booked"
    SOLD = "sold"
    RELEASED = "released"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Why a booking changed, as the events say it."""

    EXPIRED = "expired"
    QUOTE_EXPIRED = "quote_expired"
    PRICE_CHANGED = "price_changed"
    HOLD_REJECTED = "hold_rejected"
    COMMIT_REJECTED = "commit_rejected"
    NOT_COMPLETED = "not_completed"
    ANSWER_TIMEOUT = "answer_timeout"
    ANSWERED = "answered"
    FREED_EARLY = "freed_early"
    SALE_REJECTED = "sale_rejected"
    CANCELLED = "cancelled"
    DEAL_CANCELLED = "deal_cancelled"
    DEAL_COMPLETED = "deal_completed"
    AMENDMENT_APPLIED = "amendment_applied"
    AMENDMENT_REFUSED = "amendment_refused"
    DECIDED = "decided_by_person"


OF_DEAL: Final = frozenset({Reason.DEAL_CANCELLED, Reason.DEAL_COMPLETED})
"""The booking ends because its deal does."""
GONE: Final = frozenset({Outcome.RELEASED, Outcome.REJECTED})
"""The object is not held for the booking."""
_UNDERSTOOD: Final[Mapping[tuple[Asked, Outcome], Outcome]] = MappingProxyType(
    {
        (Asked.HOLD, Outcome.HELD): Outcome.HELD,
        (Asked.HOLD, Outcome.REJECTED): Outcome.REJECTED,
        (Asked.HOLD, Outcome.RELEASED): Outcome.RELEASED,
        (Asked.COMMIT, Outcome.BOOKED): Outcome.BOOKED,
        (Asked.COMMIT, Outcome.REJECTED): Outcome.REJECTED,
        (Asked.COMMIT, Outcome.RELEASED): Outcome.RELEASED,
        # A release of what isn't ours is refused: nothing is held for the booking either way.
        (Asked.RELEASE, Outcome.RELEASED): Outcome.RELEASED,
        (Asked.RELEASE, Outcome.REJECTED): Outcome.RELEASED,
        (Asked.SELL, Outcome.SOLD): Outcome.SOLD,
        (Asked.SELL, Outcome.REJECTED): Outcome.REJECTED,
        (Asked.SELL, Outcome.RELEASED): Outcome.RELEASED,
    }
)
"""What an answer means for what was asked; any other pair decides nothing, and the next answer is waited for."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The chessboard's answer to one request.

    Attributes:
        sequence: of the request that it answers.
        version: the object's version when it was given.
    """

    booking_id: UUID
    property_object_id: UUID
    sequence: int
    outcome: Outcome
    version: int


@dataclass(frozen=True, slots=True)
class BookingMoved:
    """A booking went from one state to another."""

    booking_id: UUID
    deal_id: UUID
    tenant_id: UUID
    partner_id: UUID | None
    from_state: BookingState
    to_state: BookingState
    reason: Reason | None
    property_object_ids: tuple[UUID, ...]
    reserved_until: datetime | None
    booked_until: datetime | None
    changed_at: datetime
    version: int


@dataclass(frozen=True, slots=True)
class QuoteInvalidated:
    """A booking's quote no longer holds."""

    booking_id: UUID
    deal_id: UUID
    tenant_id: UUID
    partner_id: UUID | None
    reason: Reason
    property_object_ids: tuple[UUID, ...]
    invalidated_at: datetime
    version: int


@dataclass(frozen=True, slots=True)
class ObjectAsked:
    """Something is asked of the chessboard for one object, for the first time or again (with the same sequence)."""

    asked: Asked
    booking_id: UUID
    deal_id: UUID
    tenant_id: UUID
    property_object_id: UUID
    sequence: int
    reserved_until: datetime | None
    booked_until: datetime | None
    reason: Reason | None
    asked_at: datetime


@dataclass(frozen=True, slots=True)
class PersonAsked:
    """A booking needs a person, or no longer does."""

    booking_id: UUID
    tenant_id: UUID
    is_needed: bool
    reason: Reason
    at: datetime
    by_person: bool = False


BookingEvent = BookingMoved | QuoteInvalidated | ObjectAsked | PersonAsked


@dataclass(eq=False, slots=True)
class ObjectClaim:
    """Who may ask for an object, and the last sequence that was handed out for it."""

    property_object_id: UUID
    booking_id: UUID | None = None
    sequence: int = 0

    def ask(self, booking_id: UUID) -> int:
        """Return the next sequence, for the booking that has the claim or takes it now.

        Raises:
            ObjectTaken: another live booking has it.
        """
        if self.booking_id not in (None, booking_id):
            raise ObjectTaken(f"another booking has object {self.property_object_id}")
        self.booking_id = booking_id
        self.sequence += 1
        return self.sequence

    def free(self, booking_id: UUID) -> None:
        """Let other bookings ask, if this one had the claim."""
        if self.booking_id == booking_id:
            self.booking_id = None


@dataclass(eq=False, slots=True)
class BookingObject:
    """One object of a booking.

    Attributes:
        sequence: of the newest request.
        asked: what that was; None: nothing has been asked for.
        outcome: its answer; None: outstanding.
        reason: why the object was released, if that was asked.
        object_version: the object's version by the last answer: older news about it is stale.
    """

    property_object_id: UUID
    claim: ObjectClaim
    sequence: int | None = None
    asked: Asked | None = None
    outcome: Outcome | None = None
    reason: Reason | None = None
    object_version: int | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the object is known not to be held for the booking."""
        return self.outcome in GONE

    def ask(self, asked: Asked, booking_id: UUID, reason: Reason | None = None) -> None:
        """Note a new request, which makes all earlier ones and their answers meaningless.

        Raises:
            ObjectTaken: another live booking has the object.
        """
        self.sequence = self.claim.ask(booking_id)
        self.asked, self.outcome, self.reason = asked, None, reason

    def take(self, answer: Answer) -> bool:
        """Note an answer; return whether it says anything new about the newest request."""
        if self.asked is None or self.outcome is not None or answer.sequence != self.sequence:
            return False
        self.outcome = _UNDERSTOOD.get((self.asked, answer.outcome))
        if self.outcome is None:
            return False
        self.object_version = answer.version
        return True

    def is_stale(self, version: int) -> bool:
        """Tell whether news of an object's version is older than the last answer."""
        return self.object_version is not None and version <= self.object_version


@dataclass(eq=False, slots=True)
class PartnerLimit:
    """How much a partner's bookings may cost together, and how much they do."""

    tenant_id: UUID
    partner_id: UUID
    currency: str
    limit_minor: int
    used_minor: int

    def take(self, amount: int, currency: str | None) -> None:
        """Use some of the limit.

        Raises:
            PartnerLimitExceeded: less is left, or it is in another currency.
        """
        if currency != self.currency or self.used_minor + amount > self.limit_minor:
            raise PartnerLimitExceeded(f"the limit of partner {self.partner_id} doesn't cover the booking")
        self.used_minor += amount


def is_past(timer: datetime | None, now: datetime) -> bool:
    """Tell whether a timer is set and over; its very instant is not."""
    return timer is not None and timer < now


def require_future(name: str, value: datetime, now: datetime) -> None:
    """Refuse an instant that has come.

    Raises:
        ValidationError: it has.
    """
    if value <= now:
        raise ValidationError(f"{name} must be after now")


def require_objects(ids: Sequence[UUID]) -> None:
    """Refuse a booking without objects, with too many, or with one twice.

    Raises:
        ValidationError: it is one of these.
    """
    if not 1 <= len(ids) <= MOST_OBJECTS or len(set(ids)) != len(ids):
        raise ValidationError(f"a booking has 1 to {MOST_OBJECTS} objects, each once")
