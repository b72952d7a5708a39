"""The calendar again, slowly: written from the decision text and sharing no code with the library.

It reads the wall clock of every UTC minute of a window (the library goes the other way, from wall clock to
UTC), marks each minute as working or not, and walks. Instants may have any precision; intervals begin and end
on whole minutes.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from typing import Any
from zoneinfo import ZoneInfo

MINUTE = timedelta(minutes=1)
ZERO = timedelta(0)


class OutOfWindowError(Exception):
    """The walk left the window that was read; the example proves nothing."""


class WallClock:
    """What the wall clock of a zone shows at every minute of `days` days from `first` 00:00 UTC on."""

    def __init__(self, zone: str, first: date, days: int) -> None:
        self.zone = ZoneInfo(zone)
        self.start = datetime(first.year, first.month, first.day, tzinfo=UTC)
        self.length = days * 24 * 60
        self.cell_of: dict[datetime, int] = {}
        self.dates: set[date] = set()
        before: datetime | None = None
        for cell in range(self.length):
            shown = (self.start + cell * MINUTE).astimezone(self.zone).replace(tzinfo=None)
            self._skipped_between(before, shown, cell)
            self.cell_of.setdefault(shown, cell)  # an ambiguous reading is its first occurrence
            self.dates.add(shown.date())
            before = shown
        self.last_date = max(self.dates)
        self.first_reading = min(self.cell_of)

    def _skipped_between(self, before: datetime | None, shown: datetime, cell: int) -> None:
        """A skipped reading moves forward by the gap: as far after the jump as the old clock would run."""
        skipped = shown if before is None else before + MINUTE
        offset = 0
        while skipped < shown:
            self.cell_of.setdefault(skipped, cell + offset)
            skipped, offset = skipped + MINUTE, offset + 1


@lru_cache(maxsize=128)
def wall_clock(zone: str, first: date, days: int) -> WallClock:
    """Reading a window is the slow part, and no calendar changes it."""
    return WallClock(zone, first, days)


def _minutes(text: str) -> int:
    return int(text[:2]) * 60 + int(text[3:])


def _touching_joined(intervals: Sequence[Sequence[str]]) -> list[list[int]]:
    pairs = sorted([_minutes(opening), _minutes(closing)] for opening, closing in intervals)
    joined = True
    while joined:
        joined = False
        for left in range(len(pairs) - 1):
            if pairs[left][1] == pairs[left + 1][0]:
                pairs[left : left + 2] = [[pairs[left][0], pairs[left + 1][1]]]
                joined = True
                break
    return pairs


class Oracle:
    """One calendar over one window. Methods are named as in the library and mean what the decision says."""

    def __init__(self, config: Mapping[str, Any], clock: WallClock) -> None:
        self.clock = clock
        self.working = bytearray(clock.length)
        self.cells_on: dict[date, set[int]] = {}
        for day in clock.dates:
            self.cells_on[day] = self._cells(config, day)
            for cell in self.cells_on[day]:
                self.working[cell] = 1

    def _cells(self, config: Mapping[str, Any], day: date) -> set[int]:
        listed = config["week"].get(str(day.weekday()), [])
        if day.isoformat() in config["holidays"]:
            listed = []
        if day.isoformat() in config["overrides"]:
            listed = config["overrides"][day.isoformat()]
        midnight = datetime(day.year, day.month, day.day)  # noqa: DTZ001 (a wall-clock reading)
        cells: set[int] = set()
        for opening, closing in _touching_joined(listed):
            begin = self._cell_of(midnight + opening * MINUTE)
            end = self._cell_of(midnight + closing * MINUTE)
            cells.update(range(begin, end))  # empty or reversed: nothing that day
        return cells

    def _cell_of(self, reading: datetime) -> int:
        if reading in self.clock.cell_of:
            return self.clock.cell_of[reading]
        return 0 if reading < self.clock.first_reading else self.clock.length

    def _at(self, instant: datetime) -> timedelta:
        return instant.astimezone(UTC) - self.clock.start

    def _works(self, cell: int) -> bool:
        # The first and last days of a window may be read only in part.
        if not 2 * 24 * 60 <= cell < self.clock.length - 2 * 24 * 60:
            raise OutOfWindowError
        return bool(self.working[cell])

    def is_working(self, instant: datetime) -> bool:
        return self._works(self._at(instant) // MINUTE)

    def _is_open_or_closing(self, at: timedelta) -> bool:
        cell = at // MINUTE
        return self._works(cell) or (at % MINUTE == ZERO and self._works(cell - 1))

    def next_working_instant(self, instant: datetime) -> datetime:
        at = self._at(instant)
        while not self._is_open_or_closing(at):
            at = (at // MINUTE + 1) * MINUTE
        return self.clock.start + at

    def previous_working_instant(self, instant: datetime) -> datetime:
        at = self._at(instant)
        while not self._is_open_or_closing(at):
            at = (at // MINUTE) * MINUTE if at % MINUTE else at - MINUTE
        return self.clock.start + at

    def add_working_time(self, start: datetime, duration: timedelta) -> datetime:
        if duration == ZERO:
            return self.next_working_instant(start)
        at, left = self._at(start), duration
        while True:
            cell = at // MINUTE
            end = (cell + 1) * MINUTE
            if self._works(cell):
                if left <= end - at:
                    return self.clock.start + at + left
                left -= end - at
            at = end

    def subtract_working_time(self, end: datetime, duration: timedelta) -> datetime:
        if duration == ZERO:
            return self.previous_working_instant(end)
        at, left = self._at(end), duration
        while True:
            cell = at // MINUTE if at % MINUTE else at // MINUTE - 1
            begin = cell * MINUTE
            if self._works(cell):
                if left <= at - begin:
                    return self.clock.start + at - left
                left -= at - begin
            at = begin

    def working_time_between(self, start: datetime, end: datetime) -> timedelta:
        at, until, passed = self._at(start), self._at(end), ZERO
        while at < until:
            step = min((at // MINUTE + 1) * MINUTE, until)
            if self._works(at // MINUTE):
                passed += step - at
            at = step
        return passed

    def add_working_days(self, start: datetime, days: int) -> datetime:
        first = self.next_working_instant(start)
        if days == 0:
            return first
        local = first.astimezone(self.clock.zone).replace(tzinfo=None)
        day, left = local.date(), days
        while left:
            day += timedelta(days=1)
            if day > self.clock.last_date - timedelta(days=3):
                raise OutOfWindowError
            left -= 1 if self.cells_on.get(day) else 0
        wanted = datetime.combine(day, local.time())
        whole = wanted.replace(second=0, microsecond=0)
        return self._moved_into(self._cell_of(whole) * MINUTE + (wanted - whole), self.cells_on[day])

    def _moved_into(self, at: timedelta, cells: set[int]) -> datetime:
        cell = at // MINUTE
        if cell in cells or (at % MINUTE == ZERO and cell - 1 in cells):
            return self.clock.start + at
        later = [other for other in cells if other > cell]
        return self.clock.start + (min(later) if later else max(cells) + 1) * MINUTE
