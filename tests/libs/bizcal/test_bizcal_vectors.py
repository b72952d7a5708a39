"""Every vector of `calendar.json` (calendars, arguments and results, drawn up apart from the library)."""

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bizcal import Calendar

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "calendar.json").read_text())
VECTORS: list[dict[str, Any]] = CASES["vectors"]


def _moment(vector: dict[str, Any], key: str) -> datetime:
    return datetime.fromisoformat(vector[key])


def _minutes(vector: dict[str, Any]) -> timedelta:
    return timedelta(minutes=vector["minutes"])


CALLS: dict[str, Callable[[Calendar, dict[str, Any]], object]] = {
    "is_working": lambda calendar, v: calendar.is_working(_moment(v, "start")),
    "next_working_instant": lambda calendar, v: calendar.next_working_instant(_moment(v, "start")),
    "previous_working_instant": lambda calendar, v: calendar.previous_working_instant(_moment(v, "start")),
    "add_working_time": lambda calendar, v: calendar.add_working_time(_moment(v, "start"), _minutes(v)),
    "subtract_working_time": lambda calendar, v: calendar.subtract_working_time(_moment(v, "start"), _minutes(v)),
    "add_working_days": lambda calendar, v: calendar.add_working_days(_moment(v, "start"), v["days"]),
    "working_time_between": lambda calendar, v: calendar.working_time_between(_moment(v, "a"), _moment(v, "b")),
    "percent_of_window": lambda calendar, v: calendar.percent_of_window(
        _moment(v, "start"), _moment(v, "end"), v["fraction"]
    ),
}


def _expected(vector: dict[str, Any]) -> object:
    if "result" not in vector:
        return _minutes(vector)
    result = vector["result"]
    return result if isinstance(result, bool) else datetime.fromisoformat(result)


@pytest.mark.req("OPS-110")
@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['calendar']}-{v['op']}-{v.get('start', v.get('a'))}")
def test_vector_gives_its_result(vector: dict[str, Any]) -> None:
    calendar = Calendar.from_config(CASES["calendars"][vector["calendar"]])
    assert CALLS[vector["op"]](calendar, vector) == _expected(vector)


def test_vectors_are_complete() -> None:
    assert len(VECTORS) == 90
    assert {vector["op"] for vector in VECTORS} == set(CALLS)
    assert {vector["calendar"] for vector in VECTORS} == set(CASES["calendars"])


@pytest.mark.parametrize("calendar", CASES["calendars"])
def test_hours_of_a_calendar_reach_the_result(calendar: str) -> None:
    """A vector that any hours would satisfy proves nothing: with other hours, some vector of each calendar fails."""
    other = Calendar.from_config({"tz": "Asia/Tokyo", "week": {"2": [["00:00", "00:07"]]}})
    mine = [vector for vector in VECTORS if vector["calendar"] == calendar]
    assert any(CALLS[vector["op"]](other, vector) != _expected(vector) for vector in mine)
