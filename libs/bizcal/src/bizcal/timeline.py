"""Working time on the absolute time line, in integer microseconds since 1970-01-01 UTC.

Invariant: a block's spans are sorted, disjoint and not empty, and its cumulative sums are exact; every sum
and search is therefore a bisection. Blocks of 366 days are built when first needed. A block never changes
once built, so readers need no lock: in a race it is built twice and one copy is dropped.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from typing import Final, NamedTuple, TypeAlias

from bizcal.hours import WorkingHours

Span: TypeAlias = tuple[int, int]
"""Opening (inclusive) and closing (exclusive) of a working interval, microseconds."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = _EPOCH.toordinal()
_START_OF_DAY: Final = time()
_ONE_DAY: Final = timedelta(days=1)
_MICROSECOND: Final = timedelta(microseconds=1)
_DAY: Final = 86_400_000_000

_BLOCK_DAYS: Final = 366
_BLOCK: Final = _BLOCK_DAYS * _DAY
_BLOCKS_KEPT: Final = 64
# A local day may lie 16 h off its UTC day, last 48 h (date line), and have an interval moved by a gap.
_MARGIN_DAYS: Final = 4

# A year is left free at both ends of datetime's range, so that no conversion of local time can overflow.
_FIRST_INSTANT: Final = (date(2, 1, 1).toordinal() - _EPOCH_DAY) * _DAY
_LAST_INSTANT: Final = (date(9999, 1, 1).toordinal() - _EPOCH_DAY) * _DAY - 1
_FIRST_BLOCK: Final = _FIRST_INSTANT // _BLOCK
_LAST_BLOCK: Final = _LAST_INSTANT // _BLOCK
_FIRST_DAY: Final = date(1, 1, 2).toordinal()
_LAST_DAY: Final = date(9999, 12, 30).toordinal()

_SEARCH_DAYS: Final = 5 * 365 + 2
_SEARCH: Final = _SEARCH_DAYS * _DAY


class NoWorkingTime(LookupError):
    """A search found no working time within five years (1827 days) or within the years 2 to 9998.

    `instant` (aware, UTC) is where the fruitless stretch begins. Source: platform calendar specification.
    """

    def __init__(self, instant: datetime, direction: str) -> None:
        """`direction` is "after" or "before"."""
        super().__init__(instant, direction)
        self.instant = instant
        self.direction = direction

    def __str__(self) -> str:
        """One sentence for a log or an API answer."""
        return f"no working time within five years {self.direction} {self.instant.isoformat()}"


def microseconds_of(instant: datetime) -> int:
    """The absolute position of an aware datetime.

    ValueError if it is naive or outside the years 2 to 9998 (UTC).
    """
    try:
        position = (instant - _EPOCH) // _MICROSECOND
    except TypeError as error:
        raise ValueError(f"a timezone-aware datetime is required, not {instant!r}") from error
    if not _FIRST_INSTANT <= position <= _LAST_INSTANT:
        raise ValueError(f"{instant.isoformat()} is outside the years 2 to 9998 (UTC)")
    return position


def instant_at(position: int) -> datetime:
    """The aware datetime (UTC) at an absolute position."""
    return _EPOCH + position * _MICROSECOND


def midnight_of(day: int, tz: tzinfo) -> datetime:
    """The local midnight (aware, `fold=0`) that begins the day `day`, given as an ordinal.

    Adding a time after midnight to it moves the wall clock and keeps `fold=0`, which is the rule of the
    specification: a skipped reading moves forward by the gap, an ambiguous one is its first occurrence.
    """
    return datetime.combine(date.fromordinal(day), _START_OF_DAY, tz)


def position_of(zoned: datetime) -> int:
    """The absolute position of an aware datetime that is known to be in range."""
    return (zoned - _EPOCH) // _MICROSECOND


class _Block(NamedTuple):
    """The spans that open in one stretch of 366 UTC days, after the span that reaches into it, if any.

    `after[i]` is the working time from the block's first opening to the end of span i. A span reaching in
    counts in the block where it opens; here its sum is 0 and `floor` is minus its length.
    """

    starts: list[int]
    ends: list[int]
    after: list[int]
    floor: int
    total: int
    first: int
    days: list[int]

    def position(self, at: int) -> int:
        """Working time of this block before `at`."""
        index = bisect_right(self.starts, at) - 1
        if index < 0:
            return 0
        missing = self.ends[index] - at
        return self.after[index] - missing if missing > 0 else self.after[index]


class Timeline:
    """Sums and searches over the working time of one calendar. All positions and amounts are microseconds."""

    __slots__ = ("_blocks", "_hours")

    def __init__(self, hours: WorkingHours) -> None:
        """Nothing is computed before it is needed."""
        self._hours = hours
        self._blocks: dict[int, _Block] = {}

    def contains(self, at: int) -> bool:
        """Whether a span holds `at`: opening inclusive, closing exclusive."""
        block = self._block(at // _BLOCK)
        index = bisect_right(block.starts, at) - 1
        return index >= 0 and at < block.ends[index]

    def following(self, at: int) -> int:
        """`at` itself from an opening up to and including its closing, else the next opening."""
        number = at // _BLOCK
        block = self._block(number)
        index = bisect_right(block.starts, at)
        if index and at <= block.ends[index - 1]:
            return at
        if index < len(block.starts):
            return block.starts[index]
        later = self._block(self._block_opening_after(number, at))
        return later.starts[later.first]

    def preceding(self, at: int) -> int:
        """`at` itself from an opening up to and including its closing, else the previous closing."""
        number = at // _BLOCK
        block = self._block(number)
        index = bisect_right(block.starts, at) - 1
        if index >= 0:
            return min(at, block.ends[index])
        return self._block(self._block_opening_before(number, at)).ends[-1]

    def add(self, at: int, amount: int) -> int:
        """The earliest position with `amount` of working time since `at`; at zero, `following(at)`."""
        if not amount:
            return self.following(at)
        number = at // _BLOCK
        block = self._block(number)
        target = block.position(at) + amount
        if target > block.total:
            block, target = self._later(number, at, target)
        index = bisect_left(block.after, target)
        return block.ends[index] - block.after[index] + target

    def subtract(self, at: int, amount: int) -> int:
        """The latest position with `amount` of working time until `at`; at zero, `preceding(at)`."""
        if not amount:
            return self.preceding(at)
        number = at // _BLOCK
        block = self._block(number)
        target = block.position(at) - amount
        if target < block.floor:
            block, target = self._earlier(number, at, target)
        index = bisect_right(block.after, target)
        return block.ends[index] - block.after[index] + target

    def between(self, begin: int, end: int) -> int:
        """Working time from `begin` to `end`, `begin <= end`."""
        first, last = begin // _BLOCK, end // _BLOCK
        passed = sum(self._block(number).total for number in range(first, last))
        return passed + self._block(last).position(end) - self._block(first).position(begin)

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """The spans of which a part lies between `begin` and `end`, in order; none if `begin == end`."""
        if begin == end:
            return
        for number in range(begin // _BLOCK, end // _BLOCK + 1):
            block = self._block(number)
            # A span reaching in was already given by the block before, except in the very first one.
            low = block.first if number > begin // _BLOCK else max(bisect_right(block.starts, begin) - 1, 0)
            for index in range(low, bisect_left(block.starts, end)):
                if block.ends[index] > begin:
                    yield block.starts[index], block.ends[index]

    def working_day_after(self, day: int, count: int) -> int:
        """The `count`-th (from 1) working day after the local day `day`; days are ordinals."""
        if day + count > _LAST_DAY:
            raise NoWorkingTime(midnight_of(day, self._hours.tz).astimezone(UTC), "after")
        number = (day - _EPOCH_DAY) // _BLOCK_DAYS
        days = self._block(number).days
        index = bisect_right(days, day) + count - 1
        while index >= len(days):
            index -= len(days)
            number = self._block_working_after(number, max(day, days[-1]) if days else day)
            days = self._block(number).days
        return days[index]

    def spans_on(self, day: int) -> list[Span]:
        """The spans of one local day as they exist on it: moved by gaps, united where they overlap."""
        hours = self._hours.on(day)
        midnight = midnight_of(day, self._hours.tz)
        # A date without length did not happen in its zone: Pacific/Apia skipped 2011-12-30.
        if not hours or position_of(midnight) >= position_of(midnight + _ONE_DAY):
            return []
        spans = [(position_of(midnight + opens), position_of(midnight + closes)) for opens, closes in hours]
        return _merged(sorted(span for span in spans if span[0] < span[1]))

    def _block(self, number: int) -> _Block:
        return self._blocks.get(number) or self._load(number)

    def _load(self, number: int) -> _Block:
        block = self._build(number)
        if len(self._blocks) >= _BLOCKS_KEPT:
            self._blocks.clear()
        self._blocks[number] = block
        return block

    def _build(self, number: int) -> _Block:
        begin, first_day = number * _BLOCK, number * _BLOCK_DAYS + _EPOCH_DAY
        by_day = {day: self.spans_on(day) for day in _days_around(first_day)}
        spans = _merged(sorted(span for spans in by_day.values() for span in spans))
        here = [span for span in spans if span[0] < begin + _BLOCK and span[1] >= begin]
        days = [day for day in range(first_day, first_day + _BLOCK_DAYS) if by_day.get(day)]
        return _summed(here, begin, days)

    def _later(self, number: int, at: int, target: int) -> tuple[_Block, int]:
        """The later block in which the working time `target`, counted from block `number` on, is reached."""
        block = self._block(number)
        if at + target - block.position(at) > _LAST_INSTANT:
            raise NoWorkingTime(instant_at(at), "after")
        while target > block.total:
            target -= block.total
            number = self._block_opening_after(number, max(at, block.ends[-1]) if block.ends else at)
            block = self._block(number)
        return block, target

    def _earlier(self, number: int, at: int, target: int) -> tuple[_Block, int]:
        """The earlier block that holds the working time `target`, counted from block `number` on."""
        block = self._block(number)
        if at + target - block.position(at) < _FIRST_INSTANT:
            raise NoWorkingTime(instant_at(at), "before")
        while target < block.floor:
            number = self._block_opening_before(number, min(at, block.starts[0]) if block.starts else at)
            block = self._block(number)
            target += block.total
        return block, target

    def _block_opening_after(self, number: int, since: int) -> int:
        for later in range(number + 1, min(_LAST_BLOCK, (since + _SEARCH) // _BLOCK) + 1):
            block = self._block(later)
            if block.total:
                if block.starts[block.first] - since <= _SEARCH:
                    return later
                break
        raise NoWorkingTime(instant_at(since), "after")

    def _block_opening_before(self, number: int, until: int) -> int:
        for earlier in range(number - 1, max(_FIRST_BLOCK, (until - _SEARCH) // _BLOCK - 1) - 1, -1):
            block = self._block(earlier)
            if block.total:
                if until - block.ends[-1] <= _SEARCH:
                    return earlier
                break
        raise NoWorkingTime(instant_at(until), "before")

    def _block_working_after(self, number: int, since: int) -> int:
        for later in range(number + 1, min(_LAST_BLOCK, number + _SEARCH_DAYS // _BLOCK_DAYS + 1) + 1):
            days = self._block(later).days
            if days:
                if days[0] - since <= _SEARCH_DAYS:
                    return later
                break
        raise NoWorkingTime(midnight_of(since, self._hours.tz).astimezone(UTC), "after")


def _days_around(first_day: int) -> range:
    begin, end = first_day - _MARGIN_DAYS, first_day + _BLOCK_DAYS + _MARGIN_DAYS
    return range(max(begin, _FIRST_DAY), min(end, _LAST_DAY + 1))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Sorted spans with overlapping ones united; touching ones stay apart, so that a day keeps its own."""
    merged: list[Span] = []
    for start, end in spans:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _summed(spans: list[Span], begin: int, days: list[int]) -> _Block:
    first = 1 if spans and spans[0][0] < begin else 0
    total = floor = -sum(end - start for start, end in spans[:first])
    after: list[int] = []
    for start, end in spans:
        total += end - start
        after.append(total)
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    return _Block(starts, ends, after, floor, total, first, days)
