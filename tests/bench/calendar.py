"""The calendar against one conversion between zones by the standard library."""

import statistics
from datetime import UTC, datetime, timedelta
from timeit import repeat
from zoneinfo import ZoneInfo

from bizcal import Calendar
from tests.bench.report import Figure


def against_astimezone() -> list[Figure]:
    """Compare one `add_working_time` with one `datetime.astimezone`, both warm."""
    calendar = Calendar.from_config(
        {
            "tz": "Europe/Moscow",
            "week": {key: [["09:00", "13:00"], ["14:00", "18:00"]] for key in "01234"},
            "holidays": ["2026-12-31"],
        }
    )
    zone = ZoneInfo("Europe/Moscow")
    starts = [datetime(2026, 11, 30, 7, tzinfo=UTC) + timedelta(hours=7 * n) for n in range(500)]
    duration = timedelta(hours=60)
    adds = repeat(lambda: [calendar.add_working_time(start, duration) for start in starts], number=5, repeat=9)
    conversions = repeat(lambda: [start.astimezone(zone) for start in starts], number=5, repeat=9)
    mine, base = (statistics.median(seconds) / 2500 * 1e6 for seconds in (adds, conversions))
    return [
        Figure(
            "calendar, one add_working_time against one datetime.astimezone",
            ratio=mine / base,
            bar=10.0,
            lower_is_better=True,
            detail=f"{mine:.2f} µs against {base:.2f} µs",
        )
    ]
