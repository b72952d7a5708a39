"""A real crm process: its loops live through the loss of all connections; a stop cuts no request and hangs on none."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from crm_world import World, token, trusted_issuer

from chassis.testing.processes import HOST, free_ports, popen_tied, stop, without_variables

pytestmark = pytest.mark.messaging
RESUME_SECONDS = 30.0
KILL = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()"
    " and backend_type = 'client backend' and pid <> pg_backend_pid()"
)
STOP_SECONDS = 30.0
Serve = Callable[..., tuple[subprocess.Popen[bytes], str]]


@pytest.fixture
def serve(connected: World, tmp_path: Path) -> Iterator[Serve]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**variables: str) -> tuple[subprocess.Popen[bytes], str]:
        (port,) = free_ports(1)
        environment = {
            **without_variables(),
            **connected.database.variables(connected.bootstrap),
            "PIN_HTTP_PORT": str(port),
            "PIN_JWT_ISSUERS": orjson.dumps([trusted_issuer()]).decode(),
            **variables,
        }
        with (tmp_path / "crm.log").open("ab") as output:
            command = [sys.executable, "-m", "crm", "serve"]
            started.append(popen_tied(command, cwd=tmp_path, output=output, env=environment))
        return started[-1], f"http://{HOST}:{port}"

    yield start
    for process in started:
        stop(process, seconds=30)


async def answers(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == 200
    except httpx.TransportError:
        return False


async def samples(client: httpx.AsyncClient) -> dict[str, float]:
    lines = [line for line in (await client.get("/metrics")).text.splitlines() if line and line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


async def test_every_loop_goes_on_in_the_same_process_after_all_backends_were_killed(
    connected: World, serve: Serve, eventually: Callable[..., Any]
) -> None:
    process, url = serve(PIN_JOB_TIMELINE_OVERDUE_INTERVAL="0.5")
    bearer = {"authorization": f"Bearer {token()}"}
    async with httpx.AsyncClient(base_url=url, timeout=20, headers=bearer) as client:
        await eventually(lambda: answers(client, "/health/ready"), 60)
        for _ in range(10):
            await connected.admin.fetchval(KILL)
        killed = time.monotonic()
        steps = await connected.due_steps(3)

        async def opened() -> bool:
            return (await client.post("/v1/deals", json={"title": "after"})).status_code == 201

        async def all_done() -> bool:
            moved = await connected.steps_in("Overdue") >= set(steps)
            unsealed = await connected.admin.fetchval(
                "select count(*) from crm.audit_log a where not exists"
                " (select from crm.audit_seal s where s.audit_id = a.id)"
            )
            return moved and not unsealed and not await connected.admin.fetchval("select count(*) from crm.outbox")

        await eventually(opened, RESUME_SECONDS)
        await eventually(all_done, RESUME_SECONDS)

        async def watched() -> bool:
            found = await samples(client)
            return found["pin_background_dead_loops"] == 0 and found["pin_outbox_pending"] == 0

        await eventually(watched, RESUME_SECONDS)
        assert await answers(client, "/health/live")
        seconds = time.monotonic() - killed
    assert process.poll() is None, "no restart of the process"
    assert seconds < RESUME_SECONDS, seconds


async def test_a_stop_finishes_the_request_in_hand_and_waits_for_no_one_who_is_silent(
    connected: World, serve: Serve, eventually: Callable[..., Any]
) -> None:
    deal = await connected.deal()
    process, url = serve(PIN_KAFKA_BOOTSTRAP="127.0.0.1:1")
    bearer = {"authorization": f"Bearer {token()}"}
    async with httpx.AsyncClient(base_url=url, timeout=40, headers=bearer) as client:
        await eventually(lambda: answers(client, "/health/live"), 60)
        port = int(url.rpartition(":")[2])
        _, silent = await asyncio.open_connection(HOST, port)
        silent.write(b"POST /v1/deals HTTP/1.1\r\nhost: crm\r\ncontent-length: 100\r\n\r\n{")
        await silent.drain()
        async with connected.admin.transaction():
            await connected.admin.execute("lock table crm.deal in exclusive mode")
            slow = asyncio.create_task(client.post(f"/v1/deals/{deal}/cancel"))
            await eventually(connected.blocked_pid)
            process.send_signal(signal.SIGTERM)
            asked = time.monotonic()
            await eventually(lambda: refuses(port))
        answer = await slow
    assert answer.status_code < 300, answer.text
    status = await asyncio.to_thread(process.wait, STOP_SECONDS)
    silent.close()
    assert status == 0
    assert time.monotonic() - asked < STOP_SECONDS


async def refuses(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return True
    writer.close()
    return False
