"""Random calendars around moments at which the clocks of real zones did something odd."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Any

from bizcal_oracle import WallClock, wall_clock
from hypothesis import strategies as st

from bizcal import Calendar

WINDOW_DAYS = 24

# Zone and date: the oddity happens in the middle of the window that is built around it.
ODDITIES = (
    ("UTC", date(2026, 2, 12)),
    ("Europe/Berlin", date(2026, 3, 29)),
    ("Europe/Berlin", date(2026, 10, 25)),
    ("Europe/Moscow", date(2014, 10, 26)),
    ("America/New_York", date(2026, 3, 8)),
    ("America/New_York", date(2026, 11, 1)),
    ("Asia/Kathmandu", date(1986, 1, 1)),  # 15 minutes skipped at midnight
    ("Australia/Lord_Howe", date(2026, 4, 5)),  # half an hour repeated
    ("Australia/Lord_Howe", date(2026, 10, 4)),
    ("Africa/Casablanca", date(2026, 2, 15)),  # Ramadan
    ("Africa/Casablanca", date(2026, 3, 22)),
    ("Pacific/Apia", date(2011, 12, 30)),  # a date that did not happen
    ("Pacific/Kwajalein", date(1969, 9, 30)),  # a day of 47 hours
    ("America/Sao_Paulo", date(2018, 2, 18)),  # the hour before midnight twice
    ("America/Sao_Paulo", date(2018, 11, 4)),  # midnight skipped
    ("America/St_Johns", date(2006, 10, 29)),  # from 00:01 back into the day before
    ("Asia/Pyongyang", date(2018, 5, 4)),  # the last half-hour of a day skipped
    ("Asia/Singapore", date(1981, 12, 31)),  # the same on the last day of a year
    ("America/Toronto", date(1919, 3, 30)),  # from 23:30 to 00:30: a gap across midnight
    ("Antarctica/Troll", date(2026, 3, 29)),  # two hours skipped
)

_EDGES = (0, 1, 15, 30, 60, 90, 120, 150, 180, 540, 1080, 1380, 1395, 1410, 1425, 1439, 1440)
_MICROSECONDS = st.sampled_from([0, 0, 0, 1, 30_000_000, 59_999_999]) | st.integers(0, 59_999_999)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def day_hours(least: int = 0) -> st.SearchStrategy[list[list[str]]]:
    """Intervals of one day, possibly touching; boundaries favour the minutes at which clocks change."""

    def paired(boundaries: set[int]) -> list[list[str]]:
        ordered = sorted(boundaries)
        step = 1 if len(ordered) == 3 else 2  # three boundaries: two intervals that touch
        return [[_clock(ordered[at]), _clock(ordered[at + 1])] for at in range(0, len(ordered) - 1, step)]

    minute = st.sampled_from(_EDGES) | st.integers(0, 1440)
    return st.sets(minute, min_size=least, max_size=6).map(paired)


@st.composite
def configs(draw: st.DrawFn, zone: str, middle: date) -> dict[str, Any]:
    """A valid calendar with at least one working interval a week, odd days near `middle`."""
    near = st.integers(-4, 4) | st.integers(-WINDOW_DAYS // 2, WINDOW_DAYS // 2)
    days = near.map(lambda offset: (middle + timedelta(days=offset)).isoformat())
    if draw(st.integers(0, 5)) == 0:
        week = {str(day): [["00:00", "24:00"]] for day in range(7)}
    else:
        week = draw(st.dictionaries(st.sampled_from("0123456"), day_hours(), max_size=7))
        week[draw(st.sampled_from("0123456"))] = draw(day_hours(least=2))
    return {
        "tz": zone,
        "week": week,
        "holidays": draw(st.lists(days, max_size=3)),
        "overrides": draw(st.dictionaries(days, day_hours(), max_size=4)),
    }


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Any], WallClock]:
    """A random calendar and the wall clock that the oracle reads around the oddity of its zone."""
    zone, middle = draw(st.sampled_from(ODDITIES))
    clock = wall_clock(zone, middle - timedelta(days=WINDOW_DAYS // 2), WINDOW_DAYS)
    return draw(configs(zone, middle)), clock


def instants(clock: WallClock, margin_days: int = 5) -> st.SearchStrategy[datetime]:
    """Instants inside the window: any minute, often near its middle, often on the full minute."""
    minutes = st.integers(margin_days * 1440, (WINDOW_DAYS - margin_days) * 1440)
    middle = WINDOW_DAYS * 720
    near = st.integers(middle - 1440, middle + 2 * 1440)
    quarters = st.integers(middle // 15 - 192, middle // 15 + 192).map(lambda quarter: quarter * 15)
    return st.builds(
        lambda minute, micro: clock.start + timedelta(minutes=minute, microseconds=micro),
        minutes | near | quarters,
        _MICROSECONDS,
    )


def durations(most_hours: int) -> st.SearchStrategy[timedelta]:
    """Zero, whole quarters of an hour, or any number of microseconds."""
    return (
        st.just(timedelta(0))
        | st.integers(0, most_hours * 4).map(lambda quarters: timedelta(minutes=15 * quarters))
        | st.integers(0, most_hours * 3_600_000_000).map(lambda micro: timedelta(microseconds=micro))
    )


def utc(*fields: int) -> datetime:
    """An instant in UTC."""
    return datetime(*fields, tzinfo=UTC)  # type: ignore[arg-type,misc]


@st.composite
def calendars(draw: st.DrawFn) -> tuple[Calendar, st.SearchStrategy[datetime]]:
    """A random calendar, and instants around the oddity of its zone, a few of them years away."""
    zone, middle = draw(st.sampled_from(ODDITIES))
    midnight = datetime.combine(middle, time(), UTC)
    quarters = st.integers(-480, 480).map(lambda quarter: midnight + timedelta(minutes=15 * quarter))
    near = st.timedeltas(-timedelta(days=20), timedelta(days=20)).map(lambda offset: midnight + offset)
    far = st.timedeltas(-timedelta(days=400), timedelta(days=400)).map(lambda offset: midnight + offset)
    return Calendar.from_config(draw(configs(zone, middle))), quarters | near | far
