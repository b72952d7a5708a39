"""Jobs over HTTP for the person on call: what is seen, who may order, and that orders are obeyed and audited."""

from datetime import timedelta
from typing import Any

import httpx
import pytest
from crm_world import World, driver_of, token

from chassis import jobs
from chassis.runtime import Stop
from chassis.web import PLATFORM_ADMIN

READ_JOBS = "crm:jobs:read"
OPERATE = "crm:jobs:operate"
JOB = "/v1/admin/jobs/timeline-overdue"
ACTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", f"{JOB}/pause", {"reason": "too loud"}),
    ("POST", f"{JOB}/run", None),
    ("POST", f"{JOB}/resume", None),
]


def bearer(scope: str = f"{READ_JOBS} {OPERATE}", role: str = PLATFORM_ADMIN) -> str:
    return token(scope=scope, sub="op-7", roles=[role])


@pytest.fixture
def client(world: World) -> httpx.AsyncClient:
    return world.client(bearer=bearer())


async def job(client: httpx.AsyncClient, name: str = "timeline-overdue") -> dict[str, Any]:
    answer = await client.get("/v1/admin/jobs")
    assert answer.status_code == 200, answer.text
    (found,) = [item for item in answer.json()["items"] if item["name"] == name]
    return found


async def test_list_shows_schedule_last_run_and_next(world: World, client: httpx.AsyncClient) -> None:
    before = await job(client)
    assert before == {
        "name": "timeline-overdue", "schedule": "every 300 s", "misfire": "run_once", "running": False,
        "lastRun": None, "nextRunAt": "2026-11-30T09:00:00Z", "runRequestedAt": None, "paused": None,
    }  # fmt: skip
    await world.due_steps(3)
    await world.run_job()
    after = await job(client)
    assert (after["lastRun"]["result"], after["lastRun"]["trigger"]) == ("ok", "cli")
    assert after["lastRun"]["counts"]["processed"] == 3
    assert after["nextRunAt"] == "2026-11-30T09:00:00Z", "a run by hand moves no tick"
    await world.job().drivers[0].run_once(trigger="schedule")
    assert (await job(client))["nextRunAt"] == "2026-11-30T09:05:00Z"
    nightly = await job(client, "timeline-leftovers")
    assert (nightly["schedule"], nightly["nextRunAt"]) == ("daily at 03:00 UTC", "2026-12-01T03:00:00Z")


async def test_list_tells_a_running_job_from_a_dead_one(world: World, client: httpx.AsyncClient) -> None:
    await world.run_job()
    await world.admin.execute("update crm.job_run set finished_at = null, result = null")
    assert (await job(client))["running"] is True
    world.clock.advance(timedelta(minutes=2))
    dead = await job(client)
    assert (dead["running"], dead["lastRun"]["result"]) == (False, None)


@pytest.mark.parametrize(("method", "path", "body"), [("GET", "/v1/admin/jobs", None), *ACTS])
async def test_only_a_platform_admin_with_the_scope_gets_in(
    world: World, method: str, path: str, body: dict[str, Any] | None
) -> None:
    scope, other = (READ_JOBS, OPERATE) if method == "GET" else (OPERATE, READ_JOBS)
    for refused in (bearer(other), bearer(scope, "ADMIN"), bearer("crm:deals:write"), token(scope=scope)):
        answer = await world.client(bearer=refused).request(method, path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert await world.admin.fetchval("select count(*) from crm.job_control") == 0
    assert (await world.client(bearer=bearer(scope)).request(method, path, json=body)).is_success


@pytest.mark.parametrize(("method", "path", "body"), ACTS)
async def test_unknown_job_is_not_found(
    world: World, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
) -> None:
    answer = await client.request(method, path.replace("overdue", "undone"), json=body)
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
    assert await world.admin.fetchval("select count(*) from crm.job_control") == 0
    assert await world.audit() == []


async def test_orders_are_audited_with_who_gave_them_and_repeating_changes_nothing(
    world: World, client: httpx.AsyncClient
) -> None:
    first = await client.post(f"{JOB}/pause", json={"reason": "too loud"}, headers={"x-request-id": "req-1"})
    assert first.json()["paused"] == {"at": "2026-11-30T09:00:00Z", "by": "op-7", "reason": "too loud"}
    assert first.json()["nextRunAt"] is None
    world.clock.advance(timedelta(minutes=1))
    again = await client.post(f"{JOB}/pause", json={"reason": "another"})
    assert (again.status_code, again.json()["paused"]) == (200, first.json()["paused"])
    refused = await client.post(f"{JOB}/run")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_paused")
    for _ in range(2):
        assert (await client.post(f"{JOB}/resume")).json()["paused"] is None
    for _ in range(2):
        asked = await client.post(f"{JOB}/run")
        assert (asked.status_code, asked.json()["runRequestedAt"]) == (202, "2026-11-30T09:01:00Z")
    audit = await world.audit()
    assert [(row["action"], row["actor"], row["entity_type"], row["tenant_id"]) for row in audit] == [
        (action, "op-7", "job", None) for action in ("job.paused", "job.resumed", "job.run-requested")
    ]
    assert audit[0]["details"] == {"job": "timeline-overdue", "reason": "too loud"}
    assert audit[0]["correlation_id"] == "req-1"
    assert len({row["entity_id"] for row in audit}) == 1


@pytest.mark.parametrize(
    "body", [{}, {"reason": ""}, {"reason": "  "}, {"reason": "x" * 501}, {"reason": "a\0b"}, None]
)
async def test_pause_wants_a_reason_that_can_be_kept(client: httpx.AsyncClient, body: object) -> None:
    answer = await client.post(f"{JOB}/pause", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_process_that_rests_obeys_within_its_look(
    world: World, client: httpx.AsyncClient, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    monkeypatch.setattr(jobs, "LOOK_EVERY", 0.02)
    driver = driver_of(world.crm("jobs"))
    stop = Stop()
    running = asyncio.create_task(driver.run(stop))
    try:

        async def finished() -> list[str]:
            rows = await world.admin.fetch("select trigger from crm.job_run where result = 'ok' order by id")
            return [row["trigger"] for row in rows]

        async def ran_first() -> bool:
            return await finished() == ["schedule"]

        async def ran_again() -> bool:
            return await finished() == ["schedule", "manual"]

        await eventually(ran_first)
        assert (await client.post(f"{JOB}/run")).status_code == 202
        await eventually(ran_again)
        assert (await job(client))["runRequestedAt"] is None
    finally:
        stop.request()
        await running
