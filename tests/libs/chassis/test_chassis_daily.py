"""A time of day as a schedule: once a day, whatever the clocks of its zone do."""

from datetime import UTC, datetime, time
from zoneinfo import ZoneInfo

import pytest

from chassis.jobs import DailyAt

BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("at", "instant", "expected"),
    [
        (time(3), datetime(2026, 11, 30, 1, 59, tzinfo=UTC), datetime(2026, 11, 30, 2, 0, tzinfo=UTC)),
        (time(3), datetime(2026, 11, 30, 2, 0, tzinfo=UTC), datetime(2026, 12, 1, 2, 0, tzinfo=UTC)),
        (time(3), datetime(2026, 7, 1, 0, 59, tzinfo=UTC), datetime(2026, 7, 1, 1, 0, tzinfo=UTC)),
        (time(2, 30), datetime(2026, 3, 28, 12, 0, tzinfo=UTC), datetime(2026, 3, 29, 1, 30, tzinfo=UTC)),
    ],
    ids=["before the tick", "on the tick", "summer time", "a time that the clock skips"],
)
def test_next_tick_is_the_first_one_after_the_instant(at: time, instant: datetime, expected: datetime) -> None:
    assert DailyAt(at, BERLIN).next_after(instant) == expected


@pytest.mark.parametrize("at", [time(2, 30), time(3)], ids=["a skipped and a repeated time", "a plain time"])
def test_there_is_one_tick_a_day_over_a_year_with_clock_changes(at: time) -> None:
    schedule, instant = DailyAt(at, BERLIN), datetime(2026, 1, 1, tzinfo=UTC)
    days = []
    while (instant := schedule.next_after(instant)) < datetime(2027, 1, 1, tzinfo=UTC):
        days.append(instant.astimezone(BERLIN).date())
    assert len(days) == len(set(days)) == 365
