"""Dead letters as the person on call meets them: over HTTP and on the command line, every act audited."""

import argparse
import base64
import os
import pwd
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from crm_world import TENANT, World, token

from chassis.consumers import admin
from chassis.consumers.envelope import Envelope
from chassis.consumers.faults import Fault
from chassis.consumers.store import Letter, Store
from chassis.messaging import Received

GROUP = "pin.crm.hold-answers"
TOPIC = "pin.chessboard.hold-answered.v1"
SCOPES = "crm:dead-letters:read crm:dead-letters:operate"
PATH = "/v1/admin/dead-letters"
BYTES = b'{"a": 1, \xff\x00}'

Kept = Callable[..., Awaitable[UUID]]


@pytest.fixture
def keep(world: World) -> Kept:
    """Sets records aside and returns their dead letters' ids."""
    database, store, numbers = world.system(), Store("crm", GROUP), iter(range(10_000))

    async def keep_one(disposition: str = "quarantine", key: bytes = b"unit-1", code: str = "not_json") -> UUID:
        record = Received(TOPIC, 3, next(numbers), 1_764_493_200_123, key, BYTES, (("ce_type", b"x"), ("h", b"\xff")))
        envelope = Envelope(uuid4(), "x", "1", world.now, "unit-1", None, TENANT, "request-1")
        fault = Fault("Unreadable", code, "not JSON at byte 9")
        letter = Letter(record, envelope, "x", fault, disposition, 5, world.now, world.now)
        async with database.write() as session:
            if disposition == "exhausted":
                await store.park(session, letter, world.now + timedelta(hours=1))
            else:
                await store.set_aside(session, letter)
        (row,) = await world.admin.fetch("select id from crm.dead_letter order by position desc limit 1")
        return row["id"]

    return keep_one


@pytest.fixture
def on_call(world: World) -> httpx.AsyncClient:
    """A client of somebody who operates the platform."""
    return world.client(bearer=token(scope=SCOPES, roles=["platform-admin"], sub="olga"))


@pytest.mark.req("EVT-105", "EVT-119")
async def test_dead_letters_are_listed_by_filter_and_page(keep: Kept, on_call: httpx.AsyncClient) -> None:
    ids = [await keep(code=code) for code in ("not_json", "empty_value", "not_json")]
    first = (await on_call.get(PATH, params={"errorCode": "not_json", "limit": 1})).json()
    second = (await on_call.get(PATH, params={"errorCode": "not_json", "limit": 1, "after": first["next"]})).json()
    assert [first["items"][0]["id"], second["items"][0]["id"]] == [str(ids[0]), str(ids[2])]
    assert second["next"] is None
    assert first["items"][0]["disposition"] == "quarantine"
    assert "value" not in first["items"][0]


@pytest.mark.req("OPS-153b")
async def test_every_consumer_has_dead_letters_of_its_own(world: World, keep: Kept, on_call: httpx.AsyncClient) -> None:
    mine = await keep()
    record = Received(TOPIC, 3, 0, 1_764_493_200_123, b"unit-1", BYTES, ())
    letter = Letter(record, None, None, Fault("Unreadable", "not_json", ""), "quarantine", 1, world.now, world.now)
    async with world.system().write() as session:
        await Store("crm", "pin.crm.offers").set_aside(session, letter)
    listed = (await on_call.get(PATH, params={"consumer": GROUP})).json()["items"]
    assert [item["id"] for item in listed] == [str(mine)]
    (others,) = (await on_call.get(PATH, params={"consumer": "pin.crm.offers"})).json()["items"]
    assert (others["topic"], others["recordOffset"]) == (TOPIC, 0), "the same record, for another consumer"


async def test_a_dead_letter_is_shown_byte_for_byte(keep: Kept, on_call: httpx.AsyncClient) -> None:
    shown = (await on_call.get(f"{PATH}/{await keep()}")).json()
    assert base64.b64decode(shown["value"]) == BYTES
    assert [(name, base64.b64decode(value)) for name, value in shown["headers"]] == [("ce_type", b"x"), ("h", b"\xff")]
    assert shown["recordedAt"] == "2025-11-30T09:00:00.123000Z"
    assert (await on_call.get(f"{PATH}/{uuid4()}")).json()["code"] == "dead_letter_not_found"


async def test_a_record_with_odd_headers_can_be_shown_and_discarded(world: World, on_call: httpx.AsyncClient) -> None:
    headers = (("empty", None), ("n\0l", b"x"), ("n\0l", None))
    record = Received(TOPIC, 3, 0, 1_764_493_200_123, b"unit-1", None, headers)
    letter = Letter(record, None, None, Fault("Unreadable", "not_json", ""), "quarantine", 1, world.now, world.now)
    async with world.system().write() as session:
        await Store("crm", GROUP).set_aside(session, letter)
    (row,) = await world.admin.fetch("select id from crm.dead_letter")
    shown = (await on_call.get(f"{PATH}/{row['id']}")).json()
    assert (shown["value"], shown["headers"]) == (None, [["empty", None], ["n\0l", "eA=="], ["n\0l", None]])
    answer = await on_call.post(f"{PATH}/{row['id']}/discard", json={"reason": "sent by hand"})
    assert (answer.status_code, answer.json()["resolution"]) == (200, "discarded")


@pytest.mark.req("EVT-105", "EVT-119")
async def test_a_retry_counts_first_and_then_asks_and_is_audited(
    world: World, keep: Kept, on_call: httpx.AsyncClient
) -> None:
    asked, other = await keep(), await keep("refused", code="HOLD_MISMATCH")
    body = {"disposition": "quarantine", "dryRun": True}
    assert (await on_call.post(f"{PATH}/retry", json=body)).json() == {"count": 1, "dryRun": True}
    assert await world.audit() == []
    answer = await on_call.post(f"{PATH}/retry", json=body | {"dryRun": False})
    assert (answer.status_code, answer.json()["count"]) == (202, 1)
    rows = dict(await world.admin.fetch("select id, retry_requested_at from crm.dead_letter"))
    assert rows == {asked: world.now, other: None}
    (record,) = await world.audit("dead-letter.retry-requested")
    assert (record["actor"], record["entity_id"]) == ("olga", asked)


async def test_a_retry_of_a_parked_key_makes_it_due(world: World, keep: Kept, on_call: httpx.AsyncClient) -> None:
    parked = await keep("exhausted")
    assert (await on_call.post(f"{PATH}/{parked}/retry")).status_code == 202
    assert await world.admin.fetchval("select next_attempt_at from crm.parked_key") == world.now


@pytest.mark.req("EVT-105", "EVT-119")
async def test_what_is_discarded_is_settled_with_its_reason_and_frees_its_key(
    world: World, keep: Kept, on_call: httpx.AsyncClient
) -> None:
    head = await keep("exhausted")
    behind = await keep("parked", code="")
    for nothing in ("", " \n"):
        assert (await on_call.post(f"{PATH}/{head}/discard", json={"reason": nothing})).status_code == 422
    answer = await on_call.post(f"{PATH}/{head}/discard", json={"reason": "sent by a test"})
    assert (answer.status_code, answer.json()["resolution"]) == (200, "discarded")
    assert await world.admin.fetchval("select next_attempt_at from crm.parked_key") == world.now, "the next one is due"
    again = await on_call.post(f"{PATH}/{head}/discard", json={"reason": "again"})
    assert (again.status_code, again.json()["code"]) == (409, "dead_letter_resolved")
    assert (await on_call.post(f"{PATH}/{head}/retry")).status_code == 409
    await on_call.post(f"{PATH}/{behind}/discard", json={"reason": "too"})
    assert await world.admin.fetchval("select count(*) from crm.parked_key") == 0
    assert await world.admin.fetchval("select count(*) from crm.inbox") == 2, "a redelivery is taken for handled"
    assert [row["details"]["reason"] for row in await world.audit("dead-letter.discarded")] == ["sent by a test", "too"]


@pytest.mark.parametrize(
    ("claims", "code"),
    [
        ({"scope": "crm:deals:read", "roles": ["platform-admin"]}, "forbidden"),
        ({"scope": SCOPES, "roles": ["ADMIN"]}, "forbidden"),
    ],
    ids=["no scope", "a tenant's own admin"],
)
async def test_nobody_else_reaches_them(world: World, keep: Kept, claims: dict[str, Any], code: str) -> None:
    letter = await keep()
    client = world.client(bearer=token(**claims))
    for answer in (
        await client.get(PATH),
        await client.get(f"{PATH}/{letter}"),
        await client.post(f"{PATH}/{letter}/retry"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (403, code)


async def test_the_command_line_does_the_same(world: World, keep: Kept) -> None:
    letter = await keep()
    parser = argparse.ArgumentParser()
    admin.add_arguments(parser)

    async def says(*arguments: str) -> list[str]:
        return await admin.run(world.system(), "crm", world.clock, parser.parse_args(arguments))

    assert str(letter) in (await says("list"))[0]
    assert base64.b64encode(BYTES).decode() in (await says("show", str(letter)))[0]
    assert await says("retry", "--error-code", "not_json", "--dry-run") == ["would retry 1"]
    with pytest.raises(ValueError, match="--all"):
        await says("retry")
    assert await says("retry", str(letter)) == ["retry requested for 1"]
    for nothing in ("", "  "):
        with pytest.raises(ValueError, match="for a reason"):
            await says("discard", str(letter), "--reason", nothing)
    assert await says("discard", str(letter), "--reason", "a test") == [f"discarded {letter}"]
    assert await says("list") == []
    actors = {row["actor"] for row in await world.audit()}
    assert len(actors) == 1
    assert actors.pop().startswith("cli:")


async def test_the_command_line_works_for_a_user_without_a_name(
    world: World, keep: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_name(_: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_name)
    parser = argparse.ArgumentParser()
    admin.add_arguments(parser)
    letter = await keep()
    await admin.run(world.system(), "crm", world.clock, parser.parse_args(["retry", str(letter)]))
    assert [row["actor"] for row in await world.audit()] == [f"cli:uid-{os.getuid()}"]
