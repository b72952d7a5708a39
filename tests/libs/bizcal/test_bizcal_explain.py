"""`explain` shows a person where a due instant comes from."""

from datetime import timedelta

from bizcal_scenes import utc

from bizcal import Calendar, UsedInterval

HOUR = timedelta(hours=1)
LUNCH = Calendar.from_config(
    {"week": {key: [["09:00", "13:00"], ["14:00", "18:00"]] for key in "01234"}, "holidays": ["2026-12-07"]}
)


def test_parts_name_the_interval_and_what_is_used_of_it() -> None:
    assert LUNCH.explain(utc(2026, 12, 4, 12, 30), 5 * HOUR) == [
        UsedInterval(utc(2026, 12, 4, 9), utc(2026, 12, 4, 13), utc(2026, 12, 4, 12, 30), utc(2026, 12, 4, 13)),
        UsedInterval(utc(2026, 12, 4, 14), utc(2026, 12, 4, 18), utc(2026, 12, 4, 14), utc(2026, 12, 4, 18)),
        UsedInterval(utc(2026, 12, 8, 9), utc(2026, 12, 8, 13), utc(2026, 12, 8, 9), utc(2026, 12, 8, 9, 30)),
    ]


def test_part_tells_how_much_is_used() -> None:
    parts = LUNCH.explain(utc(2026, 12, 4, 12, 30), 5 * HOUR)
    assert [part.used for part in parts] == [0.5 * HOUR, 4 * HOUR, 0.5 * HOUR]


def test_duration_that_ends_on_a_closing_does_not_name_the_next_interval() -> None:
    assert len(LUNCH.explain(utc(2026, 12, 4, 9), 4 * HOUR)) == 1


def test_start_on_a_closing_does_not_name_the_interval_that_ends_there() -> None:
    assert [part.opens_at for part in LUNCH.explain(utc(2026, 12, 4, 13), HOUR)] == [utc(2026, 12, 4, 14)]


def test_nothing_is_used_for_no_duration() -> None:
    for at in (utc(2026, 12, 4, 10), utc(2026, 12, 4, 13), utc(2026, 12, 5, 10)):
        assert LUNCH.explain(at, timedelta(0)) == []


def test_round_the_clock_work_is_listed_day_by_day() -> None:
    always = Calendar.from_config({"tz": "Europe/Berlin", "week": {key: [["00:00", "24:00"]] for key in "0123456"}})
    parts = always.explain(utc(2026, 3, 28, 20), 48 * HOUR)
    assert [part.used for part in parts] == [3 * HOUR, 23 * HOUR, 22 * HOUR]


def test_years_of_parts_are_listed_without_repetition() -> None:
    always = Calendar.from_config({"tz": "Asia/Kathmandu", "week": {key: [["00:00", "24:00"]] for key in "0123456"}})
    parts = always.explain(utc(2024, 1, 1), timedelta(days=1500))
    assert len(parts) == 1501
    assert sum((part.used for part in parts), timedelta(0)) == timedelta(days=1500)
