"""What CRM asks of a property object, and what becomes of it; pure.

CRM numbers all that it asks about one object: a number that is not newer than the last one of its booking changes
nothing, whatever topic brought it when. The ledger keeps the last number of each booking, and whether CRM has released
it, so that a request that comes after its own release finds a tombstone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID

from chessboard.domain.objects import Hold, PropertyObject, Status, StatusChanged, StatusSource


class Ask(StrEnum):
    """What CRM asks for."""

    HOLD = "hold"
    BOOK = "book"
    SELL = "sell"
    RELEASE = "release"


class Outcome(StrEnum):
    """What a request is answered with."""

    HELD = "held"
    BOOKED = "booked"
    SOLD = "sold"
    RELEASED = "released"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Why a request was rejected."""

    UNKNOWN_OBJECT = "unknown_object"
    HELD_BY_ANOTHER = "held_by_another"
    SUPERSEDED = "superseded"
    ALREADY_BOOKED = "already_booked"
    ALREADY_RELEASED = "already_released"
    NOT_HELD = "not_held"
    HIDDEN = "hidden"
    SOLD = "sold"
    HOLD_MISMATCH = "hold_mismatch"


class Result(StrEnum):
    """What a request did, for the counters."""

    CHANGED = "changed"
    REPEATED = "repeated"
    NOTHING_TO_DO = "nothing-to-do"
    REJECTED = "rejected"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Request:
    """One request of CRM.

    Attributes:
        sequence: CRM's number of it, growing per object.
        at: until when to hold or book; when it was sold; None for a release.
    """

    ask: Ask
    property_object_id: UUID
    tenant_id: UUID
    hold: Hold
    sequence: int
    at: datetime | None


@dataclass(slots=True)
class LedgerEntry:
    """What CRM has last asked about an object for one booking."""

    property_object_id: UUID
    booking_id: UUID
    deal_id: UUID
    last_sequence: int
    released: bool


@dataclass(eq=False, slots=True)
class Ledger:
    """All entries of one object, by booking; `changed` are those to be written."""

    property_object_id: UUID
    entries: dict[UUID, LedgerEntry] = field(default_factory=dict)
    changed: dict[UUID, LedgerEntry] = field(default_factory=dict)

    def note(self, request: Request, *, released: bool) -> None:
        """Keep a request as the last one of its booking."""
        booking_id = request.hold.booking_id
        entry = self.entries.get(booking_id)
        if entry is None:
            entry = LedgerEntry(self.property_object_id, booking_id, request.hold.deal_id, request.sequence, released)
            self.entries[booking_id] = entry
        entry.last_sequence, entry.released = request.sequence, released
        self.changed[booking_id] = entry

    def supersede(self, request: Request) -> None:
        """Note that CRM has released the bookings for which it asked earlier: it gives an object to one at a time."""
        for booking_id, entry in self.entries.items():
            if booking_id != request.hold.booking_id and entry.last_sequence < request.sequence and not entry.released:
                entry.released = True
                self.changed[booking_id] = entry

    def knows_newer(self, request: Request) -> bool:
        """Tell whether another booking has a number that is not older: CRM has given the object away since."""
        return any(
            entry.last_sequence >= request.sequence
            for booking_id, entry in self.entries.items()
            if booking_id != request.hold.booking_id
        )


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of a request.

    Attributes:
        changes: of the object, in order; a hold that takes over from another booking has two.
    """

    result: Result
    outcome: Outcome
    reason: Reason | None = None
    changes: tuple[StatusChanged, ...] = ()


def settle(request: Request, found: PropertyObject | None, ledger: Ledger, now: datetime) -> Settlement:
    """Obey a request, or say why not; the object and the ledger are changed in place.

    Args:
        request: what CRM asks.
        found: the object, locked; None if there is none.
        ledger: the object's entries.
        now: the instant of the change.
    """
    if found is None or found.tenant_id != request.tenant_id:
        return _rejected(Reason.UNKNOWN_OBJECT)
    entry = ledger.entries.get(request.hold.booking_id)
    if entry is not None and request.sequence <= entry.last_sequence:
        return _shown(request, found, entry)
    return _SETTLERS[request.ask](request, found, ledger, now)


def _hold(request: Request, found: PropertyObject, ledger: Ledger, now: datetime) -> Settlement:
    mine = _is_held_by(found, request)
    if found.status in _CLOSED or ledger.knows_newer(request):
        return _reject(request, found, ledger, released=not mine)
    if mine and found.status is Status.BOOKED:
        return _reject(request, found, ledger, released=False)
    changes = []
    if found.hold is not None and not mine:
        changes.append(found.release(found.hold, StatusSource.CRM, now))
    changes.append(found.reserve(request.hold, _at(request), StatusSource.CRM, now))
    return _obeyed(request, ledger, Outcome.HELD, changes)


def _book(request: Request, found: PropertyObject, ledger: Ledger, now: datetime) -> Settlement:
    if not _may_go_on(request, found, ledger):
        return _reject(request, found, ledger, released=found.hold is not None or _was_released(request, ledger))
    change = found.book(request.hold, _at(request), StatusSource.CRM, now)
    return _obeyed(request, ledger, Outcome.BOOKED, [change])


def _sell(request: Request, found: PropertyObject, ledger: Ledger, now: datetime) -> Settlement:
    if _is_sold_to(found, ledger.entries.get(request.hold.booking_id)):
        ledger.note(request, released=False)
        return Settlement(Result.NOTHING_TO_DO, Outcome.SOLD)
    if not _may_go_on(request, found, ledger):
        return _reject(request, found, ledger, released=found.hold is not None or _was_released(request, ledger))
    changes = []
    if found.status is Status.RESERVED and found.reserved_until is not None:
        # The commit that was asked before is still on its way on a topic of its own.
        changes.append(found.book(request.hold, found.reserved_until, StatusSource.CRM, now))
    changes.append(found.sell(request.hold, _at(request), StatusSource.CRM, now))
    return _obeyed(request, ledger, Outcome.SOLD, changes)


def _release(request: Request, found: PropertyObject, ledger: Ledger, now: datetime) -> Settlement:
    entry = ledger.entries.get(request.hold.booking_id)
    if found.hold == request.hold:
        change = found.release(request.hold, StatusSource.CRM, now)
        ledger.note(request, released=True)
        return Settlement(Result.CHANGED, Outcome.RELEASED, changes=(change,))
    if _is_held_by(found, request):
        return _MISMATCH  # the booking's, and not the deal's: the holder's entry stays as it is
    if _is_sold_to(found, entry):
        ledger.note(request, released=False)
        return _rejected(Reason.SOLD)
    not_its_own = found.hold is not None and (
        entry is None or (not entry.released and found.hold.deal_id != request.hold.deal_id)
    )
    ledger.note(request, released=True)
    return _MISMATCH if not_its_own else Settlement(Result.NOTHING_TO_DO, Outcome.RELEASED)


_MISMATCH: Final = Settlement(Result.MISMATCH, Outcome.REJECTED, Reason.HOLD_MISMATCH)
_CLOSED: Final = frozenset({Status.SOLD, Status.HIDDEN})
_SETTLERS: Final[Mapping[Ask, Callable[[Request, PropertyObject, Ledger, datetime], Settlement]]] = MappingProxyType(
    {Ask.HOLD: _hold, Ask.BOOK: _book, Ask.SELL: _sell, Ask.RELEASE: _release}
)


def _may_go_on(request: Request, found: PropertyObject, ledger: Ledger) -> bool:
    """Tell whether a booking may book or buy: it holds the object, or the safety net has freed it meanwhile."""
    if found.hold is not None:
        return found.hold == request.hold
    return found.status is Status.FREE and not ledger.knows_newer(request) and not _was_released(request, ledger)


def _obeyed(request: Request, ledger: Ledger, outcome: Outcome, changes: list[StatusChanged]) -> Settlement:
    ledger.note(request, released=False)
    ledger.supersede(request)
    return Settlement(Result.CHANGED, outcome, changes=tuple(changes))


def _reject(request: Request, found: PropertyObject, ledger: Ledger, *, released: bool) -> Settlement:
    """Reject a request, and keep that: repeated later, when the object may be free, it gets the same answer."""
    reason = _why_not(request, found, ledger)
    ledger.note(request, released=released)
    return _rejected(reason)


def _why_not(request: Request, found: PropertyObject, ledger: Ledger) -> Reason:
    match found.status:
        case Status.SOLD:
            return Reason.SOLD
        case Status.HIDDEN:
            return Reason.HIDDEN
        case Status.FREE:
            if _was_released(request, ledger):
                return Reason.ALREADY_RELEASED
            return Reason.SUPERSEDED if ledger.knows_newer(request) else Reason.NOT_HELD
        case Status.RESERVED | Status.BOOKED:
            return Reason.ALREADY_BOOKED if _is_held_by(found, request) else Reason.HELD_BY_ANOTHER


def _shown(request: Request, found: PropertyObject, entry: LedgerEntry) -> Settlement:
    """Answer a request that changes nothing with what ledger and object show now."""
    if _is_held_by(found, request):
        return Settlement(Result.REPEATED, Outcome.BOOKED if found.status is Status.BOOKED else Outcome.HELD)
    if _is_sold_to(found, entry):
        return Settlement(Result.REPEATED, Outcome.SOLD)
    if request.ask is Ask.RELEASE:
        return Settlement(Result.REPEATED, Outcome.RELEASED)
    reason = _why_not(request, found, Ledger(found.id, {entry.booking_id: entry}))
    return Settlement(Result.REPEATED, Outcome.REJECTED, reason)


def _rejected(reason: Reason) -> Settlement:
    return Settlement(Result.REJECTED, Outcome.REJECTED, reason)


def _is_held_by(found: PropertyObject, request: Request) -> bool:
    return found.hold is not None and found.hold.booking_id == request.hold.booking_id


def _is_sold_to(found: PropertyObject, entry: LedgerEntry | None) -> bool:
    """Tell whether a booking bought the object: its own entry is the one that the sale did not release."""
    by_crm = found.status is Status.SOLD and found.status_source is StatusSource.CRM
    return by_crm and entry is not None and not entry.released


def _was_released(request: Request, ledger: Ledger) -> bool:
    entry = ledger.entries.get(request.hold.booking_id)
    return entry is not None and entry.released


def _at(request: Request) -> datetime:
    if request.at is None:
        raise ValueError(f"a request to {request.ask} has no instant")
    return request.at
