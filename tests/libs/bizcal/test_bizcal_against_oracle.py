"""The library and a minute-stepping oracle agree on random calendars around odd days of real zones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from bizcal_oracle import Oracle, OutOfWindowError, WallClock
from bizcal_scenes import durations, instants, scenes
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from bizcal import Calendar, timeline

MODEST = settings(
    derandomize=True,
    max_examples=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@contextmanager
def blocks_of(days: int) -> Iterator[None]:
    """Blocks so small that every walk crosses their borders and every long span reaches over them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "_BLOCK_DAYS", days)
        patch.setattr(timeline, "_BLOCK", days * timeline._DAY)
        patch.setattr(timeline, "_FIRST_BLOCK", timeline._FIRST_INSTANT // (days * timeline._DAY))
        patch.setattr(timeline, "_LAST_BLOCK", timeline._LAST_INSTANT // (days * timeline._DAY))
        yield


def agree(data: st.DataObject, scene: tuple[dict[str, Any], WallClock], *calls: Callable[[Any], object]) -> None:
    """Library and oracle answer the same, for usual blocks and for small ones."""
    config, clock = scene
    oracle, days = Oracle(config, clock), data.draw(st.sampled_from([1, 3]), "days in a small block")
    for call in calls:
        try:
            expected = call(oracle)
        except OutOfWindowError:
            reject()
        assert call(Calendar.from_config(config)) == expected
        with blocks_of(days):
            assert call(Calendar.from_config(config)) == expected


@MODEST
@given(st.data(), scenes())
def test_instants_are_found_as_by_the_oracle(data: st.DataObject, scene: tuple[dict[str, Any], WallClock]) -> None:
    at = data.draw(instants(scene[1]))
    agree(
        data,
        scene,
        lambda calendar: calendar.is_working(at),
        lambda calendar: calendar.next_working_instant(at),
        lambda calendar: calendar.previous_working_instant(at),
    )


@MODEST
@given(st.data(), scenes())
def test_time_is_added_and_subtracted_as_by_the_oracle(
    data: st.DataObject, scene: tuple[dict[str, Any], WallClock]
) -> None:
    at, duration = data.draw(instants(scene[1])), data.draw(durations(30))
    agree(
        data,
        scene,
        lambda calendar: calendar.add_working_time(at, duration),
        lambda calendar: calendar.subtract_working_time(at, duration),
    )


@MODEST
@given(st.data(), scenes())
def test_time_between_is_counted_as_by_the_oracle(data: st.DataObject, scene: tuple[dict[str, Any], WallClock]) -> None:
    first, second = sorted((data.draw(instants(scene[1])), data.draw(instants(scene[1]))))
    agree(data, scene, lambda calendar: calendar.working_time_between(first, second))


@MODEST
@given(st.data(), scenes(), st.integers(0, 6))
def test_days_are_added_as_by_the_oracle(
    data: st.DataObject, scene: tuple[dict[str, Any], WallClock], days: int
) -> None:
    at = data.draw(instants(scene[1]))
    agree(data, scene, lambda calendar: calendar.add_working_days(at, days))
