"""Published production calendars, loaded as overrides of a plain week, give the totals that they state.

The published files stay outside this repository: `PIN_CASES` names their folder. An invented calendar with the
same oddities always runs.
"""

import json
import os
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from bizcal import Calendar

ROOT = Path(__file__).parents[3]
FOLDER = (ROOT / os.environ.get("PIN_CASES", "../shared/cases") / "calendars").resolve()
published = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no production calendars at {FOLDER}: set PIN_CASES to the folder of cases"
)

NORMAL = [["09:00", "13:00"], ["14:00", "18:00"]]
SHORT = [["09:00", "13:00"], ["14:00", "17:00"]]
WEEK = dict.fromkeys("01234", NORMAL)
YEARS = ("2024", "2025", "2026", "2027")
HOUR = timedelta(hours=1)

Overrides = dict[str, list[list[str]]]


def overrides_from(year: dict[str, Any]) -> Overrides:
    """What differs from the plain week. A holiday on a weekend differs in nothing."""
    off: Overrides = {day: [] for day in year["non_working_weekdays"]}
    worked: Overrides = {day["date"]: NORMAL for day in year["working_weekends"]}
    return off | worked | dict.fromkeys(year["shortened_days"], SHORT)


def overrides_from_xml(path: Path) -> Overrides:
    """The same from the published form; `t="2"` on a Saturday is a working and shortened day."""
    tree = ET.parse(path).getroot()
    hours: dict[str | None, list[list[str]]] = {"1": [], "2": SHORT, "3": NORMAL}
    listed = {
        f"{tree.attrib['year']}-{day.attrib['d'].replace('.', '-')}": hours[day.get("t")] for day in tree.iter("day")
    }
    return {day: what for day, what in listed.items() if what or date.fromisoformat(day).weekday() < 5}


def calendar_with(overrides: Overrides) -> Calendar:
    return Calendar.from_config({"tz": "Europe/Moscow", "week": WEEK, "overrides": overrides})


def days_of(year: int) -> Iterator[date]:
    first = date(year, 1, 1)
    return (first + timedelta(days=day) for day in range((date(year + 1, 1, 1) - first).days))


def hours_on(calendar: Calendar, day: date) -> float:
    midnight = datetime(day.year, day.month, day.day, tzinfo=calendar.tz)
    return calendar.working_time_between(midnight, midnight + timedelta(days=1)) / HOUR


def totals(calendar: Calendar, days: list[date]) -> dict[str, float]:
    worked = [hours for hours in (hours_on(calendar, day) for day in days) if hours]
    return {"working_days": len(worked), "hours_40h_week": sum(worked)}


def assert_totals(year: str, stated: dict[str, Any]) -> None:
    calendar, days = calendar_with(overrides_from(stated)), list(days_of(int(year)))
    found = totals(calendar, days) | {"calendar_days": len(days)}
    assert found | {"days_off": len(days) - found["working_days"]} == stated["totals"]
    for month in stated["months"]:
        of_month = totals(calendar, [day for day in days if day.month == month["month"]])
        assert {"month": month["month"], **of_month} == month
    assert_working_days_are_counted(calendar, days)


def assert_working_days_are_counted(calendar: Calendar, days: list[date]) -> None:
    """`add_working_days` visits exactly the working days of the year, one after the other."""
    worked = [day for day in days if hours_on(calendar, day)]
    opening = datetime(worked[0].year, worked[0].month, worked[0].day, 9, tzinfo=calendar.tz)
    for count, day in enumerate(worked):
        assert calendar.add_working_days(opening, count).astimezone(calendar.tz).date() == day


def russian_years() -> dict[str, Any]:
    text = (FOLDER / "ru_production_calendar_2024_2027.json").read_text()
    years: dict[str, Any] = json.loads(text)["years"]
    return years


@published
@pytest.mark.parametrize("year", YEARS)
def test_published_totals_of_days_and_hours_are_met(year: str) -> None:
    assert_totals(year, russian_years()[year])


@published
def test_published_totals_are_those_of_their_summary() -> None:
    stated = [russian_years()[year]["totals"] for year in YEARS]
    assert [total["working_days"] for total in stated] == [248, 247, 247, 247]
    assert [total["hours_40h_week"] for total in stated] == [1979, 1972, 1972, 1972]
    assert [total["days_off"] for total in stated] == [118] * 4


@published
@pytest.mark.parametrize("year", YEARS)
def test_both_published_forms_agree(year: str) -> None:
    assert overrides_from_xml(FOLDER / f"ru_{year}_source.xml") == overrides_from(russian_years()[year])


@published
def test_four_published_years_fit_into_one_calendar() -> None:
    together = calendar_with(
        {day: hours for year in YEARS for day, hours in overrides_from(russian_years()[year]).items()}
    )
    begin, end = (datetime(year, 1, 1, tzinfo=together.tz) for year in (2024, 2028))
    assert together.working_time_between(begin, end) == (1979 + 3 * 1972) * HOUR
    friday = datetime(2027, 2, 19, 17, tzinfo=together.tz)  # Saturday is worked and short, Monday off
    assert together.add_working_time(friday, 8 * HOUR) == datetime(2027, 2, 20, 17, tzinfo=together.tz)
    assert together.add_working_days(friday, 2) == datetime(2027, 2, 24, 17, tzinfo=together.tz)


@published
def test_observed_holiday_of_the_next_year_is_off_in_this_one() -> None:
    text = (FOLDER / "us_federal_holidays_2024_2027.json").read_text()
    years = json.loads(text)["years"]
    listed = [day["date"] for year in years.values() for day in (year if isinstance(year, list) else year["holidays"])]
    newyork = Calendar.from_config({"tz": "America/New_York", "week": WEEK, "holidays": listed})
    assert hours_on(newyork, date(2027, 12, 31)) == 0
    thursday = datetime(2027, 12, 30, 18, tzinfo=newyork.tz)
    assert newyork.add_working_days(thursday, 1) == datetime(2028, 1, 3, 18, tzinfo=newyork.tz)


# Invented. 2030 has 261 weekdays. Off: 1 Jan (Tuesday), 30 Apr (Tuesday, for Saturday 2 November, months
# before it), 1 May (Wednesday), 16 Aug (Friday, for the holiday on Sunday 10 March). Worked: Saturday 2 November,
# shortened. 2 + 1 shortened days. So 261 - 4 + 1 = 258 days and 258 * 8 - 3 = 2061 hours.
INVENTED: dict[str, Any] = {
    "holidays": [
        {"date": "2030-01-01", "title": "first"},
        {"date": "2030-03-10", "title": "on a Sunday"},
        {"date": "2030-05-01", "title": "third"},
    ],
    "transferred_days_off": [
        {"off": "2030-04-30", "instead_of": "2030-11-02"},
        {"off": "2030-08-16", "instead_of": "2030-03-10"},
    ],
    "shortened_days": ["2030-04-29", "2030-12-31", "2030-11-02"],
    "working_weekends": [{"date": "2030-11-02", "weekday": "Saturday", "shortened": True}],
    "non_working_weekdays": ["2030-01-01", "2030-04-30", "2030-05-01", "2030-08-16"],
    "totals": {"calendar_days": 365, "working_days": 258, "days_off": 107, "hours_40h_week": 2061},
    "months": [
        {"month": 3, "working_days": 21, "hours_40h_week": 168},
        {"month": 4, "working_days": 21, "hours_40h_week": 167},
        {"month": 8, "working_days": 21, "hours_40h_week": 168},
        {"month": 11, "working_days": 22, "hours_40h_week": 175},
    ],
}
INVENTED_XML = """<calendar year="2030"><days>
  <day d="01.01" t="1" h="1"/> <day d="03.10" t="1" h="2"/> <day d="04.29" t="2"/>
  <day d="04.30" t="1" f="11.02"/> <day d="05.01" t="1" h="3"/> <day d="08.16" t="1" f="03.10"/>
  <day d="11.02" t="2"/> <day d="12.31" t="2"/>
</days></calendar>"""


def test_invented_totals_of_days_and_hours_are_met() -> None:
    assert_totals("2030", INVENTED)


def test_both_invented_forms_agree(tmp_path: Path) -> None:
    (tmp_path / "2030.xml").write_text(INVENTED_XML)
    assert overrides_from_xml(tmp_path / "2030.xml") == overrides_from(INVENTED)


def test_worked_saturday_may_be_short() -> None:
    calendar = calendar_with(overrides_from(INVENTED))
    friday = datetime(2030, 11, 1, 17, 30, tzinfo=calendar.tz)
    assert hours_on(calendar, date(2030, 11, 2)) == 7
    assert calendar.add_working_days(friday, 1) == datetime(2030, 11, 2, 17, tzinfo=calendar.tz)
    assert calendar.add_working_time(friday, 7.5 * HOUR) == datetime(2030, 11, 2, 17, tzinfo=calendar.tz)


def test_override_wins_over_a_holiday() -> None:
    config = {"week": WEEK, "holidays": ["2030-11-01", "2030-11-04"], "overrides": {"2030-11-01": SHORT}}
    calendar = Calendar.from_config(config)
    assert [hours_on(calendar, date(2030, 11, day)) for day in (1, 2, 3, 4, 5)] == [7, 0, 0, 0, 8]


def test_amended_calendar_moves_no_earlier_promise() -> None:
    overrides = overrides_from(INVENTED)
    first = calendar_with(overrides)
    asked_at = datetime(2030, 8, 15, 17, tzinfo=first.tz)
    promised = first.add_working_time(asked_at, 2 * HOUR)
    amended = calendar_with(overrides | {"2030-08-16": NORMAL})
    assert amended.add_working_time(asked_at, 2 * HOUR) < promised
    assert first.add_working_time(asked_at, 2 * HOUR) == promised
