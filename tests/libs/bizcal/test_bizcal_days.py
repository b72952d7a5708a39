"""Working days keep the local wall-clock time and move it into the hours of the day they reach."""

from datetime import datetime, timedelta

import pytest
from bizcal_scenes import utc

from bizcal import Calendar

LUNCH = Calendar.from_config(
    {
        "week": {day: [["09:00", "13:00"], ["14:00", "18:00"]] for day in "01234"},
        "overrides": {"2026-12-02": [["11:00", "12:00"], ["15:00", "16:00"]], "2026-12-05": [["10:00", "11:00"]]},
    }
)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((10, 59), (11, 0)),  # before the first opening: the opening
        ((11, 0), (11, 0)),
        ((11, 59), (11, 59)),
        ((12, 0), (12, 0)),  # a closing counts as its own
        ((12, 1), (15, 0)),  # inside the break: the end of the break
        ((14, 30), (15, 0)),
        ((15, 30), (15, 30)),
        ((16, 0), (16, 0)),
        ((16, 1), (16, 0)),  # after the last closing: that closing
        ((18, 0), (16, 0)),
    ],
)
def test_time_is_moved_into_the_hours_of_the_day(asked: tuple[int, int], given: tuple[int, int]) -> None:
    assert LUNCH.add_working_days(utc(2026, 12, 1, *asked), 1) == utc(2026, 12, 2, *given)


def test_closing_of_the_morning_stays_on_it() -> None:
    assert LUNCH.add_working_days(utc(2026, 11, 30, 13), 1) == utc(2026, 12, 1, 13)


def test_start_inside_a_break_counts_from_its_end() -> None:
    assert LUNCH.add_working_days(utc(2026, 11, 30, 13, 20), 1) == utc(2026, 12, 1, 14)


def test_seconds_and_microseconds_are_kept() -> None:
    assert LUNCH.add_working_days(utc(2026, 11, 30, 9, 0, 1, 2), 1) == utc(2026, 12, 1, 9, 0, 1, 2)


def test_worked_saturday_is_a_working_day() -> None:
    assert LUNCH.add_working_days(utc(2026, 12, 4, 17), 1) == utc(2026, 12, 5, 11)
    assert LUNCH.add_working_days(utc(2026, 12, 4, 17), 2) == utc(2026, 12, 7, 17)


def test_no_days_give_the_next_working_instant() -> None:
    assert LUNCH.add_working_days(utc(2026, 11, 30, 13, 20), 0) == utc(2026, 11, 30, 14)
    assert LUNCH.add_working_days(utc(2026, 11, 30, 13), 0) == utc(2026, 11, 30, 13)


def test_day_is_the_local_date() -> None:
    auckland = Calendar.from_config({"tz": "Pacific/Auckland", "week": {day: [["08:00", "17:00"]] for day in "01234"}})
    friday = datetime(2026, 12, 4, 9, tzinfo=auckland.tz)  # still Thursday in UTC
    assert auckland.add_working_days(friday, 1) == friday + timedelta(days=3)


def test_closing_at_midnight_has_the_next_date() -> None:
    late = Calendar.from_config({"week": {day: [["10:00", "24:00"]] for day in "01234"}})
    assert late.add_working_days(utc(2026, 12, 4, 23, 59), 1) == utc(2026, 12, 7, 23, 59)
    assert late.add_working_days(utc(2026, 12, 5), 1) == utc(2026, 12, 7, 10)
