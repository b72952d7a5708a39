"""Days on which the clock of a zone jumps: real seconds are counted, and wall-clock times follow the rule."""

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from bizcal_scenes import utc

from bizcal import Calendar

BERLIN = ZoneInfo("Europe/Berlin")
DAILY = "0123456"
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


def calendar(tz: str, hours: list[list[str]], days: str = DAILY, **more: Any) -> Calendar:
    return Calendar.from_config({"tz": tz, "week": dict.fromkeys(days, hours), **more})


def always(tz: str) -> Calendar:
    return calendar(tz, [["00:00", "24:00"]])


def worked_on(working: Calendar, year: int, month: int, day: int) -> timedelta:
    midnight = datetime(year, month, day, tzinfo=working.tz)
    return working.working_time_between(midnight, midnight + timedelta(days=1))


def test_night_without_the_skipped_hour_has_eleven_hours() -> None:
    evening, morning = datetime(2026, 3, 28, 21, tzinfo=BERLIN), datetime(2026, 3, 29, 9, tzinfo=BERLIN)
    assert morning - evening == 12 * HOUR  # same-zone subtraction compares wall clocks: the trap
    assert always("Europe/Berlin").working_time_between(evening, morning) == 11 * HOUR
    assert always("Europe/Berlin").add_working_time(evening, 11 * HOUR) == morning
    assert always("Europe/Berlin").subtract_working_time(morning, 11 * HOUR) == evening


def test_night_with_the_repeated_hour_has_thirteen_hours() -> None:
    evening, morning = datetime(2026, 10, 24, 21, tzinfo=BERLIN), datetime(2026, 10, 25, 9, tzinfo=BERLIN)
    assert always("Europe/Berlin").working_time_between(evening, morning) == 13 * HOUR
    assert always("Europe/Berlin").add_working_time(evening, 13 * HOUR) == morning


def test_both_occurrences_of_an_input_are_told_apart() -> None:
    first = datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN)
    assert always("Europe/Berlin").working_time_between(first, first.replace(fold=1)) == HOUR


@pytest.mark.parametrize(
    ("hours", "opens", "closes"),
    [
        (["02:30", "05:00"], utc(2026, 3, 29, 1, 30), utc(2026, 3, 29, 3)),
        (["01:00", "02:30"], utc(2026, 3, 29, 0), utc(2026, 3, 29, 1, 30)),
        (["02:00", "02:45"], utc(2026, 3, 29, 1), utc(2026, 3, 29, 1, 45)),
    ],
)
def test_skipped_time_moves_forward_by_the_gap(hours: list[str], opens: datetime, closes: datetime) -> None:
    sunday = calendar("Europe/Berlin", [hours], days="6")
    assert sunday.next_working_instant(utc(2026, 3, 28, 20)) == opens
    assert sunday.add_working_time(opens, closes - opens) == closes
    assert sunday.next_working_instant(closes + MINUTE) > utc(2026, 4, 4)


@pytest.mark.parametrize("hours", [["02:00", "03:00"], ["02:30", "03:30"], ["02:45", "03:15"]])
def test_interval_that_becomes_empty_or_reversed_is_absent_that_day(hours: list[str]) -> None:
    sunday = calendar("Europe/Berlin", [hours], days="6")
    assert sunday.next_working_instant(utc(2026, 3, 28)).date() == utc(2026, 4, 5).date()
    assert worked_on(sunday, 2026, 3, 29) == timedelta(0)


def test_day_whose_only_interval_is_absent_is_no_working_day() -> None:
    nights = calendar("Europe/Berlin", [["02:00", "03:00"]])
    friday = datetime(2026, 3, 27, 2, 20, tzinfo=BERLIN)
    assert nights.add_working_days(friday, 1) == datetime(2026, 3, 28, 2, 20, tzinfo=BERLIN)
    assert nights.add_working_days(friday, 2) == datetime(2026, 3, 30, 2, 20, tzinfo=BERLIN)


def test_touching_intervals_are_one_also_when_a_part_would_remain() -> None:
    parts = calendar("Europe/Berlin", [["02:00", "02:30"], ["02:30", "03:00"]])
    assert worked_on(parts, 2026, 3, 29) == timedelta(0)


def test_intervals_that_overlap_only_that_day_do_not_count_twice() -> None:
    pair = calendar("Europe/Berlin", [["02:00", "02:45"], ["03:00", "04:00"]])
    assert worked_on(pair, 2026, 3, 28) == 105 * MINUTE
    assert worked_on(pair, 2026, 3, 29) == HOUR
    assert pair.add_working_time(utc(2026, 3, 29, 1), HOUR) == utc(2026, 3, 29, 2)


def test_ambiguous_time_is_its_first_occurrence() -> None:
    opening = calendar("Europe/Berlin", [["02:30", "04:00"]])
    assert opening.next_working_instant(utc(2026, 10, 24, 20)) == utc(2026, 10, 25, 0, 30)
    assert worked_on(opening, 2026, 10, 25) == 150 * MINUTE
    closing = calendar("Europe/Berlin", [["01:00", "02:30"]])
    assert closing.previous_working_instant(utc(2026, 10, 25, 1, 30)) == utc(2026, 10, 25, 0, 30)
    assert worked_on(closing, 2026, 10, 25) == 90 * MINUTE


def test_working_days_land_on_the_moved_time() -> None:
    nights = calendar("Europe/Berlin", [["00:30", "05:00"]])
    assert nights.add_working_days(datetime(2026, 3, 28, 2, 30, tzinfo=BERLIN), 1) == utc(2026, 3, 29, 1, 30)
    assert nights.add_working_days(datetime(2026, 10, 24, 2, 30, tzinfo=BERLIN), 1) == utc(2026, 10, 25, 0, 30)
    second = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=BERLIN)
    assert nights.add_working_days(second, 1) == utc(2026, 10, 26, 1, 30)


def test_round_the_clock_calendar_loses_no_minute() -> None:
    for zone, hours in {"Europe/Berlin": 8760, "Asia/Kathmandu": 8760, "Africa/Casablanca": 8760}.items():
        year = always(zone).working_time_between(
            datetime(2026, 1, 1, tzinfo=ZoneInfo(zone)), datetime(2027, 1, 1, tzinfo=ZoneInfo(zone))
        )
        assert year == hours * HOUR


def test_half_hour_change_is_counted() -> None:
    assert worked_on(always("Australia/Lord_Howe"), 2026, 10, 4) == 23.5 * HOUR
    assert worked_on(always("Australia/Lord_Howe"), 2026, 4, 5) == 24.5 * HOUR


def test_midnight_that_is_skipped_loses_nothing() -> None:
    sao_paulo = always("America/Sao_Paulo")
    assert worked_on(sao_paulo, 2018, 11, 3) == 24 * HOUR
    assert worked_on(sao_paulo, 2018, 11, 4) == 23 * HOUR
    early = calendar("America/Sao_Paulo", [["00:00", "01:00"]], days="6")
    assert early.next_working_instant(utc(2018, 11, 3)) > utc(2018, 11, 10)


def test_hour_before_midnight_that_is_repeated_belongs_to_its_day() -> None:
    late = calendar("America/Sao_Paulo", [["23:00", "24:00"]], days="5")
    assert late.next_working_instant(utc(2018, 2, 17)) == utc(2018, 2, 18, 1)
    assert late.working_time_between(utc(2018, 2, 17), utc(2018, 2, 19)) == 2 * HOUR


def test_gap_across_midnight_does_not_count_twice() -> None:
    """At 23:30 of 1981-12-31 the clock went to 00:00, so 23:40 moves into the hours of the new year."""
    singapore = calendar("Asia/Singapore", [["00:00", "12:00"], ["23:40", "23:50"]])
    new_year = utc(1981, 12, 31, 16)
    assert singapore.working_time_between(new_year - 8 * HOUR, new_year + 15 * HOUR) == 12 * HOUR
    assert singapore.add_working_time(new_year - 8 * HOUR, 12 * HOUR) == new_year + 12 * HOUR
    assert [part.used for part in singapore.explain(new_year - 8 * HOUR, 12 * HOUR)] == [12 * HOUR]


def test_time_moved_across_midnight_stays_when_the_next_day_is_off() -> None:
    pyongyang = calendar("Asia/Pyongyang", [["23:40", "23:50"]], days="4")
    assert pyongyang.next_working_instant(utc(2018, 5, 4)) == utc(2018, 5, 4, 15, 10)


def test_date_that_a_zone_skipped_has_no_working_time_and_is_no_working_day() -> None:
    apia = calendar("Pacific/Apia", [["09:00", "17:00"]], days="01234")
    thursday = datetime(2011, 12, 29, 16, tzinfo=ZoneInfo("Pacific/Apia"))
    monday = datetime(2012, 1, 2, 16, tzinfo=ZoneInfo("Pacific/Apia"))
    assert not apia.is_working(datetime(2011, 12, 31, 10, tzinfo=ZoneInfo("Pacific/Apia")))
    assert apia.add_working_days(thursday, 1) == monday
    assert apia.add_working_time(thursday, 2 * HOUR) == monday - 6 * HOUR


def test_holiday_is_a_local_date() -> None:
    kathmandu = calendar("Asia/Kathmandu", [["00:00", "24:00"]], holidays=["2026-10-20"])
    assert kathmandu.previous_working_instant(utc(2026, 10, 20, 12)) == utc(2026, 10, 19, 18, 15)
    assert kathmandu.next_working_instant(utc(2026, 10, 20, 12)) == utc(2026, 10, 20, 18, 15)
