"""The calendar that domain code talks to.

Invariant: every instant that comes in is aware, and every instant that goes out is aware and in UTC, so that
adding a plain timedelta to a result is absolute time and never wall-clock arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Final, TypeAlias
from zoneinfo import ZoneInfo

from bizcal.hours import WorkingHours
from bizcal.timeline import Timeline, instant_at, microseconds_of, midnight_of, position_of

Share: TypeAlias = int | float | Fraction | Decimal
"""A part of a whole, 0 to 1; a float stands for the binary value that it has."""

_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class UsedInterval:
    """One working interval and the part of it that a duration uses. All instants are aware, in UTC.

    `opens_at` and `closes_at` bound the whole interval, `used_from` and `used_until` the part used.
    Source: platform calendar specification.
    """

    opens_at: datetime
    closes_at: datetime
    used_from: datetime
    used_until: datetime

    @property
    def used(self) -> timedelta:
        """How much of the interval is used, in real (absolute) time."""
        return self.used_until - self.used_from


class Calendar:
    """Working time of one time zone: a week, holidays, and single days with hours of their own.

    Immutable; concurrent readers need no lock. Arguments may be in any time zone; results are in UTC. Every
    method raises ValueError for a naive datetime or one outside the years 2 to 9998 (UTC), and a search that
    finds no working time within five years raises NoWorkingTime. A wall-clock time skipped by a DST change
    moves forward by the gap; an ambiguous one is its first occurrence. Source: platform calendar
    specification.
    """

    __slots__ = ("_hours", "_timeline")

    def __init__(self, hours: WorkingHours) -> None:
        """Use `from_config` or `default`."""
        self._hours = hours
        self._timeline = Timeline(hours)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "Calendar":
        """Build a calendar from a mapping of strings, lists and mappings, as read from JSON.

        Keys, all optional: `tz` (zone name); `week` ("0" = Monday to "6" = Sunday, each a list of `["HH:MM",
        "HH:MM"]`, "24:00" allowed as a closing; a day left out is off); `holidays` (list of "YYYY-MM-DD",
        local dates without working time); `overrides` ("YYYY-MM-DD" to a list of intervals for that date;
        wins over holidays). A key left out is as in `default`. Touching intervals count as one; order doesn't
        matter.

        Raises ValueError that names the day or key: overlapping, reversed or empty intervals, an unknown
        zone, key or weekday, malformed times and dates, no working interval at all. Source: platform calendar
        specification.
        """
        return cls(WorkingHours.from_config(config))

    @classmethod
    def default(cls) -> "Calendar":
        """The beta's `platform-calendar`: UTC, Monday to Friday, 10:00 to 18:00.

        A simplification: holidays are not counted, so 1 January is a working day if it falls on Monday to
        Friday. Source: platform calendar specification.
        """
        return cls.from_config({})

    def __repr__(self) -> str:
        """Names the zone; the hours are too long for a log line."""
        return f"<Calendar {self.tz.key}>"

    @property
    def tz(self) -> ZoneInfo:
        """The zone of the configuration's days and times. Source: platform calendar specification."""
        return self._hours.tz

    def is_working(self, instant: datetime) -> bool:
        """Whether an interval contains `instant`: opening inclusive, closing exclusive.

        Source: platform calendar specification.
        """
        return self._timeline.contains(microseconds_of(instant))

    def next_working_instant(self, instant: datetime) -> datetime:
        """`instant` itself from an opening up to and including its closing, else the next opening.

        The result is aware, in UTC.

        Source: platform calendar specification.
        """
        return instant_at(self._timeline.following(microseconds_of(instant)))

    def previous_working_instant(self, instant: datetime) -> datetime:
        """`instant` itself from an opening up to and including its closing, else the previous closing.

        The result is aware, in UTC.

        Source: platform calendar specification.
        """
        return instant_at(self._timeline.preceding(microseconds_of(instant)))

    def add_working_time(self, start: datetime, duration: timedelta) -> datetime:
        """The instant (aware, UTC) at which `duration` of working time has passed since `start`.

        Exactly on a closing time it stays there. Zero gives `next_working_instant(start)`. Real time is
        counted, also over a DST change inside an interval. ValueError if `duration` is negative. Source:
        platform calendar specification.
        """
        return instant_at(self._timeline.add(microseconds_of(start), _amount(duration)))

    def subtract_working_time(self, end: datetime, duration: timedelta) -> datetime:
        """The instant (aware, UTC) from which `duration` of working time remains until `end`.

        Exactly on an opening it stays there. Zero gives `previous_working_instant(end)`. ValueError if
        `duration` is negative. Source: platform calendar specification.
        """
        return instant_at(self._timeline.subtract(microseconds_of(end), _amount(duration)))

    def working_time_between(self, start: datetime, end: datetime) -> timedelta:
        """The working time from `start` to `end` in real time; ValueError if `end` is before `start`.

        Source: platform calendar specification.
        """
        return self._between(microseconds_of(start), microseconds_of(end)) * _MICROSECOND

    def add_working_days(self, start: datetime, days: int) -> datetime:
        """The same local wall-clock time (aware, UTC) on the `days`-th working day after `start`'s day.

        Counted from `next_working_instant(start)`, which is also the result for 0. The time is moved into
        that day's intervals: before the first opening, to that opening; inside a break, to the end of the
        break; after the last closing, to that closing. A working day is a local date with at least one
        interval that exists on it. ValueError if `days` is negative. Source: platform calendar specification.
        """
        if days < 0:
            raise ValueError(f"a number of working days cannot be negative: {days}")
        first = instant_at(self._timeline.following(microseconds_of(start)))
        if days == 0:
            return first
        local = first.astimezone(self.tz)
        day = self._timeline.working_day_after(local.toordinal(), days)
        reading = local.replace(tzinfo=None) - datetime.combine(local, time())
        wanted = position_of(midnight_of(day, self.tz) + reading)
        spans = self._timeline.spans_on(day)
        moved = next((max(wanted, opens) for opens, closes in spans if wanted <= closes), spans[-1][1])
        return instant_at(moved)

    def percent_of_window(self, start: datetime, end: datetime, fraction: Share) -> datetime:
        """The instant (aware, UTC) at which `fraction` (0 to 1) of the window's working time has passed.

        The product is exact for the value given and rounded once to the nearest microsecond, halves to even.
        ValueError if `fraction` is not in 0..1 or `end` is before `start`. Source: platform calendar
        specification.
        """
        begin = microseconds_of(start)
        window = self._between(begin, microseconds_of(end))
        return instant_at(self._timeline.add(begin, round(_exact(fraction) * window)))

    def explain(self, start: datetime, duration: timedelta) -> list[UsedInterval]:
        """The intervals that `add_working_time(start, duration)` uses, in order, and how much of each.

        An interval belongs to one local day, so round-the-clock work is listed day by day. The parts sum to
        `duration`; for zero the list is empty. ValueError if `duration` is negative. Source: platform
        calendar specification.
        """
        begin = microseconds_of(start)
        end = self._timeline.add(begin, _amount(duration))
        return [
            UsedInterval(*map(instant_at, (opens, closes, max(opens, begin), min(closes, end))))
            for opens, closes in self._timeline.spans(begin, end)
        ]

    def _between(self, begin: int, end: int) -> int:
        if end < begin:
            raise ValueError(f"the end {instant_at(end)} is before the start {instant_at(begin)}")
        return self._timeline.between(begin, end)


def _amount(duration: timedelta) -> int:
    amount = duration // _MICROSECOND
    if amount < 0:
        raise ValueError(f"a duration cannot be negative: {duration}")
    return amount


def _exact(fraction: Share) -> Fraction:
    try:
        share = Fraction(fraction)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"a fraction from 0 to 1 is required, not {fraction!r}") from error
    if not 0 <= share <= 1:
        raise ValueError(f"a fraction from 0 to 1 is required, not {fraction!r}")
    return share
