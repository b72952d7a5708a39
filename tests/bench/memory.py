"""How much memory a crm process holds when it has nothing to do."""

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import psutil

from chassis.testing.plugin import TestDatabase
from chassis.testing.processes import HOST, free_ports, popen_tied, stop, without_variables
from tests.bench.report import Figure


async def idle_crm(database: TestDatabase, bootstrap: str) -> list[Figure]:
    """Start crm with all roles, let it idle, read its resident memory."""
    port = free_ports(1)[0]
    environment = {
        **without_variables(),
        **database.variables(bootstrap),
        "PIN_HTTP_PORT": str(port),
        "PIN_JOB_TIMELINE_OVERDUE_INTERVAL": "2",
    }
    process = popen_tied(
        [sys.executable, "-m", "crm", "serve"], cwd=Path.cwd(), output=subprocess.DEVNULL, env=environment
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
            async with asyncio.timeout(60):
                while not await _ready(client):
                    await asyncio.sleep(0.1)
        await asyncio.sleep(6)
        megabytes = psutil.Process(process.pid).memory_info().rss / 2**20
    finally:
        stop(process)
    return [Figure("crm, resident memory when idle", megabytes, bar=130, lower_is_better=True, unit=" MB")]


async def _ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
