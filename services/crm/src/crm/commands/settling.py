"""What every command ends with: rows, audit, history and events of one transaction, written in sets.

Whoever has changed bookings gives their changes here, and in no other way do they reach the database or the bus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

import crm
from chassis.audit import Audit, AuditRecord
from chassis.contracts import contract_of
from chassis.contracts.checker import ContractChecker
from chassis.outbox import Cause, Outbox
from crm import repository
from crm.domain import Booking, BookingEvent, BookingMoved, PartnerLimitExceeded
from crm.messages import to_booking_message
from crm.tables import SCHEMA

OUTBOX: Final = Outbox(SCHEMA, ContractChecker.of(contract_of(crm.__file__)))
AUDIT: Final = Audit(SCHEMA)


@dataclass(frozen=True, slots=True)
class By:
    """Who gives a command, when and under which correlation id."""

    tenant_id: UUID
    user_id: str
    role: str | None
    now: datetime
    correlation_id: str
    partner_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """What a change of bookings goes back to: a person's command, a message, or a job's run."""

    now: datetime
    cause: Cause
    actor: str | None = None

    @classmethod
    def of(cls, by: By) -> Self:
        """Return it for a person's command."""
        return cls(by.now, Cause(by.correlation_id), by.user_id)


@dataclass(frozen=True, slots=True)
class Change:
    """A booking with what has happened to it since it was loaded or settled last.

    Attributes:
        charge: what its partner's limit is used more by (negative: less).
        note: an act that is no transition, for the audit.
    """

    booking: Booking
    events: Sequence[BookingEvent]
    charge: int
    note: str | None = None


def change_of(booking: Booking, note: str | None = None) -> Change:
    """Take what has happened to a booking, once."""
    change = Change(booking, tuple(booking.events), booking.charged_minor - booking.charge_on_record, note)
    booking.events.clear()
    booking.charge_on_record = booking.charged_minor
    return change


async def settle(session: AsyncSession, changes: Sequence[Change], why: Why) -> None:
    """Write changes of bookings whose rows and claims this session has locked.

    Raises:
        PartnerLimitExceeded: a partner's limit doesn't cover what is to be charged.
    """
    if not changes:
        return
    await _charge(session, changes)
    await repository.save_bookings(session, [change.booking for change in changes])
    events = [event for change in changes for event in change.events]
    await repository.add_history(session, [event for event in events if isinstance(event, BookingMoved)], why.actor)
    records = [record for change in changes for record in _audit_records(change)]
    await AUDIT.record(session, records, occurred_at=why.now, actor=why.actor, correlation_id=why.cause.correlation_id)
    await OUTBOX.emit(session, [to_booking_message(event) for event in events], why.cause)


async def _charge(session: AsyncSession, changes: Sequence[Change]) -> None:
    """Use a limit, or give back: under the limit's lock, in the transaction of the decision."""
    charges: dict[tuple[UUID, UUID], int] = {}
    priced = [change for change in changes if change.booking.partner_id and change.booking.price_minor is not None]
    for change in priced:
        if change.charge and change.booking.partner_id is not None:
            partner = (change.booking.tenant_id, change.booking.partner_id)
            charges[partner] = charges.get(partner, 0) + change.charge
    if not charges:
        return
    limits = await repository.lock_limits(session, charges)
    for change in priced:
        if change.charge > 0 and change.booking.partner_id is not None:
            limit = limits.get((change.booking.tenant_id, change.booking.partner_id))
            if limit is None:
                raise PartnerLimitExceeded(f"partner {change.booking.partner_id} has no limit")
            limit.take(change.charge, change.booking.currency)
    await repository.charge_limits(session, charges)


def _audit_records(change: Change) -> list[AuditRecord]:
    booking = change.booking
    moves = [event for event in change.events if isinstance(event, BookingMoved)]
    records = [
        AuditRecord(
            f"booking.{move.to_state}",
            "booking",
            booking.id,
            booking.tenant_id,
            {"from": move.from_state, "to": move.to_state, "reason": move.reason, "version": move.version},
        )
        for move in moves
    ]
    if change.note is not None or not moves:
        details = {"state": booking.state, "version": booking.version}
        action = f"booking.{change.note or 'asked-again'}"
        records.append(AuditRecord(action, "booking", booking.id, booking.tenant_id, details))
    return records
