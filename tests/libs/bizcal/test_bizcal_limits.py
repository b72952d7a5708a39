"""Searches end, far years are answered or refused in words, and the cost stays bounded."""

import copy
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta, timezone
from timeit import Timer
from zoneinfo import ZoneInfo

import pytest
from bizcal_scenes import utc

from bizcal import Calendar, NoWorkingTime

HOUR = timedelta(hours=1)
ALWAYS = {str(day): [["00:00", "24:00"]] for day in range(7)}
ONE_DAY = {"week": {}, "overrides": {"2026-11-30": [["10:00", "18:00"]]}}
OPENS, CLOSES = utc(2026, 11, 30, 10), utc(2026, 11, 30, 18)


def test_search_forward_ends_after_five_years() -> None:
    lone = Calendar.from_config(ONE_DAY)
    assert lone.next_working_instant(utc(2021, 12, 1)) == OPENS
    with pytest.raises(NoWorkingTime, match="after 2021-11-01"):
        lone.next_working_instant(utc(2021, 11, 1))
    with pytest.raises(NoWorkingTime) as raised:
        lone.next_working_instant(CLOSES + HOUR)
    assert (raised.value.instant, raised.value.direction) == (CLOSES + HOUR, "after")


def test_search_backward_ends_after_five_years() -> None:
    lone = Calendar.from_config(ONE_DAY)
    assert lone.previous_working_instant(utc(2031, 11, 29)) == CLOSES
    with pytest.raises(NoWorkingTime, match="before 2032-01-01"):
        lone.previous_working_instant(utc(2032, 1, 1))
    with pytest.raises(NoWorkingTime):
        lone.previous_working_instant(OPENS - HOUR)


def test_limit_of_the_search_is_exact() -> None:
    lone = Calendar.from_config(ONE_DAY)
    limit, microsecond = timedelta(days=1827), timedelta(microseconds=1)
    assert lone.next_working_instant(OPENS - limit) == OPENS
    assert lone.previous_working_instant(CLOSES + limit) == CLOSES
    for call, at in (
        (lone.next_working_instant, OPENS - limit - microsecond),
        (lone.previous_working_instant, CLOSES + limit + microsecond),
    ):
        with pytest.raises(NoWorkingTime):
            call(at)


def test_limit_of_the_search_for_days_is_exact() -> None:
    def lone_pair(days: int) -> Calendar:
        dates = (date(2026, 11, 30), date(2026, 11, 30) + timedelta(days=days))
        return Calendar.from_config({"week": {}, "overrides": {str(day): [["10:00", "18:00"]] for day in dates}})

    assert lone_pair(1827).add_working_days(OPENS, 1) == OPENS + timedelta(days=1827)
    with pytest.raises(NoWorkingTime, match="after 2026-11-30T00:00:00"):
        lone_pair(1828).add_working_days(OPENS, 1)


def test_sums_that_run_out_of_working_time_are_a_typed_error() -> None:
    lone = Calendar.from_config(ONE_DAY)
    assert lone.add_working_time(utc(2026, 1, 1), 8 * HOUR) == CLOSES
    assert lone.subtract_working_time(utc(2027, 1, 1), 8 * HOUR) == OPENS
    assert lone.add_working_days(utc(2026, 1, 1), 0) == OPENS
    assert lone.working_time_between(utc(1990, 1, 1), utc(2090, 1, 1)) == 8 * HOUR
    for call in (
        lambda: lone.add_working_time(utc(2026, 1, 1), 8 * HOUR + timedelta(microseconds=1)),
        lambda: lone.subtract_working_time(utc(2027, 1, 1), 8 * HOUR + timedelta(microseconds=1)),
        lambda: lone.add_working_days(utc(2026, 1, 1), 1),
        lambda: lone.explain(utc(2026, 1, 1), 9 * HOUR),
    ):
        with pytest.raises(NoWorkingTime):
            call()


def test_gap_of_less_than_five_years_is_crossed() -> None:
    far = {"week": {}, "overrides": {"2026-11-30": [["10:00", "18:00"]], "2031-11-28": [["10:00", "18:00"]]}}
    calendar = Calendar.from_config(far)
    assert calendar.add_working_time(OPENS, 9 * HOUR) == utc(2031, 11, 28, 11)
    assert calendar.subtract_working_time(utc(2031, 11, 28, 11), 9 * HOUR) == OPENS
    assert calendar.add_working_days(OPENS + HOUR, 1) == utc(2031, 11, 28, 11)
    assert len(calendar.explain(OPENS, 9 * HOUR)) == 2


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles", "Europe/Berlin"])
@pytest.mark.parametrize(
    "at", [utc(2, 1, 1), utc(2, 1, 1, 23), utc(1583, 10, 15), utc(5000, 2, 28), utc(9998, 12, 31, 23)]
)
def test_far_years_are_answered(zone: str, at: datetime) -> None:
    calendar = Calendar.from_config({"tz": zone, "week": ALWAYS})
    assert calendar.is_working(at)
    assert calendar.next_working_instant(at.astimezone(ZoneInfo(zone))) == at
    assert calendar.previous_working_instant(at) == at
    if 2 < at.year < 9998:
        assert calendar.subtract_working_time(calendar.add_working_time(at, 30 * HOUR), 30 * HOUR) == at
        assert calendar.add_working_days(at, 3).astimezone(calendar.tz).time() == at.astimezone(calendar.tz).time()


@pytest.mark.parametrize(
    "at",
    [
        datetime.min.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
        datetime.min.replace(tzinfo=ZoneInfo("Pacific/Kiritimati")),
        datetime.max.replace(tzinfo=ZoneInfo("America/Los_Angeles")),
        utc(1, 12, 31, 23),
        utc(9999, 1, 1),
    ],
)
def test_instants_at_the_ends_of_time_are_refused_in_words(at: datetime) -> None:
    calendar = Calendar.default()
    for call in (
        calendar.is_working,
        calendar.next_working_instant,
        calendar.previous_working_instant,
        lambda moment: calendar.add_working_time(moment, HOUR),
        lambda moment: calendar.subtract_working_time(moment, HOUR),
        lambda moment: calendar.add_working_days(moment, 1),
        lambda moment: calendar.explain(moment, HOUR),
    ):
        with pytest.raises(ValueError, match="outside the years 2 to 9998"):
            call(at)


@pytest.mark.parametrize(
    "call",
    [
        lambda calendar: calendar.add_working_time(OPENS, timedelta.max),
        lambda calendar: calendar.subtract_working_time(OPENS, timedelta.max),
        lambda calendar: calendar.explain(OPENS, timedelta.max),
        lambda calendar: calendar.add_working_days(OPENS, 10**9),
        lambda calendar: calendar.add_working_time(utc(9998, 12, 31, 17), 3000 * HOUR),
        lambda calendar: calendar.subtract_working_time(utc(2, 1, 2), 3000 * HOUR),
        lambda calendar: calendar.add_working_days(utc(9998, 12, 30), 400),
    ],
)
def test_sums_beyond_the_ends_of_time_are_a_typed_error(call: Callable[[Calendar], object]) -> None:
    with pytest.raises(NoWorkingTime):
        call(Calendar.default())


def test_hopeless_sum_is_refused_without_walking_to_the_end_of_time() -> None:
    calendar = Calendar.default()
    calls: tuple[Callable[[], datetime], ...] = (
        lambda: calendar.add_working_time(OPENS, timedelta.max),
        lambda: calendar.subtract_working_time(OPENS, timedelta.max),
        lambda: calendar.add_working_days(OPENS, 10**9),
    )
    for call in calls:
        with pytest.raises(NoWorkingTime):
            call()
        assert len(calendar._timeline._blocks) == 1


def test_closing_at_midnight_is_its_own_on_every_date() -> None:
    """Ten years of them, whatever borders the library has inside."""
    calendar = Calendar.from_config({"week": {day: [["20:00", "24:00"]] for day in "0246"}})
    for midnight in (utc(2020, 1, 1) + timedelta(days=day) for day in range(3653)):
        assert calendar.next_working_instant(midnight) == (
            midnight if calendar.is_working(midnight - HOUR) else midnight + 20 * HOUR
        )
        assert calendar.previous_working_instant(midnight + HOUR) == (
            midnight if calendar.is_working(midnight - HOUR) else midnight - 24 * HOUR
        )


def test_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(NoWorkingTime(OPENS, "after")))
    assert str(error) == "no working time within five years after 2026-11-30T10:00:00+00:00"


def test_copy_of_a_calendar_calculates_the_same() -> None:
    calendar = Calendar.from_config({"tz": "Europe/Berlin"})
    expected = calendar.add_working_time(OPENS, 50 * HOUR)
    for other in (copy.deepcopy(calendar), pickle.loads(pickle.dumps(calendar))):
        assert other.add_working_time(OPENS, 50 * HOUR) == expected
    assert repr(calendar) == "<Calendar Europe/Berlin>"


def test_memory_does_not_grow_with_the_years_touched() -> None:
    """The pickle of a calendar holds all that it keeps, so its size stands for memory."""
    calendar = Calendar.from_config({"tz": "Europe/Berlin"})
    sizes = []
    for century in (1800, 1900, 2000, 2100):
        for year in range(century, century + 100):
            calendar.is_working(utc(year, 6, 1))
        sizes.append(len(pickle.dumps(calendar)))
    assert max(sizes) < 1_000_000


def test_concurrent_readers_get_the_same_results() -> None:
    moments = [utc(1950, 1, 1) + timedelta(days=311 * step) for step in range(80)]
    alone = Calendar.from_config({"tz": "Europe/Berlin"})
    expected = [alone.add_working_time(at, 30 * HOUR) for at in moments]
    shared = Calendar.from_config({"tz": "Europe/Berlin"})
    with ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(lambda: [shared.add_working_time(at, 30 * HOUR) for at in moments]) for _ in range(8)]
        assert [run.result() for run in runs] == [expected] * 8


@pytest.mark.skipif(
    sys.gettrace() is not None or sys.getprofile() is not None,
    reason="a tracer slows Python code alone, and not the C code that it is compared with",
)
def test_addition_costs_at_most_ten_zone_conversions() -> None:
    calendar, zone = Calendar.from_config({"tz": "Europe/Moscow"}), ZoneInfo("Europe/Moscow")
    for duration in (4 * HOUR, 1000 * HOUR):
        # Many short rounds: the fastest of each is free of what else the machine does.
        addition = Timer(lambda: calendar.add_working_time(OPENS, duration)).repeat(150, 200)  # noqa: B023
        conversion = Timer(lambda: OPENS.astimezone(zone)).repeat(150, 200)
        assert min(addition) < 10 * min(conversion)
