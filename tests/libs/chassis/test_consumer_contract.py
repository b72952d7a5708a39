"""Records that can't be understood are kept byte for byte and announced once, and hold up nobody."""

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import orjson
import pytest
from consumer_world import NOTED, Desk, Note, Tape, envelope_headers, handling_of, letters, notes_consumer, written
from pydantic import BaseModel

from chassis.consumers import Consumer, Handler
from chassis.consumers.batches import Batches
from chassis.consumers.store import record_of
from chassis.db import Database
from chassis.messaging import Place
from chassis.runtime import Stop

SECRET = "ivan.petrov@example.org"
GOOD = orjson.dumps({"number": 7, "key": "k"})
Connection = asyncpg.Connection


def changed(**changes: str | None) -> list[tuple[str, bytes | None]]:
    """Return headers with a change."""
    return [*envelope_headers(uuid4(), **changes)]


def with_raw(name: str, value: bytes | None) -> list[tuple[str, bytes | None]]:
    """Return headers of which one is put in place of what it should be."""
    return [(name, value) if have == name else (have, kept) for have, kept in changed()]


BROKEN: dict[str, tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], str]] = {
    "undecodable": (b"k", b"\xff\xfe\x00", changed(), "not_json"),
    "empty value": (b"k", b"", changed(), "empty_value"),
    "tombstone": (b"k", None, changed(), "empty_value"),
    "NaN": (b"k", b'{"number": NaN, "key": "k"}', changed(), "not_json"),
    "infinite number": (b"k", b'{"number": 1e400, "key": "k"}', changed(), "not_json"),
    "deep JSON": (b"k", b"[" * 200_000, changed(), "not_json"),
    "lone surrogate": (b"k", b'{"number": 1, "key": "\\ud800"}', changed(), "not_json"),
    "schema: field missing": (b"k", orjson.dumps({"key": SECRET}), changed(), "schema_breached"),
    "schema: wrong type": (b"k", orjson.dumps({"number": SECRET, "key": "k"}), changed(), "schema_breached"),
    "schema: no object": (b"k", orjson.dumps([SECRET]), changed(), "schema_breached"),
    "schema: null": (b"k", b"null", changed(), "schema_breached"),
    "no headers": (b"k", GOOD, [], "header_missing"),
    "no ce_id": (b"k", GOOD, changed(ce_id=None), "header_missing"),
    "no ce_type": (b"k", GOOD, changed(ce_type=None), "header_missing"),
    "no ce_time": (b"k", GOOD, changed(ce_time=None), "header_missing"),
    "no ce_contractversion": (b"k", GOOD, changed(ce_contractversion=None), "header_missing"),
    "ce_id": (b"k", GOOD, changed(ce_id=SECRET), "header_malformed"),
    "ce_id empty": (b"k", GOOD, changed(ce_id=""), "header_missing"),
    "ce_id null": (b"k", GOOD, with_raw("ce_id", None), "header_missing"),
    "ce_id not UTF-8": (b"k", GOOD, with_raw("ce_id", b"\xff"), "header_malformed"),
    "ce_time naive": (b"k", GOOD, changed(ce_time="2026-11-30T09:00:00"), "header_malformed"),
    "ce_time no instant": (b"k", GOOD, changed(ce_time=SECRET), "header_malformed"),
    "ce_time before time": (b"k", GOOD, changed(ce_time="0001-01-01T00:00:00+14:00"), "header_malformed"),
    "ce_sequence": (b"k", GOOD, changed(ce_sequence="-1"), "header_malformed"),
    "ce_sequence huge": (b"k", GOOD, changed(ce_sequence="9" * 5000), "header_malformed"),
    "ce_sequence other digits": (b"k", GOOD, changed(ce_sequence="١"), "header_malformed"),
    "ce_tenantid": (b"k", GOOD, changed(ce_tenantid=SECRET), "header_malformed"),
    "ce_replayid": (b"k", GOOD, changed(ce_replayid=SECRET), "header_malformed"),
    "ce_correlationid with NUL": (b"k", GOOD, changed(ce_correlationid="a\0b"), "header_malformed"),
    "ce_correlationid huge": (b"k", GOOD, changed(ce_correlationid="a" * 950_000), "header_malformed"),
    "ce_subject huge": (b"k", GOOD, changed(ce_subject="a" * 950_000), "header_malformed"),
    "unknown version": (b"k", GOOD, changed(ce_contractversion="2"), "version_unknown"),
    "keyless": (None, b"", changed(), "empty_value"),
    "empty key": (b"", b"", changed(), "empty_value"),
    "key not UTF-8": (b"\xff\x00", b"", changed(), "empty_value"),
    "key with NUL": (b"a\0b", b"", changed(), "empty_value"),
    "huge key": (b"k" * 950_000, b"", changed(), "empty_value"),
    "duplicate headers": (b"k", b"", [*changed(), ("x", b"1"), ("x", b"2"), ("x", None), ("x", b"")], "empty_value"),
    "header name with NUL": (b"k", b"", [*changed(), ("x\0y", b"1"), ("x\0y", None)], "empty_value"),
    "no header value is text": (b"k", b"", [*changed(), ("x", bytes(range(256)))], "empty_value"),
}


async def take(batches: Batches, tape: Tape) -> dict[Place, int]:
    """Take a tape's records through; nothing may be left unresolved."""
    progress = await batches.take(tape.records, Stop())
    assert not progress.behind
    return progress.commit


async def announced(admin: Connection) -> list[dict[str, Any]]:
    """Return the payloads of what was announced."""
    rows = await admin.fetch("select payload from crm.outbox where type = 'message.quarantined' order by id")
    return [orjson.loads(row["payload"]) for row in rows]


@pytest.mark.req("EVT-105", "EVT-118", "EVT-119")
@pytest.mark.parametrize("case", BROKEN)
async def test_an_unreadable_record_is_kept_byte_for_byte_and_the_others_are_handled(
    case: str, system: Database, admin: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    key, value, headers, code = BROKEN[case]
    desk, tape = Desk(), Tape("pin.test.notes.v1")
    tape.note("k", 1)
    broken = tape.raw(key, value, headers)
    tape.note("k", 2)
    batches = Batches(handling_of(system, notes_consumer(tape.topic, desk)), pauses=(0.01,))
    assert await take(batches, tape) == {Place(tape.topic, 0): 3}
    assert desk.calls == [1, 2]
    [row] = await admin.fetch("select * from crm.dead_letter")
    assert record_of(row) == broken
    assert (row["disposition"], row["error_code"], row["attempts"]) == ("quarantine", code, 1)
    [event] = await announced(admin)
    assert event["deadLetterId"] == str(row["id"])
    assert (event["topic"], event["offset"], event["errorCode"]) == (tape.topic, 1, code)
    assert SECRET not in row["error"] + str(event) + "".join(capsys.readouterr())
    assert await take(batches, tape)  # redelivery
    assert len(await announced(admin)) == len(await letters(system)) == 1
    assert await written(system) == [("k", 1), ("k", 2)]


@pytest.mark.req("EVT-105")
async def test_a_whole_batch_of_unreadable_records_is_set_aside_in_one_transaction(
    system: Database, admin: Connection
) -> None:
    desk, tape = Desk(), Tape("pin.test.notes.v1")
    for key, value, headers, _ in BROKEN.values():
        tape.raw(key, value, headers)
        tape.note("k", len(tape.records))
    await take(Batches(handling_of(system, notes_consumer(tape.topic, desk))), tape)
    assert [code for _, code in await letters(system)] == [code for *_, code in BROKEN.values()]
    assert await admin.fetchval("select count(distinct xmin::text) from crm.dead_letter") == 1
    assert len(desk.calls) == len(BROKEN)


async def test_unknown_types_and_headers_are_ignored_and_counted(system: Database) -> None:
    desk, tape = Desk(), Tape("pin.test.notes.v1")
    tape.note("k", 1, ce_type="test.something-new")
    tape.raw(b"k", b"\xff", changed(ce_type="test.something-new", ce_id="no uuid"))
    tape.raw(b"k", GOOD, [*changed(), ("ce_futureextension", b"\xff"), ("x-foreign", b"\xff"), ("x-null", None)])
    handling = handling_of(system, notes_consumer(tape.topic, desk))
    assert await take(Batches(handling), tape) == {Place(tape.topic, 0): 3}
    assert desk.calls == [7]
    assert handling.metrics.ignored.labels(handling.consumer.group)._value.get() == 2
    assert await letters(system) == []


async def test_of_a_header_that_comes_twice_the_last_counts(system: Database) -> None:
    desk, tape = Desk(), Tape("pin.test.notes.v1")
    tape.raw(b"k", GOOD, [*changed(ce_contractversion="9"), ("ce_contractversion", b"1")])
    await take(Batches(handling_of(system, notes_consumer(tape.topic, desk))), tape)
    assert desk.calls == [7]


class Strict(BaseModel):
    """A payload with a mapping whose keys are the sender's."""

    number: int
    phones: dict[str, int] = {}


def _parse_strictly(value: Any) -> Note:
    return Note(Strict.model_validate(value).number, "k")


def _stumble(_: Any) -> Note:
    raise RuntimeError(SECRET)


@pytest.mark.req("EVT-105")
@pytest.mark.parametrize(
    ("parse", "told"),
    [
        (_parse_strictly, "wrong: number (int_parsing), phones.* (int_parsing)"),
        (_stumble, "RuntimeError while parsing"),
    ],
)
async def test_what_is_wrong_is_told_without_the_senders_words(
    system: Database, parse: Callable[[Any], Note], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    desk, tape = Desk(), Tape("pin.test.notes.v1")
    tape.raw(b"k", orjson.dumps({"number": SECRET, "phones": {SECRET: SECRET}}), changed())
    consumer = Consumer("pin.crm.strict", [Handler(tape.topic, NOTED, parse, desk.handle)])
    await take(Batches(handling_of(system, consumer)), tape)
    assert await letters(system, "error") == [(told,)]
    assert SECRET not in "".join(capsys.readouterr())


async def test_a_huge_integer_fails_in_the_handler_and_parks_its_key(system: Database) -> None:
    desk, tape = Desk(), Tape("pin.test.notes.v1")
    tape.raw(b"k", b'{"number": 123456789012345678901234567890, "key": "k"}', changed())
    await take(Batches(handling_of(system, notes_consumer(tape.topic, desk)), pauses=(0.01,)), tape)
    assert await letters(system) == [("exhausted", "22000")]


@pytest.mark.parametrize("key", [b"k" * 3000, bytes(range(256)) * 40, b"\xff\0", None])
async def test_a_key_of_any_form_can_be_parked(key: bytes | None, system: Database, admin: Connection) -> None:
    desk, tape = Desk({7: lambda: 1 / 0}), Tape("pin.test.notes.v1")
    tape.raw(key, GOOD, changed())
    tape.raw(key, GOOD, changed())
    await take(Batches(handling_of(system, notes_consumer(tape.topic, desk)), pauses=(0.01,)), tape)
    second = "exhausted" if key is None else "parked"
    assert [kept for kept, _ in await letters(system)] == ["exhausted", second]
    rows = await admin.fetch("select * from crm.dead_letter order by position")
    assert [record_of(row) for row in rows] == tape.records
    assert isinstance(rows[0]["event_id"], UUID)
