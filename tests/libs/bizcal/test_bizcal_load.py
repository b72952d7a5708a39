"""A configuration that can't be computed with is refused at load, and the refusal names the day."""

from typing import Any

import pytest

from bizcal import Calendar

NINE_TO_FIVE = ["09:00", "17:00"]

REFUSED: dict[str, tuple[Any, str]] = {
    "overlap": ({"week": {"2": [["09:00", "13:00"], ["12:59", "18:00"]]}}, r"week 2 \(Wednesday\).*overlap"),
    "same interval twice": ({"week": {"2": [NINE_TO_FIVE, NINE_TO_FIVE]}}, r"week 2 \(Wednesday\).*overlap"),
    "reversed": ({"week": {"0": [["18:00", "10:00"]]}}, r"week 0 \(Monday\).*18:00-10:00"),
    "no length": ({"week": {"6": [["10:00", "10:00"]]}}, r"week 6 \(Sunday\).*10:00-10:00"),
    "overlap in an override": (
        {"overrides": {"2026-12-31": [["09:00", "13:00"], ["12:00", "14:00"]]}},
        r"overrides 2026-12-31.*overlap",
    ),
    "reversed in an override": ({"overrides": {"2026-12-31": [["13:00", "09:00"]]}}, r"overrides 2026-12-31"),
    "empty week": ({"week": {}}, r"week.*no day"),
    "week of empty days": ({"week": {"0": [], "5": []}}, r"week.*no day"),
    "empty week with an empty override": ({"week": {}, "overrides": {"2026-12-31": []}}, r"week.*no day"),
    "unknown zone": ({"tz": "Europe/Atlantis"}, r"unknown time zone 'Europe/Atlantis'"),
    "empty zone": ({"tz": ""}, r"tz"),
    "folder of zones": ({"tz": "Europe"}, r"unknown time zone 'Europe'"),
    "path as zone": ({"tz": "../../etc/passwd"}, r"unknown time zone.*etc/passwd"),
    "zero byte in a zone": ({"tz": "UTC\0"}, r"unknown time zone"),
    "offset as zone": ({"tz": 3}, r"tz"),
    "hour 25": ({"week": {"1": [["25:00", "26:00"]]}}, r"week 1 \(Tuesday\).*25:00"),
    "minute 60": ({"week": {"1": [["09:60", "12:00"]]}}, r"week 1 \(Tuesday\).*09:60"),
    "past midnight": ({"week": {"1": [["09:00", "24:01"]]}}, r"week 1 \(Tuesday\).*24:01"),
    "one digit": ({"week": {"1": [["9:00", "12:00"]]}}, r"week 1 \(Tuesday\).*9:00"),
    "seconds": ({"week": {"1": [["09:00:00", "12:00"]]}}, r"week 1 \(Tuesday\).*09:00:00"),
    "line end": ({"week": {"1": [["09:00\n", "12:00"]]}}, r"week 1 \(Tuesday\)"),
    "foreign digits": ({"week": {"1": [["٠٩:٠٠", "12:00"]]}}, r"week 1 \(Tuesday\)"),
    "number as time (YAML 1.1 reads 10:00 as 600)": (
        {"week": {"1": [[600, 1080]]}},
        r"week 1 \(Tuesday\).*600",
    ),
    "24:00 as opening": ({"week": {"4": [["24:00", "24:00"]]}}, r"week 4 \(Friday\).*24:00"),
    "three times": ({"week": {"4": [["09:00", "12:00", "13:00"]]}}, r"week 4 \(Friday\)"),
    "text as interval": ({"week": {"4": ["09:00-12:00"]}}, r"week 4 \(Friday\).*list"),
    "text as day": ({"week": {"4": "09:00-12:00"}}, r"week 4 \(Friday\).*list"),
    "day 7": ({"week": {"7": [NINE_TO_FIVE]}}, r"unknown day '7'"),
    "day -1": ({"week": {"-1": [NINE_TO_FIVE]}}, r"unknown day '-1'"),
    "day by name": ({"week": {"monday": [NINE_TO_FIVE]}}, r"unknown day 'monday'"),
    "day as number": ({"week": {0: [NINE_TO_FIVE]}}, r"unknown day 0"),
    "week as list": ({"week": [[NINE_TO_FIVE]]}, r"week: a mapping"),
    "no mapping": ([], r"calendar: a mapping"),
    "nothing": (None, r"calendar: a mapping"),
    "unknown key": ({"timezone": "UTC"}, r"unknown key 'timezone'"),
    "holidays as mapping": ({"holidays": {"2026-01-01": True}}, r"holidays: a list"),
    "holidays as text": ({"holidays": "2026-01-01"}, r"holidays: a list"),
    "no such holiday": ({"holidays": ["2026-02-29"]}, r"2026-02-29"),
    "holiday without dashes": ({"holidays": ["20260101"]}, r"20260101"),
    "holiday as week date": ({"holidays": ["2026-W01-1"]}, r"2026-W01-1"),
    "holiday with a time": ({"holidays": ["2026-01-01T00:00"]}, r"2026-01-01T00:00"),
    "no such override": ({"overrides": {"2026-13-01": []}}, r"2026-13-01"),
    "overrides as list": ({"overrides": ["2026-12-31"]}, r"overrides: a mapping"),
    "override as nothing": ({"overrides": {"2026-12-31": None}}, r"overrides 2026-12-31.*list"),
}


@pytest.mark.parametrize(("config", "complaint"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_configuration_is_refused_by_name(config: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Calendar.from_config(config)


def test_order_of_intervals_and_days_does_not_matter() -> None:
    forward = Calendar.from_config({"week": {"0": [["09:00", "12:00"], ["13:00", "24:00"]], "1": [NINE_TO_FIVE]}})
    backward = Calendar.from_config({"week": {"1": [NINE_TO_FIVE], "0": [["13:00", "24:00"], ["09:00", "12:00"]]}})
    assert forward._hours == backward._hours


def test_touching_intervals_count_as_one() -> None:
    touching = Calendar.from_config({"week": {"0": [["09:00", "12:00"], ["12:00", "15:00"], ["15:00", "18:00"]]}})
    assert touching._hours == Calendar.from_config({"week": {"0": [["09:00", "18:00"]]}})._hours


def test_tuples_do_as_well_as_lists() -> None:
    tuples = Calendar.from_config({"week": {"0": (("09:00", "18:00"),)}, "holidays": ("2026-01-01",)})
    lists = Calendar.from_config({"week": {"0": [["09:00", "18:00"]]}, "holidays": ["2026-01-01"]})
    assert tuples._hours == lists._hours


def test_later_changes_of_the_mapping_change_no_calendar() -> None:
    config: dict[str, Any] = {"week": {"0": [["09:00", "18:00"]]}, "overrides": {}}
    calendar = Calendar.from_config(config)
    config["week"]["0"].append(["19:00", "20:00"])
    config["overrides"]["2026-11-30"] = []
    assert calendar._hours == Calendar.from_config({"week": {"0": [["09:00", "18:00"]]}})._hours
