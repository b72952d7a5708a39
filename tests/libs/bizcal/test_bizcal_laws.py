"""Laws of working time, over random calendars of odd zones, random instants and durations."""

from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

import pytest
from bizcal_scenes import calendars, durations, utc
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from bizcal import Calendar

MODEST = settings(
    derandomize=True,
    max_examples=15,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
ZERO = timedelta(0)
MICROSECOND = timedelta(microseconds=1)
DURATION = durations(300)

Drawn: TypeAlias = tuple[Calendar, st.SearchStrategy[datetime]]


def working(data: st.DataObject, calendar: Calendar, moments: st.SearchStrategy[datetime]) -> datetime:
    """A working instant: the one drawn, or the opening that follows it."""
    at = calendar.next_working_instant(data.draw(moments))
    assume(calendar.is_working(at))
    return at


@MODEST
@given(st.data(), calendars(), DURATION)
def test_what_was_added_lies_between(data: st.DataObject, drawn: Drawn, duration: timedelta) -> None:
    calendar, moments = drawn
    start = working(data, calendar, moments)
    assert calendar.working_time_between(start, calendar.add_working_time(start, duration)) == duration


@MODEST
@given(st.data(), calendars(), DURATION)
def test_subtraction_undoes_addition(data: st.DataObject, drawn: Drawn, duration: timedelta) -> None:
    calendar, moments = drawn
    start = working(data, calendar, moments)
    assert calendar.subtract_working_time(calendar.add_working_time(start, duration), duration) == start


@MODEST
@given(st.data(), calendars(), DURATION)
def test_what_was_subtracted_lies_between(data: st.DataObject, drawn: Drawn, duration: timedelta) -> None:
    calendar, moments = drawn
    end = data.draw(moments)
    assert calendar.working_time_between(calendar.subtract_working_time(end, duration), end) == duration


@MODEST
@given(st.data(), calendars())
def test_time_between_is_additive_over_any_split(data: st.DataObject, drawn: Drawn) -> None:
    calendar, moments = drawn
    first, split, last = sorted(data.draw(moments) for _ in range(3))
    parts = calendar.working_time_between(first, split) + calendar.working_time_between(split, last)
    assert calendar.working_time_between(first, last) == parts
    assert ZERO <= parts <= last - first


@MODEST
@given(st.data(), calendars(), DURATION, DURATION)
def test_addition_is_additive(data: st.DataObject, drawn: Drawn, one: timedelta, two: timedelta) -> None:
    calendar, moments = drawn
    start = data.draw(moments)
    assume(two > ZERO)
    stepwise = calendar.add_working_time(calendar.add_working_time(start, one), two)
    assert calendar.add_working_time(start, one + two) == stepwise


@MODEST
@given(st.data(), calendars(), DURATION, DURATION)
def test_addition_is_monotone(data: st.DataObject, drawn: Drawn, one: timedelta, two: timedelta) -> None:
    calendar, moments = drawn
    early, late = sorted((data.draw(moments), data.draw(moments)))
    short, long = sorted((one, two))
    assert calendar.add_working_time(early, short) <= calendar.add_working_time(late, short)
    assert calendar.add_working_time(early, short) <= calendar.add_working_time(early, long)
    assert calendar.subtract_working_time(early, short) <= calendar.subtract_working_time(late, short)


@MODEST
@given(st.data(), calendars())
def test_nothing_added_is_the_next_and_nothing_subtracted_the_previous_instant(
    data: st.DataObject, drawn: Drawn
) -> None:
    calendar, moments = drawn
    at = data.draw(moments)
    following, preceding = calendar.next_working_instant(at), calendar.previous_working_instant(at)
    assert calendar.add_working_time(at, ZERO) == following == calendar.add_working_days(at, 0)
    assert calendar.subtract_working_time(at, ZERO) == preceding
    assert preceding <= at <= following
    assert calendar.working_time_between(preceding, following) == ZERO
    assert calendar.next_working_instant(following) == following
    assert calendar.previous_working_instant(preceding) == preceding
    assert calendar.is_working(following) or calendar.is_working(following - MICROSECOND)


@MODEST
@given(st.data(), calendars(), st.integers(1, 400))
def test_result_of_working_days_is_within_working_time(data: st.DataObject, drawn: Drawn, days: int) -> None:
    calendar, moments = drawn
    at = data.draw(moments)
    result = calendar.add_working_days(at, days)
    assert calendar.next_working_instant(result) == result
    assert result >= calendar.add_working_days(at, days - 1)


@MODEST
@given(st.data(), calendars(), DURATION)
def test_explained_parts_are_working_and_sum_to_the_duration(
    data: st.DataObject, drawn: Drawn, duration: timedelta
) -> None:
    calendar, moments = drawn
    start = data.draw(moments)
    parts = calendar.explain(start, duration)
    assert sum((part.used for part in parts), ZERO) == duration
    for part in parts:
        assert part.opens_at <= part.used_from < part.used_until <= part.closes_at
        assert part.used_from >= start
        assert calendar.working_time_between(part.opens_at, part.closes_at) == part.closes_at - part.opens_at
    for before, after in pairwise(parts):
        assert before.used_until == before.closes_at <= after.opens_at == after.used_from
        assert calendar.working_time_between(before.closes_at, after.opens_at) == ZERO
    if parts:
        assert parts[-1].used_until == calendar.add_working_time(start, duration)


@MODEST
@given(st.data(), calendars(), st.fractions(0, 1))
def test_share_of_a_window_is_exact_to_the_microsecond(data: st.DataObject, drawn: Drawn, fraction: Fraction) -> None:
    calendar, moments = drawn
    start, end = sorted((data.draw(moments), data.draw(moments)))
    window = calendar.working_time_between(start, end)
    share = calendar.working_time_between(start, calendar.percent_of_window(start, end, fraction))
    assert abs(Fraction(share // MICROSECOND) - fraction * (window // MICROSECOND)) <= Fraction(1, 2)


@pytest.mark.parametrize("fraction", [0.8, Fraction(4, 5), Decimal("0.8")])
def test_every_kind_of_fraction_gives_the_same_instant(fraction: float | Fraction | Decimal) -> None:
    start, end = utc(2026, 11, 30), utc(2026, 12, 5)
    assert Calendar.default().percent_of_window(start, end, fraction) == utc(2026, 12, 3, 18)


def test_halves_of_a_microsecond_are_rounded_to_even() -> None:
    opening = utc(2026, 11, 30, 10)
    for window, expected in {1: 0, 3: 2, 5: 2, 7: 4}.items():
        half = Calendar.default().percent_of_window(opening, opening + window * MICROSECOND, 0.5)
        assert half == opening + expected * MICROSECOND


def test_whole_window_ends_at_its_last_working_instant() -> None:
    start, end = utc(2026, 12, 4, 17), utc(2026, 12, 6)
    assert Calendar.default().percent_of_window(start, end, 1) == utc(2026, 12, 4, 18)
    assert Calendar.default().percent_of_window(start, end, 0) == start


AWARE, NAIVE = utc(2026, 11, 30, 12), datetime(2026, 11, 30, 12)  # noqa: DTZ001 (naive on purpose)
REFUSED: dict[str, Callable[[Calendar], object]] = {
    "is_working": lambda calendar: calendar.is_working(NAIVE),
    "next_working_instant": lambda calendar: calendar.next_working_instant(NAIVE),
    "previous_working_instant": lambda calendar: calendar.previous_working_instant(NAIVE),
    "add_working_time": lambda calendar: calendar.add_working_time(NAIVE, ZERO),
    "subtract_working_time": lambda calendar: calendar.subtract_working_time(NAIVE, ZERO),
    "working_time_between start": lambda calendar: calendar.working_time_between(NAIVE, AWARE),
    "working_time_between end": lambda calendar: calendar.working_time_between(AWARE, NAIVE),
    "add_working_days": lambda calendar: calendar.add_working_days(NAIVE, 0),
    "percent_of_window start": lambda calendar: calendar.percent_of_window(NAIVE, AWARE, 0.5),
    "percent_of_window end": lambda calendar: calendar.percent_of_window(AWARE, NAIVE, 0.5),
    "explain": lambda calendar: calendar.explain(NAIVE, ZERO),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_naive_instant_is_refused(call: Callable[[Calendar], object]) -> None:
    with pytest.raises(ValueError, match="timezone-aware datetime is required"):
        call(Calendar.default())


@pytest.mark.parametrize("duration", [-MICROSECOND, -timedelta(days=1), timedelta.min])
def test_negative_duration_is_refused(duration: timedelta) -> None:
    for method in (Calendar.add_working_time, Calendar.subtract_working_time, Calendar.explain):
        with pytest.raises(ValueError, match="cannot be negative"):
            method(Calendar.default(), AWARE, duration)


def test_negative_number_of_days_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        Calendar.default().add_working_days(AWARE, -1)


def test_reversed_window_is_refused() -> None:
    with pytest.raises(ValueError, match="before the start"):
        Calendar.default().working_time_between(AWARE, AWARE - MICROSECOND)
    with pytest.raises(ValueError, match="before the start"):
        Calendar.default().percent_of_window(AWARE, AWARE - MICROSECOND, 0.5)


@pytest.mark.parametrize(
    "fraction",
    [-0.000001, 1.000001, 2, Fraction(-1, 9), Decimal("1.01"), float("nan"), float("inf"), Decimal("NaN")],
)
def test_fraction_outside_zero_to_one_is_refused(fraction: float | Fraction | Decimal) -> None:
    with pytest.raises(ValueError, match="fraction from 0 to 1"):
        Calendar.default().percent_of_window(AWARE, AWARE, fraction)
