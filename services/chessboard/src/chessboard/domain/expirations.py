"""Holds whose time is long over: how the safety net frees them, and why their release may have been lost; pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final
from uuid import UUID

from chessboard.domain.objects import (
    PropertyObject,
    StatusChanged,
    StatusSource,
    StatusTransitionRefused,
    ValidationError,
)

LARGEST_BATCH: Final = 1000
LONGEST_GRACE: Final = timedelta(days=7)


class Phase(StrEnum):
    """The kinds of holds, in the order in which a cycle frees them."""

    RESERVED = "reserved"
    BOOKED = "booked"


@dataclass(frozen=True, slots=True)
class ExpirationLimits:
    """How much one cycle may free, and how long CRM has for it.

    Attributes:
        batch_size: most objects of one phase and cycle, 1..1000.
        hold_grace: time after a hold's own in which it is left to CRM, above zero.

    Raises:
        ValidationError: one of them is outside its range.
    """

    batch_size: int
    hold_grace: timedelta

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= LARGEST_BATCH:
            raise ValidationError(f"BatchSize must be within 1..{LARGEST_BATCH}, not {self.batch_size}")
        if not timedelta(0) < self.hold_grace <= LONGEST_GRACE:
            raise ValidationError(f"HoldGrace must be above zero and at most {LONGEST_GRACE}, not {self.hold_grace}")


def release_expired(found: PropertyObject, as_of: datetime, grace: timedelta) -> StatusChanged:
    """Free an object whose hold was over, by more than the grace, at the instant of the cycle.

    Raises:
        StatusTransitionRefused: it is not held, or its time or the grace is not over.
    """
    until = found.reserved_until or found.booked_until
    if until is None or not until < as_of - grace:
        raise StatusTransitionRefused(f"the hold of object {found.id} is not over by more than the grace")
    return found.release(None, StatusSource.EXPIRATION_JOB, as_of)


class LostBecause(StrEnum):
    """Why no release came for a hold, as far as can be told."""

    DEAD_LETTER = "dead_letter"
    CONSUMER_LAGGING = "consumer_lagging"
    CRM_SILENT = "crm_silent"
    NEVER_PUBLISHED = "never_published"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about the normal path when releases are missing.

    Attributes:
        set_aside: objects for which a record of CRM waits among the dead letters or behind a parked key.
        waiting: objects in whose partitions records wait that are as old as a release would be; None: Kafka didn't say.
        crm_is_silent: CRM released nothing at all for long, while several bookings were over.
    """

    set_aside: frozenset[UUID]
    waiting: frozenset[UUID] | None
    crm_is_silent: bool


NOTHING_KNOWN: Final = Evidence(frozenset(), None, crm_is_silent=False)


def why_lost(property_object_id: UUID, evidence: Evidence) -> LostBecause:
    """Return the nearest cause: what waits here is surer than what was not heard of."""
    if property_object_id in evidence.set_aside:
        return LostBecause.DEAD_LETTER
    if evidence.waiting is None:
        return LostBecause.UNKNOWN
    if property_object_id in evidence.waiting:
        return LostBecause.CONSUMER_LAGGING
    return LostBecause.CRM_SILENT if evidence.crm_is_silent else LostBecause.NEVER_PUBLISHED


def bookings_of(lost: Sequence[StatusChanged]) -> int:
    """Return how many bookings held the objects before."""
    return len({change.previous_hold for change in lost if change.previous_hold is not None})
