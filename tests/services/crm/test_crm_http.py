"""Deals and their timeline over HTTP: the flow, what is refused, and that a refusal changes no row."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import httpx
import orjson
import pytest
from crm_world import AUDIENCE, NOBODY_LISTENS, OTHER_TENANT, READ, TENANT, WRITE, World, token
from joserfc.jwk import OKPKey
from structlog.testing import capture_logs

UNKNOWN = "3f6f0a52-6a0e-4b7e-9a51-0d2f1a8b7cff"
"""Id of a deal that does not exist; the same in every worker, so that all collect the same tests."""

ICON = "просрочено"
PROBLEM = "application/problem+json"
AT = "2026-11-30T09:00:00Z"
STEP = {"type": "DocumentRequested", "occurredAt": AT}
PAIRS = {
    "DocumentRequested": "DocumentUploaded",
    "PaymentRequested": "PaymentReceived",
    "SigningRequested": "Signed",
    "InspectionScheduled": "InspectionCompleted",
    "RegistrationSubmitted": "RegistrationCompleted",
}
STRANGER = OKPKey.generate_key("Ed25519", {"kid": "tests"})


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client()


def is_problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == PROBLEM
    problem = answer.json()
    assert (problem["status"], problem["code"], problem["type"]) == (status, code, f"urn:pin:problem:{code}")
    assert problem["title"]
    assert problem["detail"]
    return problem


async def open_deal(client: httpx.AsyncClient, title: str = "Flat 12") -> UUID:
    answer = await client.post("/v1/deals", json={"title": title})
    assert answer.status_code == 201, answer.text
    return UUID(answer.json()["id"])


async def add(client: httpx.AsyncClient, deal: UUID, kind: str, **more: Any) -> httpx.Response:
    return await client.post(f"/v1/deals/{deal}/timeline", json={"type": kind, "occurredAt": AT} | more)


async def tab(client: httpx.AsyncClient, deal: UUID) -> list[dict[str, Any]]:
    answer = await client.get(f"/v1/deals/{deal}/timeline")
    assert answer.status_code == 200, answer.text
    return answer.json()["items"]


# The flow.


@pytest.mark.req("TLO-02", "TLO-61c")
async def test_tab_shows_the_icon_as_soon_as_the_jobs_batch_has_committed(world: World, client) -> None:
    deal = await open_deal(client)
    due = (world.now + timedelta(hours=1)).isoformat()
    assert (await add(client, deal, "DocumentRequested", dueAt=due)).status_code == 201
    (before,) = await tab(client, deal)
    assert (before["status"], before["icon"], before["completedAt"]) == ("InProgress", None, None)
    world.clock.advance(timedelta(hours=1, seconds=1))
    assert (await world.run_job())["processed"] == 1
    (after,) = await tab(client, deal)
    assert after == before | {"status": "Overdue", "icon": ICON, "updatedAt": "2026-11-30T10:00:01Z"}
    assert (await client.get(f"/v1/deals/{deal}")).json()["overdueSteps"] == 1
    waiting = [row for row in await world.outbox() if row["type"] == "pin.crm.timeline-overdue.v1"]
    assert len(waiting) == 1, "the icon did not wait for the event to be published"


@pytest.mark.req("TLO-02")
async def test_only_an_overdue_step_has_the_icon(world: World, client) -> None:
    deal = await open_deal(client)
    for kind, closer in PAIRS.items():
        await add(client, deal, kind, dueAt="2026-11-30T10:00:00Z")
        if kind in ("PaymentRequested", "SigningRequested"):
            await add(client, deal, closer)
    await add(client, deal, "DocumentRequested")
    world.clock.advance(timedelta(days=1))
    await world.run_job()
    assert (await add(client, deal, "InspectionCompleted")).status_code == 201
    steps = await tab(client, deal)
    assert {step["status"] for step in steps} == {"InProgress", "Overdue", "Done"}
    assert all((step["icon"] == ICON) is (step["status"] == "Overdue") for step in steps)


@pytest.mark.req("TLO-07")
@pytest.mark.parametrize(("opener", "closer"), PAIRS.items())
async def test_paired_event_closes_a_step_in_progress(world: World, client, opener: str, closer: str) -> None:
    deal = await open_deal(client)
    opened = (await add(client, deal, opener, dueAt="2026-11-30T10:00:00Z")).json()
    world.clock.advance(timedelta(minutes=30))
    closing = await add(client, deal, closer)
    assert (closing.status_code, closing.json()["status"]) == (201, "Done")
    steps = {step["id"]: step for step in await tab(client, deal)}
    assert steps[opened["id"]]["status"] == "Done"
    assert steps[opened["id"]]["completedAt"] == "2026-11-30T09:30:00Z"
    world.clock.advance(timedelta(days=1))
    assert (await world.run_job())["processed"] == 0, "what is done does not become overdue"


async def test_overdue_step_is_closed_by_its_paired_event_and_the_audit_keeps_when_it_was_overdue(
    world: World, client
) -> None:
    deal = await open_deal(client)
    opened = (await add(client, deal, "PaymentRequested", dueAt="2026-11-30T08:00:00Z")).json()
    await world.run_job()
    world.clock.advance(timedelta(hours=2))
    closing = await add(client, deal, "PaymentReceived")
    assert closing.status_code == 201
    row = await world.step_row(UUID(opened["id"]))
    assert (row["status"], row["completed_at"], row["updated_at"]) == ("Done", world.now, world.now)
    (overdue,) = await world.audit("timeline-step.overdue")
    assert str(overdue["entity_id"]) == opened["id"]
    assert overdue["details"]["overdueAt"] == "2026-11-30T09:00:00Z"
    last = (await world.audit("timeline-step.added"))[-1]
    assert (last["actor"], last["details"]["closes"]) == ("user-7", opened["id"])
    done = [event["payload"] for event in await world.outbox() if event["type"] == "crm.deal.step-done"]
    assert [(event["TimelineEventId"], event["WasOverdue"], event["ClosedByEventId"]) for event in done] == [
        (opened["id"], True, closing.json()["id"])
    ]


async def test_closer_closes_the_oldest_open_step_of_its_pair(world: World, client) -> None:
    deal = await open_deal(client)
    ids = []
    for hour in ("08", "07", "06"):
        answer = await add(client, deal, "DocumentRequested", occurredAt=f"2026-11-30T{hour}:00:00Z")
        ids.append(answer.json()["id"])
    other = (await add(client, deal, "SigningRequested", occurredAt="2026-11-30T05:00:00Z")).json()["id"]
    await add(client, deal, "DocumentUploaded")
    open_steps = {step["id"] for step in await tab(client, deal) if step["status"] == "InProgress"}
    assert open_steps == {ids[0], ids[1], other}


async def test_closer_without_an_open_step_is_refused(world: World, client) -> None:
    deal = await open_deal(client)
    await add(client, deal, "SigningRequested")
    before = await world.everything()
    is_problem(await add(client, deal, "DocumentUploaded"), 409, "no_open_step")
    assert await world.everything() == before
    await add(client, deal, "DocumentRequested")
    assert (await add(client, deal, "DocumentUploaded")).status_code == 201
    is_problem(await add(client, deal, "DocumentUploaded"), 409, "no_open_step")


@pytest.mark.parametrize(("act", "status"), [("complete", "Completed"), ("cancel", "Cancelled")])
async def test_deal_that_ends_closes_its_open_steps_in_the_same_transaction(
    world: World, client, act: str, status: str
) -> None:
    deal = await open_deal(client)
    await add(client, deal, "DocumentRequested", dueAt="2026-11-30T08:00:00Z")
    await world.run_job()
    await add(client, deal, "SigningRequested", dueAt="2026-11-30T10:00:00Z")
    await world.admin.execute("delete from crm.outbox")
    answer = await client.post(f"/v1/deals/{deal}/{act}")
    assert (answer.status_code, answer.json()["status"]) == (200, status)
    assert [step["status"] for step in await tab(client, deal)] == ["Done", "Done"]
    outbox = await world.outbox()
    assert [row["type"] for row in outbox] == ["crm.deal.step-done"] * 2 + [f"crm.deal.{status.lower()}"]
    assert len({row["tx"] for row in outbox}) == 1
    assert sorted(row["payload"]["WasOverdue"] for row in outbox[:2]) == [False, True]
    world.clock.advance(timedelta(days=1))
    assert (await world.run_job())["processed"] == 0
    before = await world.everything()
    is_problem(await client.post(f"/v1/deals/{deal}/cancel"), 409, "deal_not_active")
    is_problem(await add(client, deal, "DocumentRequested"), 409, "deal_not_active")
    is_problem(await add(client, deal, "DocumentUploaded"), 409, "deal_not_active")
    assert await world.everything() == before


@pytest.mark.req("TLO-04")
async def test_no_request_makes_a_step_overdue(world: World, client) -> None:
    """Every act that the API has, on a deal with a step that is long past its due time."""
    deal = await open_deal(client)
    late = {"dueAt": "2026-11-01T00:00:00Z", "occurredAt": "2026-10-01T00:00:00Z"}
    for kind in PAIRS:
        await add(client, deal, kind, **late)
    for given in ("status", "Status"):
        is_problem(await add(client, deal, "DocumentRequested", **late, **{given: "Overdue"}), 422, "validation_error")
    await add(client, deal, "DocumentUploaded")
    await client.get(f"/v1/deals/{deal}")
    await tab(client, deal)
    await client.get("/v1/deals")
    await client.post(f"/v1/deals/{deal}/complete")
    assert await world.steps_in("Overdue") == set()
    assert len(await world.steps_in("Done")) == len(PAIRS) + 1


async def test_of_two_closers_at_once_one_closes(world: World, client) -> None:
    deal = await open_deal(client)
    await add(client, deal, "DocumentRequested")
    answers = await asyncio.gather(*(add(client, deal, "DocumentUploaded") for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [201, 409]
    assert len(await tab(client, deal)) == 2


async def test_of_two_ends_at_once_one_ends(world: World, client) -> None:
    deal = await open_deal(client)
    await add(client, deal, "DocumentRequested")
    answers = await asyncio.gather(*(client.post(f"/v1/deals/{deal}/{act}") for act in ("complete", "cancel")))
    assert sorted(answer.status_code for answer in answers) == [200, 409]
    assert (
        len([row for row in await world.outbox() if row["type"] in ("crm.deal.completed", "crm.deal.cancelled")]) == 1
    )


async def test_what_was_asked_is_what_is_kept(world: World, client) -> None:
    deal = await open_deal(client, "Квартира № 12 \\ \t «угол»")
    payload = {"document": "паспорт", "pages": [1, 2.5, None, True], "nested": {"a": {"b": '\\u0000 \\ " \t'}}}
    answer = await add(
        client, deal, "DocumentRequested", occurredAt="2026-11-30T12:00:00+03:00", dueAt=None, payload=payload
    )
    row = await world.step_row(UUID(answer.json()["id"]))
    assert orjson.loads(row["payload"]) == payload
    assert row["occurred_at"] == world.now
    assert (row["actor_user_id"], row["actor_role"], row["tenant_id"]) == ("user-7", "MANAGER", TENANT)
    assert (await client.get(f"/v1/deals/{deal}")).json()["title"] == "Квартира № 12 \\ \t «угол»"


@pytest.mark.req("EVT-126")
async def test_events_of_a_command_carry_the_request_and_the_version_of_the_deal(world: World, client) -> None:
    client.headers["x-request-id"] = "request-42"
    deal = await open_deal(client)
    await add(client, deal, "DocumentRequested")
    await add(client, deal, "DocumentUploaded")
    headers = [row["headers"] for row in await world.outbox()]
    assert [(header["ce_type"], header["ce_sequence"]) for header in headers] == [
        ("crm.deal.step-added", "2"), ("crm.deal.step-added", "3"), ("crm.deal.step-done", "3"),
    ]  # fmt: skip
    assert {header["ce_correlationid"] for header in headers} == {"request-42"}
    assert {row["correlation_id"] for row in await world.audit()} == {"request-42"}


async def test_deals_are_listed_newest_first_by_pages(world: World, client) -> None:
    ids = [await open_deal(client, f"Flat {number}") for number in range(5)]
    await client.post(f"/v1/deals/{ids[0]}/cancel")
    seen: list[str] = []
    after: dict[str, str] = {}
    for _ in range(3):
        page = (await client.get("/v1/deals", params={"limit": "2", **after})).json()
        seen += [item["id"] for item in page["items"]]
        after = {"after": page["next"]}
    assert seen == [str(deal) for deal in reversed(ids)]
    assert page["next"] is None
    cancelled = (await client.get("/v1/deals", params={"status": "Cancelled"})).json()
    assert [item["id"] for item in cancelled["items"]] == [str(ids[0])]


# Tenants and tokens.


async def test_deal_of_another_tenant_is_not_there(world: World) -> None:
    theirs = await world.deal(OTHER_TENANT)
    await world.step(theirs, due=world.ago(hours=1))
    before = await world.everything()
    client = world.client(bearer=token(TENANT))
    for method, path, body in (
        ("GET", f"/v1/deals/{theirs}", None),
        ("GET", f"/v1/deals/{theirs}/timeline", None),
        ("POST", f"/v1/deals/{theirs}/timeline", STEP),
        ("POST", f"/v1/deals/{theirs}/timeline", STEP | {"type": "DocumentUploaded"}),
        ("POST", f"/v1/deals/{theirs}/complete", None),
        ("POST", f"/v1/deals/{theirs}/cancel", None),
    ):
        is_problem(await client.request(method, path, json=body), 404, "deal_not_found")
    assert (await client.get("/v1/deals")).json() == {"items": [], "next": None}
    assert await world.everything() == before
    owner = world.client(bearer=token(OTHER_TENANT))
    assert (await owner.get(f"/v1/deals/{theirs}")).status_code == 200


ROUTES = [
    ("GET", "/v1/deals", READ),
    ("POST", "/v1/deals", WRITE),
    ("GET", "/v1/deals/{deal}", READ),
    ("GET", "/v1/deals/{deal}/timeline", READ),
    ("POST", "/v1/deals/{deal}/timeline", WRITE),
    ("POST", "/v1/deals/{deal}/complete", WRITE),
    ("POST", "/v1/deals/{deal}/cancel", WRITE),
]


def body_of(method: str, path: str) -> dict[str, Any] | None:
    if method == "GET":
        return None
    return {"title": "Flat 12"} if path == "/v1/deals" else STEP


def test_every_route_of_deals_is_in_the_list_of_this_test(world: World) -> None:
    paths = world.crm("api").app.openapi()["paths"]
    of_deals = {path: methods for path, methods in paths.items() if path.startswith("/v1/deals")}
    assert {(method.upper(), path) for path, methods in of_deals.items() for method in methods} == {
        (method, path.replace("{deal}", "{deal_id}")) for method, path, _ in ROUTES
    }


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
async def test_route_asks_for_a_token_and_its_scope(world: World, method: str, path: str, scope: str) -> None:
    deal = await world.deal()
    before = await world.everything()
    client = world.client()
    del client.headers["authorization"]
    url, body = path.format(deal=deal), body_of(method, path)
    for header in ({}, {"authorization": "Basic dXNlcjpwYXNz"}, {"authorization": "Bearer"}):
        answer = await client.request(method, url, json=body, headers=header)
        is_problem(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"] == "Bearer"
    other = {READ: WRITE, WRITE: READ}[scope]
    for scopes in (other, "", f"{scope}:all", scope.upper()):
        bearer = {"authorization": f"Bearer {token(scope=scopes)}"}
        is_problem(await client.request(method, url, json=body, headers=bearer), 403, "forbidden")
    assert await world.everything() == before
    bearer = {"authorization": f"Bearer {token(scope=scope)}"}
    assert (await client.request(method, url, json=body, headers=bearer)).is_success


async def test_token_that_is_not_ours_is_refused(world: World, client, subtests: pytest.Subtests) -> None:
    assert AUDIENCE == "pin"
    for name, bearer in {
        "nonsense": "nonsense",
        "three parts": "a.b.c",
        "stranger's key": token(key=STRANGER),
        "expired": token(seconds=-60),
        "another issuer": token(iss="someone"),
        "another audience": token(aud="others"),
        "no audience": token(aud=None),
        "no expiry": token(exp=None),
        "no subject": token(sub=None),
        "no tenant": token(tenant=None),
        "tenant that is no id": token(tenant_id="not-a-uuid"),
        "cut": token()[:-2],
        "unsigned": token().rsplit(".", 1)[0] + ".",
    }.items():
        with subtests.test(name):
            headers = {"authorization": f"Bearer {bearer}"}
            is_problem(await client.post("/v1/deals", json={"title": "Flat"}, headers=headers), 401, "unauthenticated")
    assert await world.everything() == []


# Bad input.

NEW_STEP = "/v1/deals/{deal}/timeline"
BEGINNING = f'{{"type": "DocumentRequested", "occurredAt": "{AT}", '
DEEP: Any = {}
for _ in range(200):
    DEEP = {"a": DEEP}


INVALID = [
    ("/v1/deals", {}),
    ("/v1/deals", []),
    ("/v1/deals", {"title": ""}),
    ("/v1/deals", {"title": "x" * 256}),
    ("/v1/deals", {"title": 12}),
    ("/v1/deals", {"title": None}),
    ("/v1/deals", {"title": "Flat", "tenantId": str(OTHER_TENANT)}),
    ("/v1/deals", {"title": "Flat\x0012"}),
    (NEW_STEP, {"type": "DocumentRequested"}),
    (NEW_STEP, STEP | {"type": "CoffeeRequested"}),
    (NEW_STEP, STEP | {"type": "documentRequested"}),
    (NEW_STEP, STEP | {"colour": "red"}),
    (NEW_STEP, STEP | {"completedAt": AT}),
    (NEW_STEP, STEP | {"actorUserId": "someone"}),
    (NEW_STEP, STEP | {"occurredAt": "2026-11-30T09:00:00"}),
    (NEW_STEP, STEP | {"occurredAt": "2026-11-30"}),
    (NEW_STEP, STEP | {"occurredAt": "yesterday"}),
    (NEW_STEP, STEP | {"occurredAt": 1796029200}),
    (NEW_STEP, STEP | {"occurredAt": "1796029200"}),
    (NEW_STEP, STEP | {"occurredAt": None}),
    (NEW_STEP, STEP | {"dueAt": "2026-11-30T09:00:00"}),
    (NEW_STEP, STEP | {"dueAt": "2026-11-30T25:00:00Z"}),
    (NEW_STEP, STEP | {"dueAt": "0001-01-01T00:00:00+14:00"}),
    (NEW_STEP, STEP | {"dueAt": "0001-01-01T00:00:00Z"}),
    (NEW_STEP, STEP | {"dueAt": "9999-12-31T23:59:59-12:00"}),
    (NEW_STEP, STEP | {"dueAt": "9999-12-31T23:59:59.999999Z"}),
    (NEW_STEP, STEP | {"occurredAt": "9999-12-31T23:59:59.999999Z"}),
    (NEW_STEP, STEP | {"type": "DocumentUploaded", "dueAt": AT}),
    (NEW_STEP, STEP | {"payload": []}),
    (NEW_STEP, STEP | {"payload": None}),
    (NEW_STEP, STEP | {"payload": {"note": "a\x00b"}}),
    (NEW_STEP, STEP | {"payload": {"a\x00b": 1}}),
    (NEW_STEP, STEP | {"payload": {"list": [{"deep": "\x00"}]}}),
    (NEW_STEP, STEP | {"payload": DEEP}),
]
MALFORMED = [
    ("", 422, "validation_error"),
    ("null", 422, "validation_error"),
    ('"text"', 422, "validation_error"),
    ("{", 400, "malformed_json"),
    ('{"type": "DocumentRequested",}', 400, "malformed_json"),
    (b'{"type": "\xff"}', 400, "malformed_request"),
    ("[" * 100_000, 400, "malformed_request"),
    ('{"type": "DocumentRequested", "occurredAt": NaN}', 422, "validation_error"),
    (BEGINNING + '"payload": {"sum": NaN}}', 422, "validation_error"),
    (BEGINNING + '"payload": {"sum": 1e999}}', 422, "validation_error"),
    (BEGINNING + '"payload": {"text": "\\ud800"}}', 422, "validation_error"),
]


async def test_invalid_body_is_a_problem_and_changes_no_row(world: World, client, subtests: pytest.Subtests) -> None:
    deal = await world.deal()
    await world.step(deal, due=world.ago(hours=1))
    before = await world.everything()
    for path, body in INVALID:
        with subtests.test(str(body)[:120]):
            is_problem(await client.post(path.format(deal=deal), json=body), 422, "validation_error")
    assert await world.everything() == before


async def test_malformed_body_is_a_problem_and_changes_no_row(world: World, client, subtests: pytest.Subtests) -> None:
    deal = await world.deal()
    before = await world.everything()
    path, headers = f"/v1/deals/{deal}/timeline", {"content-type": "application/json"}
    for content, status, code in MALFORMED:
        with subtests.test(str(content)[:120]):
            is_problem(await client.post(path, content=content, headers=headers), status, code)
    assert await world.everything() == before


@pytest.mark.parametrize("chunked", [False, True])
async def test_oversize_body_is_a_problem_and_changes_no_row(world: World, client, chunked: bool) -> None:
    deal = await world.deal()
    before = await world.everything()
    start = BEGINNING.encode() + b'"payload": {"a": "'

    async def pieces():
        yield start
        for _ in range(17):
            yield b"x" * 65_536
        yield b'"}}'

    whole = start + b"x" * 17 * 65_536 + b'"}}'
    answer = await client.post(
        f"/v1/deals/{deal}/timeline",
        content=pieces() if chunked else whole,
        headers={"content-type": "application/json"},
    )
    is_problem(answer, 413, "body_too_large")
    assert await world.everything() == before


async def test_body_below_the_limit_is_taken(world: World, client) -> None:
    deal = await world.deal()
    assert (await add(client, deal, "DocumentRequested", payload={"a": "x" * 900_000})).status_code == 201


async def test_wrong_address_is_a_problem(client, subtests: pytest.Subtests) -> None:
    for method, path, status, code in (
        ("GET", "/v1/deals/not-a-uuid", 422, "validation_error"),
        ("GET", "/v1/deals?limit=0", 422, "validation_error"),
        ("GET", "/v1/deals?limit=201", 422, "validation_error"),
        ("GET", "/v1/deals?after=x", 422, "validation_error"),
        ("GET", "/v1/deals?status=Paused", 422, "validation_error"),
        ("GET", f"/v1/deals/{UNKNOWN}", 404, "deal_not_found"),
        ("POST", f"/v1/deals/{UNKNOWN}/complete", 404, "deal_not_found"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("DELETE", "/v1/deals", 405, "method_not_allowed"),
        ("PATCH", f"/v1/deals/{UNKNOWN}/timeline", 405, "method_not_allowed"),
    ):
        with subtests.test(f"{method} {path}"):
            is_problem(await client.request(method, path), status, code)


# Faults.


async def test_database_that_is_away_is_a_503(world: World, subtests: pytest.Subtests) -> None:
    client = world.client(world.crm("api", api_database_url=f"postgresql://crm_api@{NOBODY_LISTENS}/pin"))
    for method, path, _ in ROUTES:
        with subtests.test(f"{method} {path}"):
            answer = await client.request(method, path.format(deal=UNKNOWN), json=body_of(method, path))
            problem = is_problem(answer, 503, "unavailable")
            assert answer.headers["retry-after"]
            assert NOBODY_LISTENS not in str(problem)
            assert "crm_api" not in str(problem)


async def test_database_that_goes_away_and_comes_back_is_used_again(world: World, client) -> None:
    deal = await open_deal(client)
    ended = await world.admin.fetch(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and usename = 'crm_api'"
    )
    assert ended
    assert (await client.get(f"/v1/deals/{deal}")).status_code == 200


async def test_readiness_names_what_is_missing(world: World) -> None:
    crm = world.crm("api", api_database_url=f"postgresql://crm_api@{NOBODY_LISTENS}/pin")
    problem = is_problem(await world.client(crm).get("/health/ready"), 503, "not_ready")
    assert {entry["location"] for entry in problem["errors"]} == {"database", "kafka"}


async def test_commit_that_fails_is_never_answered_with_success(world: World, client) -> None:
    await world.admin.execute(
        "create function crm.refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'Ivanov owes 5150000'; end $$;"
        " create constraint trigger refuse after insert on crm.deal deferrable initially deferred"
        " for each row execute function crm.refuse()"
    )
    try:
        with capture_logs() as logs:
            answer = await client.post("/v1/deals", json={"title": "Flat 12"})
    finally:
        await world.admin.execute("drop trigger refuse on crm.deal; drop function crm.refuse()")
    problem = is_problem(answer, 500, "internal_error")
    assert "Ivanov" not in str(problem)
    assert [line["event"] for line in logs] == ["request failed", "request"]
    assert await world.everything() == []
