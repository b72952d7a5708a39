"""One clock per process: every decision that compares instants asks it, and SQL never does.

Production reads the database's clock, so that all processes and rows share one; tests and demonstrations move theirs.
"""

from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

EARLIEST: Final = datetime(1900, 1, 1, tzinfo=UTC)
LATEST: Final = datetime(9999, 1, 1, tzinfo=UTC)
"""Instants are kept from EARLIEST on and before LATEST: beyond, an instant leaves the calendar in some offset, or means
infinity to the database driver."""


class Clock(Protocol):
    """Where a process takes its `now` from."""

    async def now(self, session: AsyncSession) -> datetime:
        """Return the current instant.

        Args:
            session: an open session; a clock that reads the database reads it there.

        Returns:
            A timezone-aware UTC instant, microsecond resolution.
        """
        ...


class DatabaseClock:
    """The database server's wall clock (`clock_timestamp()`), the only clock all processes share."""

    async def now(self, session: AsyncSession) -> datetime:
        """Return the database's current instant (UTC).

        Raises:
            sqlalchemy.exc.DBAPIError: the database can't be asked.
        """
        instant: datetime = (await session.execute(text("select clock_timestamp()"))).scalar_one()
        return instant.astimezone(UTC)


class MovableClock:
    """A clock that stands still until it is moved; for tests and demonstrations."""

    def __init__(self, start: datetime) -> None:
        """Start at `start`.

        Raises:
            ValueError: `start` is naive.
        """
        self.move_to(start)

    def move_to(self, instant: datetime) -> None:
        """Set the clock to a timezone-aware instant.

        Raises:
            ValueError: `instant` is naive.
        """
        if instant.tzinfo is None:
            raise ValueError(f"naive datetime: {instant!r}")
        self.instant = instant.astimezone(UTC)

    def advance(self, duration: timedelta) -> datetime:
        """Move the clock forward by `duration` and return the new instant."""
        self.move_to(self.instant + duration)
        return self.instant

    async def now(self, session: AsyncSession) -> datetime:  # noqa: ARG002 - the protocol's argument
        """Return the instant the clock stands at (UTC)."""
        return self.instant
