"""The live stream of a real server: from a commit to everybody who watches the project, and to nobody else."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import httpx
import orjson
import pytest
import uvicorn
from board_world import OTHER_TENANT, World, token

from chassis.cli import GracefulServer
from chassis.live import LiveTail
from chassis.messaging import Received
from chassis.testing.processes import HOST
from chessboard.app import Chessboard
from chessboard.messages import STATUS_CHANGED_TOPIC

pytestmark = pytest.mark.messaging
ADMIN = ["SALES_ADMIN"]


@dataclass
class Served:
    """A running server and its parts."""

    url: str
    board: Chessboard
    server: GracefulServer
    running: "asyncio.Task[None]"

    @property
    def live(self) -> LiveTail:
        return self.board.app.state.live

    async def stop(self) -> float:
        """Stop it; return the seconds that took."""
        began = time.monotonic()
        self.server.should_exit = True
        await self.running
        return time.monotonic() - began


@dataclass
class Watcher:
    """One reader of a stream."""

    response: httpx.Response
    events: list[dict[str, str]] = field(default_factory=list)
    ended: bool = False
    text: str = ""

    async def read(self) -> None:
        try:
            async for chunk in self.response.aiter_text():
                self.text += chunk
                *blocks, rest = self.text.split("\n\n")
                self.text = rest
                for block in blocks:
                    self.events.append(dict(line.split(": ", 1) for line in block.splitlines()))
        except httpx.TransportError:
            pass
        self.ended = True

    def named(self, name: str) -> list[dict[str, Any]]:
        return [orjson.loads(event["data"]) for event in self.events if event.get("event") == name]

    @property
    def last_id(self) -> str:
        return [event["id"] for event in self.events if "id" in event][-1]


@pytest.fixture
async def serve(connected: World, eventually: Callable) -> AsyncIterator[Callable]:
    started: list[Served] = []

    async def start() -> Served:
        board = connected.board("api", "relay")
        listener = socket.create_server((HOST, 0))
        config = uvicorn.Config(
            board.app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=20
        )
        server = GracefulServer(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        served = Served(f"http://{HOST}:{listener.getsockname()[1]}", board, server, running)
        started.append(served)
        await eventually(lambda: served.live.position() != "")
        return served

    yield start
    for served in started:
        if not served.running.done():
            await served.stop()


@asynccontextmanager
async def watch(served: Served, project: UUID, bearer: str, **headers: str) -> AsyncIterator[Watcher]:
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=30) as client,
        client.stream(
            "GET",
            f"/v1/projects/{project}/stream",
            headers={"authorization": f"Bearer {bearer}", "accept-encoding": "gzip"} | headers,
        ) as response,
    ):
        watcher = Watcher(response)
        reading = asyncio.create_task(watcher.read())
        yield watcher
        reading.cancel()
        await asyncio.wait([reading])


async def act(served: Served, unit: UUID, name: str, tenant: UUID | None = None) -> None:
    bearer = token(roles=ADMIN) if tenant is None else token(tenant, roles=ADMIN)
    async with httpx.AsyncClient(base_url=served.url, headers={"authorization": f"Bearer {bearer}"}) as client:
        answer = await client.post(f"/v1/property-objects/{unit}/{name}")
        assert answer.status_code == 200, answer.text


async def test_a_change_reaches_all_who_watch_its_project_in_every_process_and_nobody_else(
    connected: World, serve, eventually
):
    one, other = await serve(), await serve()
    building = await connected.building(project := await connected.project())
    unit, elsewhere = await connected.property_object(building), await connected.property_object()
    theirs = await connected.property_object(tenant=OTHER_TENANT)
    async with watch(one, project, token()) as here, watch(other, project, token()) as there:
        assert here.response.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in here.response.headers
        await act(one, elsewhere, "hide")
        await act(one, theirs, "hide", OTHER_TENANT)
        await act(one, unit, "hide")
        await act(other, unit, "unhide")
        for watcher in (here, there):
            await eventually(lambda watcher=watcher: len(watcher.named("status-changed")) == 2)
            first, second = watcher.named("status-changed")
            assert (first["propertyObjectId"], first["fromStatus"], first["toStatus"], first["version"]) == (
                str(unit), "Free", "Hidden", 2,
            )  # fmt: skip
            assert (second["toStatus"], second["version"], second["statusSource"]) == ("Free", 3, "Admin")
            assert first["projectId"] == str(project)
            assert "tenantId" not in first


async def test_who_lost_the_stream_goes_on_in_another_process_without_a_gap_or_a_repetition(
    connected: World, serve, eventually
):
    one, other = await serve(), await serve()
    building = await connected.building(project := await connected.project())
    units = [await connected.property_object(building) for _ in range(6)]
    async with watch(one, project, token()) as watcher:
        for unit in units[:3]:
            await act(one, unit, "hide")
        await eventually(lambda: len(watcher.named("status-changed")) == 3)
        before, last = watcher.named("status-changed"), watcher.last_id
    for unit in units[3:]:
        await act(one, unit, "hide")
    await eventually(lambda: other.live.position() == one.live.position() != last)
    async with watch(other, project, token(), **{"last-event-id": last}) as watcher:
        await eventually(lambda: len(watcher.named("status-changed")) == 3)
        seen = [event["propertyObjectId"] for event in before + watcher.named("status-changed")]
        assert sorted(seen) == sorted(map(str, units))
        assert watcher.named("resync") == []
    async with watch(other, project, token(), **{"last-event-id": "0:0"}) as watcher:
        await eventually(lambda: watcher.named("resync"))


async def test_the_stream_ends_with_its_token(connected: World, serve, eventually):
    served = await serve()
    project = await connected.project()
    async with watch(served, project, token(seconds=-28)) as short, watch(served, project, token()) as long:
        await eventually(lambda: short.ended, seconds=10)
        assert not long.ended
    expired = token(seconds=-60)
    async with watch(served, project, expired) as refused:
        assert refused.response.status_code == 401


async def test_who_leaves_leaves_no_task_behind(connected: World, serve, eventually):
    served = await serve()
    project = await connected.project()
    async with httpx.AsyncClient(base_url=served.url):
        before = len(asyncio.all_tasks())
        for _ in range(3):
            async with watch(served, project, token()) as watcher:
                await eventually(lambda watcher=watcher: watcher.events)
                assert served.live.streams == 1
            await eventually(lambda: served.live.streams == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def test_streams_keep_no_connection_to_the_database(connected: World, serve, eventually):
    served = await serve()
    unit = await connected.property_object()
    project = (await connected.object_row(unit))["project_id"]
    async with AsyncExitStack() as stack:
        watchers = [await stack.enter_async_context(watch(served, project, token())) for _ in range(15)]
        assert served.live.streams == 15, "more than the pool has"
        await act(served, unit, "hide")
        await eventually(lambda: all(watcher.named("status-changed") for watcher in watchers))


async def test_a_stop_ends_all_streams_at_once(connected: World, serve, eventually):
    served = await serve()
    project = await connected.project()
    async with watch(served, project, token()) as one, watch(served, project, token()) as other:
        await eventually(lambda: one.events and other.events)
        assert await served.stop() < 8
        await eventually(lambda: one.ended and other.ended)
    assert served.live.streams == 0


async def test_a_client_that_stops_reading_is_told_to_read_anew_and_holds_up_nobody(
    connected: World, serve, eventually
):
    served = await serve()
    project = await connected.project()
    slow = socket.create_connection((HOST, int(served.url.rpartition(":")[2])))
    request = f"GET /v1/projects/{project}/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token()}\r\n\r\n"
    await asyncio.to_thread(slow.sendall, request.encode())
    async with watch(served, project, token()) as quick:
        await eventually(lambda: served.live.streams == 2)
        partition, offset = (int(part) for part in served.live.position().split(",")[0].split(":"))
        sent = 0
        overflows = 'pin_live_resyncs_total{reason="too-slow"}'
        while not (await metrics(served))[overflows]:
            for _ in range(50):
                served.live.take(change(project, partition, offset + sent))
                sent += 1
            await eventually(lambda sent=sent: quick.last_id.startswith(f"{partition}:{offset + sent},"))
            assert sent < 20_000
        assert quick.named("resync") == []
        slow.settimeout(10)
        await asyncio.to_thread(read_until, slow, b"event: resync")
    slow.close()
    await eventually(lambda: served.live.streams == 0)


def read_until(reader: socket.socket, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        chunk = reader.recv(65536)
        assert chunk
        seen = seen[-100:] + chunk


def change(project: UUID, partition: int, offset: int) -> Received:
    names = (
        "BuildingId", "FromStatus", "ToStatus", "StatusSource", "ReservedUntil", "BookedUntil", "HoldDealId", "SoldAt",
        "StatusChangedAt",
    )  # fmt: skip
    payload = dict.fromkeys(names) | {
        "PropertyObjectId": str(uuid4()), "ProjectId": str(project), "TenantId": "0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01",
        "Version": offset, "FromStatus": "x" * 20_000,
    }  # fmt: skip
    headers = (("ce_type", STATUS_CHANGED_TOPIC.encode()),)
    return Received(STATUS_CHANGED_TOPIC, partition, offset, 0, b"k", orjson.dumps(payload), headers)


async def metrics(served: Served) -> dict[str, float]:
    async with httpx.AsyncClient(base_url=served.url) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")}


async def test_a_stream_of_another_tenants_project_is_not_there(connected: World, serve):
    served = await serve()
    theirs = await connected.project(OTHER_TENANT)
    async with watch(served, theirs, token()) as refused:
        assert refused.response.status_code == 404


async def test_without_a_broker_a_stream_is_refused_for_a_while(world: World):
    project = await world.project()
    answer = await world.client().get(f"/v1/projects/{project}/stream")
    assert (answer.status_code, answer.json()["code"]) == (503, "stream_unavailable")
