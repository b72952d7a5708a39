"""Projects, buildings, property objects and their holds; pure.

Invariants: a status changes only as the table of transitions says, and only by the sources that it names (INV-CHS-001);
a hold's time is there exactly while the object is held (INV-CHS-002); a hold is booked, sold or released by the booking
that has it, but for the job that frees what a lost release left behind (INV-CHS-003).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Final
from uuid import UUID


class DomainError(Exception):
    """A rule of the domain was broken; the text is safe to show."""


class ValidationError(DomainError, ValueError):
    """An input is outside its range; nothing was read or changed."""


class ProjectNotFound(DomainError):
    """No such project in the caller's tenant."""


class PropertyObjectNotFound(DomainError):
    """No such property object in the caller's tenant."""


class StatusTransitionRefused(DomainError):
    """The object's status doesn't allow what was asked, or not from whom it came."""


class HoldMismatch(DomainError):
    """The object is held, and not by the booking that speaks."""


class VersionConflict(DomainError):
    """The object has changed since it was read; nothing was written."""


class Status(StrEnum):
    """Where a property object is in its life."""

    FREE = "Free"
    RESERVED = "Reserved"
    BOOKED = "Booked"
    SOLD = "Sold"
    HIDDEN = "Hidden"


class StatusSource(StrEnum):
    """Who changes a status."""

    CRM = "Crm"
    ADMIN = "Admin"
    IMPORT = "Import"
    EXPIRATION_JOB = "ExpirationJob"


class Act(StrEnum):
    """What can be asked of a property object."""

    HOLD = "Hold"
    BOOK = "Book"
    SELL = "Sell"
    RELEASE = "Release"
    HIDE = "Hide"
    UNHIDE = "Unhide"


@dataclass(frozen=True, slots=True)
class Transition:
    """Where an act leads, and who may ask for it."""

    to: Status
    sources: frozenset[StatusSource]


def _to(status: Status, *sources: StatusSource) -> Transition:
    return Transition(status, frozenset(sources))


TRANSITIONS: Final[Mapping[tuple[Status, Act], Transition]] = MappingProxyType(
    {
        (Status.FREE, Act.HOLD): _to(Status.RESERVED, StatusSource.CRM),
        (Status.FREE, Act.BOOK): _to(Status.BOOKED, StatusSource.CRM),
        (Status.FREE, Act.SELL): _to(Status.SOLD, StatusSource.CRM, StatusSource.ADMIN),
        (Status.FREE, Act.HIDE): _to(Status.HIDDEN, StatusSource.ADMIN, StatusSource.IMPORT),
        (Status.RESERVED, Act.HOLD): _to(Status.RESERVED, StatusSource.CRM),
        (Status.RESERVED, Act.BOOK): _to(Status.BOOKED, StatusSource.CRM),
        (Status.RESERVED, Act.RELEASE): _to(Status.FREE, StatusSource.CRM, StatusSource.EXPIRATION_JOB),
        (Status.BOOKED, Act.BOOK): _to(Status.BOOKED, StatusSource.CRM),
        (Status.BOOKED, Act.SELL): _to(Status.SOLD, StatusSource.CRM),
        (Status.BOOKED, Act.RELEASE): _to(Status.FREE, StatusSource.CRM, StatusSource.EXPIRATION_JOB),
        (Status.HIDDEN, Act.UNHIDE): _to(Status.FREE, StatusSource.ADMIN, StatusSource.IMPORT),
    }
)
"""The whole state machine: what isn't here is refused. A held object is held, booked, sold and released by its own
booking only; `ExpirationJob` is no booking and asks for none."""

HELD: Final = frozenset({Status.RESERVED, Status.BOOKED})


@dataclass(frozen=True, slots=True)
class Hold:
    """Who holds an object: a booking of a deal."""

    deal_id: UUID
    booking_id: UUID


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The status of an object, or the time of its hold, was changed.

    Attributes:
        version: the object's version after it; it was one less before.
        previous_hold: who held it before.
        previous_until: until when.
    """

    property_object_id: UUID
    tenant_id: UUID
    project_id: UUID
    building_id: UUID
    from_status: Status
    to_status: Status
    source: StatusSource
    hold: Hold | None
    reserved_until: datetime | None
    booked_until: datetime | None
    sold_at: datetime | None
    changed_at: datetime
    version: int
    price_minor: int
    currency: str
    previous_hold: Hold | None
    previous_until: datetime | None


@dataclass(frozen=True, slots=True)
class PriceChanged:
    """The price of an object was changed; its status was not.

    Attributes:
        status: and the following ones: as they stay.
        version: the object's version after it.
    """

    property_object_id: UUID
    tenant_id: UUID
    project_id: UUID
    building_id: UUID
    status: Status
    source: StatusSource
    hold: Hold | None
    reserved_until: datetime | None
    booked_until: datetime | None
    sold_at: datetime | None
    status_changed_at: datetime
    changed_at: datetime
    version: int
    price_minor: int
    currency: str
    previous_price_minor: int
    previous_currency: str


Change = StatusChanged | PriceChanged


@dataclass(eq=False)
class Project:
    """What a developer sells: buildings with property objects."""

    id: UUID
    tenant_id: UUID
    name: str
    created_at: datetime
    updated_at: datetime
    property_objects_free_count: int = 0
    aggregates_as_of: datetime | None = None
    version: int = 1


@dataclass(eq=False)
class Building:
    """A building of a project; its sections stand side by side in the grid."""

    id: UUID
    tenant_id: UUID
    project_id: UUID
    name: str
    sections: int
    created_at: datetime
    updated_at: datetime


@dataclass(eq=False, slots=True)
class PropertyObject:
    """A flat, a parking lot or a store room; its version counts every change of status, hold or price.

    `sold_at` is set exactly when it is sold, the hold and one of the times exactly while it is held.
    """

    id: UUID
    tenant_id: UUID
    project_id: UUID
    building_id: UUID
    section: int
    number: str
    floor: int
    rooms: int
    area: Decimal
    price_minor: int
    currency: str
    status_changed_at: datetime
    created_at: datetime
    updated_at: datetime
    status: Status = Status.FREE
    status_source: StatusSource = StatusSource.IMPORT
    reserved_until: datetime | None = None
    booked_until: datetime | None = None
    hold: Hold | None = None
    sold_at: datetime | None = None
    version: int = 1

    def reserve(self, hold: Hold, until: datetime, source: StatusSource, now: datetime) -> StatusChanged:
        """Hold a free object for a booking, or give the booking that holds it another time.

        Raises:
            StatusTransitionRefused: its status, or the source, doesn't allow it.
            HoldMismatch: another booking holds it.
        """
        to = self._allowed(Act.HOLD, source, hold)
        return self._change(to, source, now, hold=hold, reserved_until=until)

    def book(self, hold: Hold, until: datetime, source: StatusSource, now: datetime) -> StatusChanged:
        """Book an object for the booking that holds it, or a free one whose hold was freed by the safety net.

        Raises:
            StatusTransitionRefused: its status, or the source, doesn't allow it.
            HoldMismatch: another booking holds it.
        """
        to = self._allowed(Act.BOOK, source, hold)
        return self._change(to, source, now, hold=hold, booked_until=until)

    def sell(self, hold: Hold | None, sold_at: datetime, source: StatusSource, now: datetime) -> StatusChanged:
        """Sell a booked object to its booking, or a free one.

        Raises:
            StatusTransitionRefused: its status, or the source, doesn't allow it.
            HoldMismatch: another booking holds it.
        """
        to = self._allowed(Act.SELL, source, hold)
        return self._change(to, source, now, sold_at=sold_at)

    def release(self, hold: Hold | None, source: StatusSource, now: datetime) -> StatusChanged:
        """Free a held object; the job that frees expired holds names no hold.

        Raises:
            StatusTransitionRefused: it isn't held, or the source doesn't allow it.
            HoldMismatch: another booking holds it.
        """
        to = self._allowed(Act.RELEASE, source, hold)
        return self._change(to, source, now)

    def hide(self, source: StatusSource, now: datetime) -> StatusChanged:
        """Take a free object out of the grid.

        Raises:
            StatusTransitionRefused: it isn't free, or the source doesn't allow it.
        """
        return self._change(self._allowed(Act.HIDE, source, None), source, now)

    def unhide(self, source: StatusSource, now: datetime) -> StatusChanged:
        """Put a hidden object back into the grid, free.

        Raises:
            StatusTransitionRefused: it isn't hidden, or the source doesn't allow it.
        """
        return self._change(self._allowed(Act.UNHIDE, source, None), source, now)

    def reprice(self, price_minor: int, currency: str, now: datetime) -> PriceChanged:
        """Set the price of an object that is not sold.

        Raises:
            ValidationError: the price is negative.
            StatusTransitionRefused: it is sold.
        """
        if price_minor < 0:
            raise ValidationError("a price is not negative")
        if self.status is Status.SOLD:
            raise StatusTransitionRefused(f"object {self.id} is {self.status}; its price stays")
        previous = (self.price_minor, self.currency)
        self.price_minor, self.currency = price_minor, currency
        self._touch(now)
        return PriceChanged(
            self.id, self.tenant_id, self.project_id, self.building_id, self.status, self.status_source, self.hold,
            self.reserved_until, self.booked_until, self.sold_at, self.status_changed_at, self.updated_at, self.version,
            price_minor, currency, *previous,
        )  # fmt: skip

    def _allowed(self, act: Act, source: StatusSource, hold: Hold | None) -> Status:
        to = next_status(self.status, act, source)
        if self.hold is not None and source is not StatusSource.EXPIRATION_JOB and self.hold != hold:
            raise HoldMismatch(f"object {self.id} is held by another booking")
        return to

    def _change(
        self,
        to: Status,
        source: StatusSource,
        now: datetime,
        *,
        hold: Hold | None = None,
        reserved_until: datetime | None = None,
        booked_until: datetime | None = None,
        sold_at: datetime | None = None,
    ) -> StatusChanged:
        before = (self.status, self.hold, self.reserved_until or self.booked_until)
        self.status, self.status_source, self.hold = to, source, hold
        self.reserved_until, self.booked_until, self.sold_at = reserved_until, booked_until, sold_at
        self._touch(now)
        self.status_changed_at = self.updated_at
        return StatusChanged(
            self.id, self.tenant_id, self.project_id, self.building_id, before[0], to, source, hold, reserved_until,
            booked_until, sold_at, self.updated_at, self.version, self.price_minor, self.currency, *before[1:],
        )  # fmt: skip

    def _touch(self, now: datetime) -> None:
        """Count a change; never before the last one, which may have come while `now` waited for the row."""
        self.version += 1
        self.updated_at = max(now, self.updated_at)


def next_status(status: Status, act: Act, source: StatusSource) -> Status:
    """Return the status after an act.

    Raises:
        StatusTransitionRefused: the table has no such transition, or not for this source.
    """
    transition = TRANSITIONS.get((status, act))
    if transition is None or source not in transition.sources:
        raise StatusTransitionRefused(f"{act} by {source} is not possible from {status}")
    return transition.to
