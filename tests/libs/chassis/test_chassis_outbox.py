"""What `emit` writes, refuses and leaves behind."""

from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta, timezone
from itertools import pairwise
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import asyncpg
import orjson
import pytest

from chassis.db import Database, driver_connection
from chassis.ids import EVENTS_NAMESPACE, derived_event_id, new_id
from chassis.instants import rfc3339
from chassis.outbox import (
    LANES,
    MAX_RECORD_BYTES,
    Cause,
    EventType,
    Message,
    MessageRefused,
    Outbox,
    envelope,
    lane_of,
)
from chassis.testing.plugin import TestDatabase

Connection = asyncpg.Connection
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
NAIVE = NOW.replace(tzinfo=None)
EAST = timezone(timedelta(hours=14))
NOTED = EventType("pin.test.note.v1", "test.noted", "/pin/test", "Note", "domain")
OUTBOX = Outbox("crm")
CAUSE = Cause("run-1")


def message(payload: object = None, *, key: str = "k", **fields: object) -> Message:
    return Message(NOTED, key, {"a": 1} if payload is None else payload, fields.pop("at", NOW), **fields)


async def rows(admin: Connection) -> list[asyncpg.Record]:
    return await admin.fetch("select * from crm.outbox order by id")


# --- lanes and ids


def test_lane_of_a_key_is_what_it_was_when_rows_were_stored():
    golden = {
        "": 0,
        "a": 3,
        "0": 33,
        "сделка": 22,
        "00000000-0000-0000-0000-000000000000": 9,
        "019a3c5e-8f00-7000-8000-000000000001": 52,
    }
    assert {key: lane_of(key) for key in golden} == golden


def test_lanes_are_0_to_63_and_all_are_used():
    counts = [0] * LANES
    for number in range(64_00):
        counts[lane_of(str(UUID(int=number * 7919)))] += 1
    assert LANES == 64
    assert min(counts) > 50
    assert max(counts) < 160


def test_new_ids_are_version_7_and_ordered():
    made = [new_id() for _ in range(10_000)]
    assert {made_id.version for made_id in made} == {7}
    assert all(isinstance(made_id, UUID) for made_id in made[:10])
    assert all(a < b for a, b in pairwise(made))


def test_derived_event_id_is_the_same_for_ever():
    cause = UUID(int=1)
    assert UUID("b1874861-1eee-5e6b-8250-8d9199fc53b3") == EVENTS_NAMESPACE
    assert derived_event_id(cause, "x.y", 0) == UUID("32eb8877-df41-5b7e-a3e0-a54f217d1185")
    assert derived_event_id(cause, "x.y", 1) == UUID("60e1f88f-b730-5d5c-8b14-95a59aa5bacc")
    assert derived_event_id(cause, "x.z", 0) != derived_event_id(cause, "x.y", 0)
    assert derived_event_id(UUID(int=2), "x.y", 0) != derived_event_id(cause, "x.y", 0)


# --- instants


@pytest.mark.parametrize(
    ("instant", "text"),
    [
        (datetime(2026, 11, 30, 9, 0, tzinfo=UTC), "2026-11-30T09:00:00Z"),
        (datetime(2026, 11, 30, 9, 0, 0, 120, tzinfo=UTC), "2026-11-30T09:00:00.000120Z"),
        (datetime(2026, 11, 30, 12, 0, tzinfo=ZoneInfo("Europe/Moscow")), "2026-11-30T09:00:00Z"),
        (datetime(2026, 12, 1, 0, 30, tzinfo=timezone(timedelta(hours=5, minutes=45))), "2026-11-30T18:45:00Z"),
        (datetime(1, 1, 1, tzinfo=UTC), "0001-01-01T00:00:00Z"),
    ],
)
def test_rfc3339_is_utc_with_z(instant: datetime, text: str):
    assert rfc3339(instant) == text


def test_both_readings_of_an_ambiguous_hour_are_told_apart():
    first = datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    assert rfc3339(first) == "2026-10-25T00:30:00Z"
    assert rfc3339(first.replace(fold=1)) == "2026-10-25T01:30:00Z"


@pytest.mark.parametrize("instant", [NAIVE, datetime(1, 1, 1, tzinfo=EAST)], ids=["naive", "range"])
def test_rfc3339_refuses_what_is_no_instant(instant: datetime):
    with pytest.raises(ValueError, match=r"naive|not representable"):
        rfc3339(instant)


# --- envelope


def test_envelope_has_exactly_the_headers_of_the_contract():
    tenant, event_id, cause = uuid4(), uuid4(), uuid4()
    full = Message(NOTED, "key-1", {}, NOW, tenant, 17, "subject-1", event_id)
    assert envelope(full, Cause("corr-1", cause)) == {
        "content-type": "application/json",
        "ce_specversion": "1.0",
        "ce_id": str(event_id),
        "ce_source": "/pin/test",
        "ce_type": "test.noted",
        "ce_time": "2026-11-30T09:00:00Z",
        "ce_subject": "subject-1",
        "ce_aggregatetype": "Note",
        "ce_contractversion": "1",
        "ce_eventclass": "domain",
        "ce_correlationid": "corr-1",
        "ce_sequence": "17",
        "ce_tenantid": str(tenant),
        "ce_causationid": str(cause),
    }


def test_envelope_leaves_out_what_an_event_lacks():
    headers = envelope(message(), CAUSE)
    assert not headers.keys() & {"ce_sequence", "ce_tenantid", "ce_causationid"}
    assert headers["ce_subject"] == "k"
    assert envelope(message(sequence=0), CAUSE)["ce_sequence"] == "0"


# --- emit


async def test_rows_stand_in_the_given_order_with_every_column(system: Database, admin: Connection):
    run, tenant = new_id(), uuid4()
    messages = [message({"n": n}, key=f"k{n % 3}", tenant_id=tenant, sequence=n) for n in range(50)]
    async with system.write() as session:
        await OUTBOX.emit(session, messages, Cause("corr", run_id=run))
        xid = await (await driver_connection(session)).fetchval("select pg_current_xact_id()::text")
    stored = await rows(admin)
    assert [row["event_id"] for row in stored] == [m.event_id for m in messages]
    assert [orjson.loads(row["payload"]) for row in stored] == [{"n": n} for n in range(50)]
    for row, sent in zip(stored, messages, strict=True):
        assert orjson.loads(row["headers"]) == envelope(sent, Cause("corr", run_id=run))
        assert (row["topic"], row["type"], row["aggregatetype"]) == ("pin.test.note.v1", "test.noted", "Note")
        assert (row["message_key"], row["aggregateid"], row["lane"]) == (sent.key, sent.key, lane_of(sent.key))
        assert (row["tenant_id"], row["run_id"], row["occurred_at"]) == (tenant, run, NOW)
        assert (row["attempts"], row["parked_at"]) == (0, None)
    assert {str(row["xid"]) for row in await admin.fetch("select xid::text from crm.outbox")} == {xid}


async def test_any_text_survives_the_way_into_the_table(system: Database, admin: Connection):
    awkward = [
        "tab\there",
        "line\nbreak",
        "back\\slash",
        "\\N",
        "\\.",
        "\r",
        "Ж😀",
        " ",
        "'\"",
        "\x01\x7f",
        "null",
        "\\x41",
    ]
    async with system.write() as session:
        for text in awkward:
            sent = message({text: text}, key=text, aggregate_id=text + "!")
            await OUTBOX.emit(session, [sent], Cause(text))
    stored = await rows(admin)
    assert [row["message_key"] for row in stored] == awkward
    assert [row["aggregateid"] for row in stored] == [text + "!" for text in awkward]
    assert [orjson.loads(row["payload"]) for row in stored] == [{text: text} for text in awkward]
    assert [orjson.loads(row["headers"])["ce_correlationid"] for row in stored] == awkward


async def test_a_rollback_leaves_nothing(system: Database, admin: Connection):
    async def fail_after_emitting() -> None:
        async with system.write() as session:
            await OUTBOX.emit(session, [message(), message()], CAUSE)
            raise LookupError

    with pytest.raises(LookupError):
        await fail_after_emitting()
    assert await rows(admin) == []


async def test_rows_are_not_seen_before_the_caller_commits(system: Database, admin: Connection):
    async with system.write() as session:
        await OUTBOX.emit(session, [message()], CAUSE)
        assert await rows(admin) == []
    assert len(await rows(admin)) == 1


async def test_emitting_nothing_wakes_nobody(scratch: TestDatabase, opened: Callable[..., Database]):
    woken: list[int] = []
    database = opened(scratch.system_url, on_commit=lambda: woken.append(1))
    async with database.write() as session:
        await OUTBOX.emit(session, [], CAUSE)
    assert woken == []


async def test_a_payload_that_is_not_json_is_refused_and_nothing_is_written(system: Database, admin: Connection):
    refused = [
        {"a": b"bytes"},
        {"a": {1, 2}},
        {"a": float("nan")},
        {"a": [1, {"b": float("inf")}]},
        {1: "number as key"},
        {"a": NAIVE},
        {"a": NOW},
        {"a": date(2026, 11, 30)},
        {"a": 2**64},
        {"a": "\ud800"},
        {"a": object()},
    ]
    async with system.write() as session:
        for payload in refused:
            with pytest.raises(MessageRefused, match=r"test\.noted .* can't be encoded"):
                await OUTBOX.emit(session, [message(), message(payload)], CAUSE)
    assert await rows(admin) == []


async def test_null_and_the_word_null_are_accepted(system: Database, admin: Connection):
    payload = {"a": None, "b": "null", "c": [None, 1.5], "d": {"e": None}}
    async with system.write() as session:
        await OUTBOX.emit(session, [message(payload)], CAUSE)
    assert orjson.loads((await rows(admin))[0]["payload"]) == payload


async def test_an_envelope_that_cannot_be_stored_is_refused(system: Database, admin: Connection):
    refused = [
        {"at": NAIVE},
        {"at": datetime(1, 1, 1, tzinfo=EAST)},
        {"key": "a\0b"},
        {"aggregate_id": "a\0b"},
        {"key": "\ud800"},
        {"key": "\ud800", "aggregate_id": "fine"},
    ]
    async with system.write() as session:
        for fields in refused:
            with pytest.raises(MessageRefused):
                await OUTBOX.emit(session, [message(), message(**fields)], CAUSE)
        await OUTBOX.emit(session, [message(key="still usable")], CAUSE)
    assert [row["message_key"] for row in await rows(admin)] == ["still usable"]


async def test_a_record_is_refused_from_one_byte_over_the_limit(system: Database, admin: Connection):
    def of_size(size: int) -> Message:
        sent = message({"a": ""})
        overhead = len(b"k") + len(orjson.dumps(sent.payload)) + len(orjson.dumps(envelope(sent, CAUSE)))
        return Message(NOTED, "k", {"a": "x" * (size - overhead)}, NOW, event_id=sent.event_id)

    async with system.write() as session:
        with pytest.raises(MessageRefused, match=f"{MAX_RECORD_BYTES + 1} bytes"):
            await OUTBOX.emit(session, [message(), of_size(MAX_RECORD_BYTES + 1)], CAUSE)
        await OUTBOX.emit(session, [of_size(MAX_RECORD_BYTES)], CAUSE)
    assert len(await rows(admin)) == 1


async def test_the_limit_counts_bytes_and_not_characters(system: Database):
    async with system.write() as session:
        with pytest.raises(MessageRefused, match="bytes"):
            await OUTBOX.emit(session, [message({"a": "Ж" * (MAX_RECORD_BYTES // 2)})], CAUSE)


async def test_the_api_role_may_emit_and_may_not_read(scratch: TestDatabase, opened: Callable[..., Database]):
    database = opened(scratch.api_url)
    async with database.write() as session:
        await OUTBOX.emit(session, [message()], CAUSE)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        async with database.read() as session:
            await (await driver_connection(session)).fetch("select * from crm.outbox")
