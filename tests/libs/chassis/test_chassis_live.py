"""Watchers of a tailed topic: each event once and in order, or word to read anew; nobody waits for a slow one."""

import asyncio

import orjson
import pytest
from prometheus_client import CollectorRegistry

from chassis.live import MOST_OF_ONE, LiveEvent, LiveTail, StreamUnavailable, Subscription, TooManyStreams
from chassis.messaging import KafkaAddress, Received


def read(record: Received) -> LiveEvent | None:
    payload = orjson.loads(record.value or b"null")
    return None if payload is None else LiveEvent(payload["for"], "changed", b"%d" % payload["n"])


def tail(ring: int = 100, buffer: int = 50, partitions: int = 2) -> LiveTail:
    made = LiveTail(KafkaAddress("127.0.0.1:1"), "t", read, CollectorRegistry(), ring, buffer)
    made._next = dict.fromkeys(range(partitions), 0)
    made._floor = dict(made._next)
    return made


def feed(live: LiveTail, partition: int, offset: int, audience: str = "a", n: int = 0) -> None:
    value = orjson.dumps({"for": audience, "n": n})
    live.take(Received("t", partition, offset, 0, b"k", value, ()))


async def got(watcher: Subscription) -> list[tuple[str, str, str]]:
    """Return (id, event, data) of what waits."""
    text = (await watcher.next(0.01) or b"").decode()
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            found.append((fields["id"], fields["event"], fields["data"]))
    return found


async def test_a_watcher_gets_the_events_of_its_audience_in_order_with_the_position_after_each():
    live = tail()
    with live.watching("me", "a", None) as watcher:
        feed(live, 0, 0, n=1)
        feed(live, 1, 0, "b", n=2)
        feed(live, 1, 1, n=3)
        assert await got(watcher) == [("0:1,1:0", "changed", "1"), ("0:1,1:2", "changed", "3")]


async def test_a_heartbeat_comes_when_nothing_happens_and_carries_the_position():
    live = tail()
    with live.watching("me", "a", None) as watcher:
        assert await watcher.next(0.01) == b"retry: 2000\n\nid: 0:0,1:0\n\n"
        feed(live, 0, 0, "b")
        assert await watcher.next(0.01) == b": heartbeat\nid: 0:1,1:0\n\n"


async def test_who_comes_back_gets_what_was_missed_once_and_nothing_of_others():
    live = tail()
    for offset in range(4):
        feed(live, offset % 2, offset // 2, "ab"[offset == 2], n=offset)
    with live.watching("me", "a", "0:1,1:0") as watcher:
        feed(live, 0, 2, n=9)
        assert await got(watcher) == [
            ("0:1,1:1", "changed", "1"), ("0:2,1:2", "changed", "3"), ("0:3,1:2", "changed", "9"),
        ]  # fmt: skip


async def test_a_position_is_as_good_in_a_process_that_has_read_the_partitions_in_another_order():
    one, other = tail(), tail()
    for live, order in ((one, (0, 1)), (other, (1, 0))):
        for partition in order:
            for offset in range(3):
                feed(live, partition, offset, n=10 * partition + offset)
    seen = set()
    with one.watching("me", "a", "0:0,1:0") as watcher:
        begun = (await got(watcher))[:4]
        seen |= {data for _, _, data in begun}
    with other.watching("me", "a", begun[-1][0]) as watcher:
        rest = [data for _, _, data in await got(watcher)]
    assert seen.isdisjoint(rest)
    assert seen | set(rest) == {"0", "1", "2", "10", "11", "12"}


@pytest.mark.parametrize(
    "seen", ["0:0,1:0", "0:2", "0:2,1:9", "nonsense", "", "0:2,1:0,2:0", "0:99999999999999999999,1:0"]
)
async def test_who_comes_back_with_a_position_that_is_not_covered_reads_anew(seen: str):
    live = tail(ring=3)
    for offset in range(5):
        feed(live, 0, offset, n=offset)
    with live.watching("me", "a", seen) as watcher:
        assert await got(watcher) == [("0:5,1:0", "resync", "{}")]
        feed(live, 0, 5, n=5)
        assert await got(watcher) == [("0:6,1:0", "changed", "5")]


async def test_a_watcher_that_reads_too_slowly_reads_anew_and_holds_up_nobody():
    live = tail(buffer=5)
    with live.watching("slow", "a", None) as slow, live.watching("quick", "a", None) as quick:
        read_by_quick = []
        for offset in range(12):
            feed(live, 0, offset, n=offset)
            read_by_quick += [data for _, _, data in await got(quick)]
        assert read_by_quick == [str(n) for n in range(12)]
        assert await got(slow) == [("0:12,1:0", "resync", "{}")]
        feed(live, 0, 12, n=12)
        assert await got(slow) == [("0:13,1:0", "changed", "12")]


async def test_what_cannot_be_read_is_counted_and_passed_over():
    live = tail()
    with live.watching("me", "a", None) as watcher:
        for offset, value in enumerate((b"{", b"[]", b'{"for": "a"}', None)):
            live.take(Received("t", 0, offset, 0, b"k", value, ()))
        feed(live, 0, 4, n=4)
        assert await got(watcher) == [("0:5,1:0", "changed", "4")]
    assert live._unreadable._value.get() == 3


async def test_streams_are_counted_per_owner_and_let_go():
    live = tail()
    opened = [live.watching("me", "a", None) for _ in range(MOST_OF_ONE)]
    for one in opened:
        live.check("me")
        one.__enter__()
    with pytest.raises(TooManyStreams):
        live.check("me")
    live.check("another")
    for one in opened:
        one.__exit__(None, None, None)
    assert (live.streams, live._watchers, dict(live._owners)) == (0, {}, {})


async def test_nobody_watches_before_the_topic_was_reached():
    with pytest.raises(StreamUnavailable):
        tail(partitions=0).check("me")


async def test_an_end_wakes_who_waits():
    live = tail()
    with live.watching("me", "a", None) as watcher:
        await got(watcher)
        waiting = asyncio.create_task(watcher.next(60))
        await asyncio.wait([waiting], timeout=0.01)
        live._end()
        async with asyncio.timeout(1):
            assert await waiting is None
            await watcher.ended()
