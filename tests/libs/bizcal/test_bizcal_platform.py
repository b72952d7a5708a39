"""The default calendar is the platform's: UTC, Monday to Friday, 10:00 to 18:00, holidays not counted."""

import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from bizcal import Calendar

ROOT = Path(__file__).parents[3]
PLATFORM = Calendar.default()
HOURS = timedelta(hours=1)


def at(text: str) -> datetime:
    return datetime.fromisoformat(f"{text}+00:00")


def noon(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, 12, tzinfo=UTC)


@pytest.mark.req("OPS-105")
def test_platform_calendar_is_the_default_configuration() -> None:
    config = json.loads((Path(__file__).parent / "calendar.json").read_text())["calendars"]["platform"]
    for calendar in (Calendar.from_config(config), Calendar.from_config({})):
        for hour in range(24 * 14):
            moment = at("2026-11-30T00:00:00") + hour * HOURS
            assert calendar.is_working(moment) == PLATFORM.is_working(moment)
            assert calendar.add_working_time(moment, 20 * HOURS) == PLATFORM.add_working_time(moment, 20 * HOURS)


@pytest.mark.req("OPS-105")
def test_platform_calendar_is_changed_by_configuration_alone() -> None:
    changed = Calendar.from_config({"tz": "Europe/Moscow", "overrides": {"2026-12-05": [["10:00", "12:00"]]}})
    assert changed.is_working(at("2026-12-05T07:30:00"))
    assert not PLATFORM.is_working(at("2026-12-05T07:30:00"))
    assert changed.is_working(at("2026-12-04T07:00:00"))


@pytest.mark.req("OPS-106")
def test_platform_zone_is_utc() -> None:
    assert PLATFORM.tz == ZoneInfo("UTC")
    assert PLATFORM.next_working_instant(at("2026-07-01T00:00:00")) == at("2026-07-01T10:00:00")
    assert PLATFORM.next_working_instant(at("2026-12-01T00:00:00")) == at("2026-12-01T10:00:00")


@pytest.mark.req("OPS-107")
def test_platform_works_from_ten_to_eighteen() -> None:
    working = [hour for hour in range(24) if PLATFORM.is_working(at("2026-11-30T00:00:00") + hour * HOURS)]
    assert working == [10, 11, 12, 13, 14, 15, 16, 17]
    assert PLATFORM.is_working(at("2026-11-30T17:59:59.999999"))
    assert not PLATFORM.is_working(at("2026-11-30T09:59:59.999999"))


@pytest.mark.req("OPS-108")
def test_platform_works_from_monday_to_friday() -> None:
    monday = date(2026, 11, 30)
    week = [monday + timedelta(days=day) for day in range(7)]
    assert [PLATFORM.is_working(noon(day)) for day in week] == [True] * 5 + [False] * 2


@pytest.mark.req("OPS-109")
def test_holidays_are_not_counted_and_that_is_marked_as_a_simplification() -> None:
    for holiday in (date(2026, 1, 1), date(2026, 5, 1), date(2026, 12, 25)):
        assert PLATFORM.is_working(noon(holiday))
    assert "simplification" in (Calendar.default.__doc__ or "")
    assert "simplification" in (ROOT / "libs/bizcal/README.md").read_text()


@pytest.mark.req("OPS-110")
def test_due_instant_of_a_working_quantity_comes_from_the_calendar() -> None:
    opened_at = at("2026-12-04T17:30:00")
    assert PLATFORM.add_working_time(opened_at, 4 * HOURS) == at("2026-12-07T13:30:00")
    assert PLATFORM.add_working_days(opened_at, 5) == at("2026-12-11T17:30:00")


@pytest.mark.req("OPS-111")
def test_calendar_quantity_is_plain_addition_to_any_result() -> None:
    """Results are in UTC, so `+ timedelta` is real time also where the clocks of the calendar change."""
    berlin = Calendar.from_config({"tz": "Europe/Berlin", "week": {"5": [["09:00", "21:00"]]}})
    closing = berlin.next_working_instant(datetime(2026, 3, 28, 21, tzinfo=ZoneInfo("Europe/Berlin")))
    assert closing + 12 * HOURS == at("2026-03-29T08:00:00")
    assert (closing + 12 * HOURS).astimezone(berlin.tz).hour == 10


@pytest.mark.req("OPS-112")
def test_four_working_hours_skip_the_night_and_the_weekend() -> None:
    assert PLATFORM.add_working_time(at("2026-12-04T10:00:00"), 4 * HOURS) == at("2026-12-04T14:00:00")
    assert PLATFORM.add_working_time(at("2026-12-04T15:00:00"), 4 * HOURS) == at("2026-12-07T11:00:00")
    assert PLATFORM.add_working_time(at("2026-12-05T03:00:00"), 4 * HOURS) == at("2026-12-07T14:00:00")


@pytest.mark.req("OPS-112")
def test_five_working_days_from_monday_are_next_monday() -> None:
    assert PLATFORM.add_working_days(at("2026-11-30T11:20:30.000001"), 5) == at("2026-12-07T11:20:30.000001")


@pytest.mark.req("OPS-112")
def test_five_working_days_from_saturday_count_from_the_coming_monday() -> None:
    assert PLATFORM.add_working_days(at("2026-12-05T12:00:00"), 5) == at("2026-12-14T10:00:00")


def test_closing_time_stays_on_the_closing() -> None:
    assert PLATFORM.add_working_time(at("2026-11-30T14:00:00"), 4 * HOURS) == at("2026-11-30T18:00:00")
    assert PLATFORM.next_working_instant(at("2026-11-30T18:00:00")) == at("2026-11-30T18:00:00")
    assert PLATFORM.next_working_instant(at("2026-11-30T18:00:00.000001")) == at("2026-12-01T10:00:00")


def test_opening_time_stays_on_the_opening() -> None:
    assert PLATFORM.subtract_working_time(at("2026-12-01T14:00:00"), 4 * HOURS) == at("2026-12-01T10:00:00")
    assert PLATFORM.previous_working_instant(at("2026-12-01T10:00:00")) == at("2026-12-01T10:00:00")
    assert PLATFORM.previous_working_instant(at("2026-12-01T09:59:59.999999")) == at("2026-11-30T18:00:00")


def test_inputs_of_any_zone_give_results_in_utc() -> None:
    tokyo = datetime(2026, 11, 30, 23, tzinfo=ZoneInfo("Asia/Tokyo"))
    for result in (
        PLATFORM.next_working_instant(tokyo),
        PLATFORM.previous_working_instant(tokyo),
        PLATFORM.add_working_time(tokyo, HOURS),
        PLATFORM.subtract_working_time(tokyo, HOURS),
        PLATFORM.add_working_days(tokyo, 1),
        PLATFORM.percent_of_window(tokyo, tokyo + 48 * HOURS, 0.5),
    ):
        assert result.tzinfo is UTC
    assert PLATFORM.add_working_time(tokyo, HOURS) == at("2026-11-30T15:00:00")
