"""What the jobs claim of bookings: rows whose timer has passed, in the order of the timer, never waiting."""

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.batching import SkipLocked
from crm.repository.bookings import BOOKING_COLUMNS
from crm.tables import SCHEMA


@dataclass(frozen=True, slots=True)
class TimerClaim:
    """Bookings whose timer has passed.

    Attributes:
        column: of the timer.
        rows: the claim, whose one argument is the cycle's instant.
        states: SQL that its index serves.
    """

    column: str
    rows: SkipLocked
    states: str

    async def count(self, session: AsyncSession, now: datetime) -> int:
        """Return how many bookings are due, counted up to 100000."""
        due = text(
            f"select count(*) from (select from crm.booking t where {self.states} and t.{self.column} < :now"
            " limit 100000) as due"
        )
        return int((await session.execute(due, {"now": now})).scalar_one())


def _claim(job: str, column: str, states: str) -> TimerClaim:
    rows = SkipLocked(
        schema=SCHEMA,
        job=job,
        table="crm.booking",
        columns=tuple(f"t.{name}" for name in BOOKING_COLUMNS),
        where=f"{states} and t.{column} < $4",
        order=(f"t.{column}", "t.id"),
        arguments=1,
        cursor_types=("timestamptz", "uuid"),
    )
    return TimerClaim(column, rows, states)


RESERVED_OVER: Final = _claim("booking-expiration-reserved", "reserved_until", "t.state in ('held', 'pending_payment')")
BOOKED_OVER: Final = _claim(
    "booking-expiration-booked", "booked_until", "t.state in ('confirmed', 'amendment_pending')"
)
ANSWERS_LATE: Final = _claim("booking-answers", "answer_due_at", "t.answer_due_at is not null")
QUOTES_OVER: Final = _claim("booking-quotes", "quote_expires_at", "t.state = 'quoted'")
