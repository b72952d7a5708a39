"""Idempotency-Key: a request runs once, its answer comes again as it was, and nobody else sees it."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import asyncpg
import httpx
import orjson
import pytest
from crm_world import OTHER_TENANT, READ, WRITE, World, token
from sqlalchemy import text

from chassis import idempotency
from chassis.db import Actor
from chassis.idempotency import IdempotencyKeys

AT = "2026-11-30T09:00:00Z"
STEP = {"type": "DocumentRequested", "occurredAt": AT}
KEYS = IdempotencyKeys("crm")


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client()


async def post(client: httpx.AsyncClient, path: str, body: object = None, key: str = "k", **headers: str):
    return await client.post(path, json=body, headers={"idempotency-key": key, **headers})


async def opened(client: httpx.AsyncClient, title: str = "Flat", key: str = "k", **headers: str) -> httpx.Response:
    return await post(client, "/v1/deals", {"title": title}, key, **headers)


async def deals(world: World) -> int:
    return await world.admin.fetchval("select count(*) from crm.deal")


async def kept(world: World) -> int:
    return await world.admin.fetchval("select count(*) from crm.idempotency_key")


async def test_the_same_request_again_runs_once_and_gets_the_same_answer(world: World, client):
    first = await opened(client)
    again = await opened(client)
    assert (again.status_code, again.content) == (201, first.content)
    for name in ("content-type", "etag", "location"):
        assert again.headers[name] == first.headers[name]
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    assert await deals(world) == 1
    assert len(await world.audit()) == 1


async def test_without_a_key_every_request_runs(world: World, client):
    for _ in range(2):
        assert (await client.post("/v1/deals", json={"title": "Flat"})).status_code == 201
    assert (await deals(world), await kept(world)) == (2, 0)


async def test_a_route_without_a_body_replays_and_adds_no_event(world: World, client):
    deal = (await opened(client)).json()["id"]
    first = await post(client, f"/v1/deals/{deal}/complete")
    events = len(await world.outbox())
    again = await post(client, f"/v1/deals/{deal}/complete")
    assert (first.status_code, again.status_code, again.content) == (200, 200, first.content)
    assert len(await world.outbox()) == events


async def test_the_answer_stays_what_it_was_though_the_deal_has_moved_on(client):
    deal = (await opened(client)).json()["id"]
    first = await post(client, f"/v1/deals/{deal}/timeline", STEP)
    await client.post(f"/v1/deals/{deal}/complete")
    again = await post(client, f"/v1/deals/{deal}/timeline", STEP)
    assert (again.status_code, again.content, again.headers["etag"]) == (201, first.content, first.headers["etag"])


async def test_if_match_is_not_asked_again_of_a_request_that_has_run(client):
    deal = (await opened(client)).json()["id"]
    for _ in range(2):
        answer = await post(client, f"/v1/deals/{deal}/timeline", STEP, **{"if-match": '"1"'})
        assert answer.status_code == 201


async def test_the_same_key_with_another_body_is_refused(world: World, client):
    await opened(client)
    answer = await opened(client, "House")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert await deals(world) == 1


async def test_the_same_key_for_another_deal_is_refused(world: World, client):
    one, two = [(await opened(client, key=f"open {n}".replace(" ", "-"))).json()["id"] for n in range(2)]
    assert (await post(client, f"/v1/deals/{one}/complete")).status_code == 200
    answer = await post(client, f"/v1/deals/{two}/complete")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_key_reused")
    assert (await client.get(f"/v1/deals/{two}")).json()["status"] == "Active"


async def test_json_that_means_the_same_is_the_same_request(world: World, client):
    path, headers = "/v1/deals", {"content-type": "application/json", "idempotency-key": "k"}
    assert (await client.post(path, content=b'{"title":"Flat"}', headers=headers)).status_code == 201
    again = await client.post(path, content=b' {"title" : "Fl\\u0061t"}\n', headers=headers)
    assert (again.status_code, again.headers.get("idempotency-replayed")) == (201, "true")


async def test_large_numbers_that_differ_are_different_requests(world: World, client):
    deal = (await opened(client)).json()["id"]
    path, headers = f"/v1/deals/{deal}/timeline", {"content-type": "application/json", "idempotency-key": "k"}
    answers = []
    for number in (2**64 + 1, 2**64 + 2):
        body = orjson.dumps(STEP)[:-1] + b',"payload":{"n":%d}}' % number
        answers.append((await client.post(path, content=body, headers=headers)).status_code)
    assert answers == [201, 422]


@pytest.mark.parametrize("levels", [200, 300, 900])
async def test_a_deeply_nested_body_under_a_key_is_refused_as_without_one(client, levels: int):
    body = b'{"a":' * levels + b"1" + b"}" * levels
    for headers in ({}, {"idempotency-key": "k"}):
        answer = await client.post("/v1/deals", content=body, headers={"content-type": "application/json"} | headers)
        assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")


async def test_one_key_serves_two_routes_apart(client):
    deal = (await opened(client)).json()["id"]
    assert (await post(client, f"/v1/deals/{deal}/timeline", STEP)).status_code == 201
    assert (await post(client, f"/v1/deals/{deal}/complete")).status_code == 200


async def test_another_tenant_or_person_gets_an_answer_of_its_own(world: World, client):
    mine = (await opened(client)).json()["id"]
    for bearer in (token(OTHER_TENANT), token(sub="user-8"), token(OTHER_TENANT, sub="user-8")):
        answer = await opened(world.client(bearer=bearer))
        assert answer.status_code == 201
        assert "idempotency-replayed" not in answer.headers
        assert answer.json()["id"] != mine
    assert await kept(world) == 4


async def test_the_database_shows_a_kept_answer_to_its_tenant_and_person_alone(world: World, client):
    await opened(client)
    (row,) = await world.admin.fetch("select tenant_id, subject from crm.idempotency_key")
    for tenant, subject, seen in (
        (row["tenant_id"], row["subject"], 1),
        (OTHER_TENANT, row["subject"], 0),
        (row["tenant_id"], "user-8", 0),
        (None, row["subject"], 0),
    ):
        async with world.api().read(Actor(tenant, None, subject)) as session:
            count = (await session.execute(text("select count(*) from crm.idempotency_key"))).scalar_one()
        assert count == seen


async def test_a_person_without_the_scope_gets_no_kept_answer(world: World, client):
    await opened(client)
    answer = await opened(world.client(bearer=token(scope=READ)))
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


@pytest.mark.parametrize("key", ["", "a b", "k" * 256, "ключ", "a\tb", "a\x7f", "a\x80"])
async def test_a_key_that_is_none_is_refused(world: World, client, key: str):
    headers = [(b"idempotency-key", key.encode()), (b"content-type", b"application/json")]
    answer = await client.post("/v1/deals", content=b'{"title": "Flat"}', headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_error")
    assert answer.json()["errors"][0]["location"] == "header.Idempotency-Key"
    assert await deals(world) == 0


@pytest.mark.parametrize("key", ["k", "!", "~" * 255, str(uuid4())], ids=["short", "mark", "long", "uuid"])
async def test_any_visible_ascii_is_a_key(client, key: str):
    assert (await opened(client, key=key)).status_code == 201


# Failures are not kept.


async def test_a_refused_request_is_not_kept_and_runs_when_it_is_right(world: World, client):
    assert (await opened(client, "")).status_code == 422
    answer = await opened(client, "Flat")
    assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (201, None)


async def test_a_refusal_of_the_domain_is_not_kept_and_runs_when_the_deal_allows_it(world: World, client):
    deal = (await opened(client)).json()["id"]
    upload = STEP | {"type": "DocumentUploaded"}
    assert (await post(client, f"/v1/deals/{deal}/timeline", upload)).status_code == 409
    await client.post(f"/v1/deals/{deal}/timeline", json=STEP)
    assert (await post(client, f"/v1/deals/{deal}/timeline", upload)).status_code == 201


async def test_a_failed_commit_is_not_kept(world: World, client):
    await world.admin.execute(
        "create function crm.refuse() returns trigger language plpgsql as $$ begin raise exception 'no'; end $$;"
        " create constraint trigger refuse after insert on crm.deal deferrable initially deferred"
        " for each row execute function crm.refuse()"
    )
    try:
        assert (await opened(client)).status_code == 500
    finally:
        await world.admin.execute("drop trigger refuse on crm.deal; drop function crm.refuse()")
    assert (await kept(world), await deals(world)) == (0, 0)
    assert (await opened(client)).status_code == 201


async def test_a_process_that_dies_in_the_middle_leaves_nothing_in_progress(world: World, client, eventually: Callable):
    """The backend is killed between the key's insert and the commit, as when the process or the node is gone."""
    deal = await world.deal()
    async with world.admin.transaction():
        await world.admin.execute("select from crm.deal where id = $1 for update", deal)
        running = asyncio.create_task(post(client, f"/v1/deals/{deal}/timeline", STEP))
        pid = await eventually(world.blocked_pid)
        killer = await asyncpg.connect(world.database.admin_url)
        await killer.execute("select pg_terminate_backend($1)", pid)
        await killer.close()
        assert (await running).status_code == 503
    assert await kept(world) == 0
    again = await post(client, f"/v1/deals/{deal}/timeline", STEP)
    assert (again.status_code, again.headers.get("idempotency-replayed")) == (201, None)


# At once.


async def test_of_two_firsts_at_once_one_runs_and_the_other_waits_for_its_answer(
    world: World, client, eventually: Callable
):
    deal = await world.deal()
    async with world.admin.transaction():
        await world.admin.execute("select from crm.deal where id = $1 for update", deal)
        first = asyncio.create_task(post(client, f"/v1/deals/{deal}/timeline", STEP))
        await eventually(world.blocked_pid)
        second = asyncio.create_task(post(client, f"/v1/deals/{deal}/timeline", STEP))

        async def both_wait() -> bool:
            await world.admin.execute("select pg_stat_clear_snapshot()")
            waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type"
            return await world.admin.fetchval(f"{waiting} = 'Lock'") == 2

        await eventually(both_wait)
    answers = [await first, await second]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].content == answers[1].content
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, "true"]
    assert await world.admin.fetchval("select count(*) from crm.deal_timeline_event") == 1


async def test_the_one_that_waits_too_long_is_told_to_ask_again(
    world: World, client, eventually: Callable, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(idempotency, "WAIT_MILLISECONDS", 50)
    deal = await world.deal()
    async with world.admin.transaction():
        await world.admin.execute("select from crm.deal where id = $1 for update", deal)
        first = asyncio.create_task(post(client, f"/v1/deals/{deal}/timeline", STEP))
        await eventually(world.blocked_pid)
        second = await post(client, f"/v1/deals/{deal}/timeline", STEP)
        assert (second.status_code, second.json()["code"]) == (409, "request_in_progress")
        assert second.headers["retry-after"] == "1"
    assert (await first).status_code == 201, "the short wait is for the key alone, not for the deal's row"
    assert (await post(client, f"/v1/deals/{deal}/timeline", STEP)).headers["idempotency-replayed"] == "true"


async def test_when_the_first_fails_the_one_that_waited_runs(world: World, client, eventually: Callable):
    deal = await world.deal()
    async with world.admin.transaction():
        await world.admin.execute("select from crm.deal where id = $1 for update", deal)
        first = asyncio.create_task(post(client, f"/v1/deals/{deal}/timeline", STEP))
        await eventually(world.blocked_pid)
        second = asyncio.create_task(post(client, f"/v1/deals/{deal}/timeline", STEP))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    answer = await second
    assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (201, None)
    assert await world.admin.fetchval("select count(*) from crm.deal_timeline_event") == 1


async def test_a_crowd_of_the_same_request_runs_once_and_never_fails(world: World, client):
    answers = await asyncio.gather(*(opened(client) for _ in range(20)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    assert await deals(world) == 1


# Life of what is kept.


async def test_old_answers_are_purged_by_pieces_and_young_ones_stay(world: World, client):
    for number in range(5):
        await opened(client, key=f"old-{number}")
    world.clock.advance(timedelta(hours=idempotency.KEPT_HOURS))
    await opened(client, key="young")
    before = world.now - timedelta(hours=1)
    counts = []
    for _ in range(4):
        async with world.system().write() as session:
            counts.append(await KEYS.purge(session, before, limit=2))
    assert counts == [2, 2, 1, 0]
    assert [row["key"] for row in await world.admin.fetch("select key from crm.idempotency_key")] == ["young"]


async def test_the_purge_walks_the_index_and_skips_what_is_locked(world: World, client):
    for number in range(3):
        await opened(client, key=f"k{number}")
    world.clock.advance(timedelta(days=2))
    async with world.admin.transaction():
        await world.admin.execute("select from crm.idempotency_key where key = 'k0' for update")
        async with world.system().write() as session:
            await session.execute(text("set local lock_timeout = '1s'"))
            assert await KEYS.purge(session, world.now, limit=10) == 2
    await world.admin.execute("set enable_seqscan = off")
    plan = await world.admin.fetch(
        "explain select ctid from crm.idempotency_key where created_at < $1 order by created_at limit 10", world.now
    )
    await world.admin.execute("reset enable_seqscan")
    assert any("ix_idempotency_key_created_at" in line[0] for line in plan)


async def test_a_key_is_never_committed_without_its_answer(world: World, client):
    await opened(client)
    deal = (await opened(client, key="other")).json()["id"]
    await post(client, f"/v1/deals/{deal}/complete")
    assert await world.admin.fetchval("select count(*) from crm.idempotency_key where status is null") == 0


async def test_what_a_route_does_not_keep_it_refuses_to_be_given_a_key_for(world: World):
    crm = world.crm("api")
    crm.app.state.idempotency = None
    answer = await opened(world.client(crm, bearer=token(scope=WRITE)))
    assert (answer.status_code, answer.json()["code"]) == (400, "idempotency_key_not_supported")
    assert await deals(world) == 0
