"""The configuration of a calendar, read once.

Invariant: working hours that pass here can be computed with, and every refusal names the day (or key) it is
about.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final, TypeAlias
from zoneinfo import ZoneInfo

DayHours: TypeAlias = tuple[tuple[timedelta, timedelta], ...]
"""Intervals of one local day as wall-clock readings after midnight: sorted, disjoint, not touching."""

_KEYS: Final = ("tz", "week", "holidays", "overrides")
_WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DEFAULT_ZONE: Final = "UTC"
_DEFAULT_WEEK: Final = {str(weekday): [["10:00", "18:00"]] for weekday in range(5)}
_MIDNIGHT: Final = timedelta(days=1)
_TIME: Final = re.compile(r"([0-9]{2}):([0-9]{2})")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True, slots=True)
class WorkingHours:
    """What one calendar's configuration says, per local day.

    `week` has seven entries from Monday on; `special` replaces the week's entry on single days, keyed by
    `date.toordinal()`. Source: platform calendar specification.
    """

    tz: ZoneInfo
    week: tuple[DayHours, ...]
    special: Mapping[int, DayHours]

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> "WorkingHours":
        """Read a mapping of the shape described at `Calendar.from_config`; ValueError names what is wrong."""
        given = _mapping(config, "calendar")
        for key in given:
            _require(key in _KEYS, f"calendar: unknown key {key!r}, known are {', '.join(_KEYS)}")
        week = _week(given.get("week", _DEFAULT_WEEK))
        # Overrides come last: they win over holidays.
        special = _holidays(given.get("holidays", [])) | _overrides(given.get("overrides", {}))
        _require(any(week) or any(special.values()), "week: no day has a working interval, no override has")
        return cls(_zone(given.get("tz", _DEFAULT_ZONE)), week, special)

    def on(self, ordinal: int) -> DayHours:
        """The intervals of the local day `ordinal` (`date.toordinal()`), empty on a day off."""
        special = self.special.get(ordinal)
        return self.week[(ordinal - 1) % 7] if special is None else special


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


def _mapping(given: object, where: str) -> Mapping[object, object]:
    if isinstance(given, Mapping):
        return given
    raise ValueError(f"{where}: a mapping is required, not {given!r}")


def _sequence(given: object, where: str) -> list[object]:
    if isinstance(given, list | tuple):
        return list(given)
    raise ValueError(f"{where}: a list is required, not {given!r}")


def _zone(name: object) -> ZoneInfo:
    if not isinstance(name, str) or not name:
        raise ValueError(f"tz: the name of a time zone is required, not {name!r}")
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError) as error:
        raise ValueError(f"tz: unknown time zone {name!r}") from error


def _week(given: object) -> tuple[DayHours, ...]:
    week = _mapping(given, "week")
    keys = [str(weekday) for weekday in range(7)]
    for key in week:
        _require(key in keys, f'week: unknown day {key!r}, days are "0" (Monday) to "6" (Sunday)')
    return tuple(_day_hours(week.get(key, []), f"week {key} ({_WEEKDAYS[int(key)]})") for key in keys)


def _holidays(given: object) -> dict[int, DayHours]:
    return {_ordinal(day, "holidays"): () for day in _sequence(given, "holidays")}


def _overrides(given: object) -> dict[int, DayHours]:
    days = _mapping(given, "overrides")
    return {_ordinal(day, "overrides"): _day_hours(hours, f"overrides {day}") for day, hours in days.items()}


def _ordinal(given: object, where: str) -> int:
    if not isinstance(given, str) or not _DATE.fullmatch(given):
        raise ValueError(f"{where}: a date as YYYY-MM-DD is required, not {given!r}")
    try:
        return date.fromisoformat(given).toordinal()
    except ValueError as error:
        raise ValueError(f"{where}: {given!r} is not a date") from error


def _day_hours(given: object, where: str) -> DayHours:
    """The day's intervals with touching ones joined; order in the configuration doesn't matter."""
    hours: list[tuple[timedelta, timedelta]] = []
    for opening, closing in sorted(_interval(pair, where) for pair in _sequence(given, where)):
        if hours and opening < hours[-1][1]:
            raise ValueError(f"{where}: intervals overlap at {str(opening)[:-3]}")
        if hours and opening == hours[-1][1]:
            hours[-1] = (hours[-1][0], closing)
        else:
            hours.append((opening, closing))
    return tuple(hours)


def _interval(given: object, where: str) -> tuple[timedelta, timedelta]:
    pair = _sequence(given, where)
    _require(len(pair) == 2, f"{where}: an interval is [opening, closing], not {given!r}")
    opening, closing = (_reading(clock, where) for clock in pair)
    _require(opening < closing, f"{where}: the interval {pair[0]}-{pair[1]} closes no later than it opens")
    return opening, closing


def _reading(given: object, where: str) -> timedelta:
    match = _TIME.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ValueError(f'{where}: a time as "HH:MM" is required, not {given!r}')
    hour, minute = int(match[1]), int(match[2])
    reading = timedelta(hours=hour, minutes=minute)
    _require(minute < 60 and reading <= _MIDNIGHT, f"{where}: {given!r} is not a time of day")
    return reading
