"""`make demo`: deal steps fall due, become Overdue, and their events reach a consumer that no one here wrote.

Everything shown is checked; a check that fails makes the exit status 1.
"""

import asyncio
import shutil
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import asyncpg
import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from chassis.audit import BrokenLink, Head, verify
from chassis.db import Database
from chassis.testing.processes import free_ports
from crm.messages import DEAL_TIMELINE_TOPIC, TIMELINE_OVERDUE_TOPIC, DealTimelineOverduePayload
from devstack import holds
from devstack.holds import Holds
from devstack.seed import TENANT_NAMES, Seeded, Seeder, tenant
from devstack.stack import HOME, Stack
from devstack.watcher import Arrival, Watcher

DEALS: Final = 3000
SOON_AFTER: Final = 14.0
SOON_FOR: Final = 8.0
PATIENCE: Final = 60.0
OVERRIDES: Final = {"PIN_JOB_TIMELINE_OVERDUE_INTERVAL": "1", "PIN_JOB_TIMELINE_OVERDUE_BATCH_SIZE": "500"}


@dataclass
class Demo:
    """One demonstration run."""

    console: Console
    stack: Stack
    seeded: Seeded
    failures: list[str] = field(default_factory=list)

    def check(self, sentence: str, good: bool, detail: object = "") -> None:
        """Print a checked statement; remember it if it is false."""
        self.console.print(
            f"  {'[green]ok[/]  ' if good else '[red]FAIL[/]'} {sentence} [dim]{detail}[/]", highlight=False
        )
        if not good:
            self.failures.append(sentence)


def run() -> int:
    """Run the demonstration; return the exit status."""
    console = Console(width=None if Console().is_terminal else 110)
    home = HOME / "demo"
    shutil.rmtree(home, ignore_errors=True)
    console.rule("[bold]1. The platform starts[/] (embedded Postgres and Kafka, nothing installed)")
    crm, board = free_ports(2)
    stack = Stack.start(
        home, ports={"crm": crm, "chessboard": board}, fixed_ports=False, serve=False, say=console.print
    )
    with stack:
        console.rule("[bold]2. History[/]: deals of several tenants, before the service runs")
        seeded = _seed(console, stack)
        demo = Demo(console, stack, seeded)
        with Watcher(stack.broker.bootstrap, [TIMELINE_OVERDUE_TOPIC, DEAL_TIMELINE_TOPIC]) as watcher:
            stack.serve_all(OVERRIDES | holds.OVERRIDES, console.print)
            _show(demo, watcher)
        Holds(console, stack, demo.check).run()
    console.rule()
    if demo.failures:
        console.print(f"[red]{len(demo.failures)} checks failed[/]: " + "; ".join(demo.failures))
        return 1
    console.print("[green]All checks hold.[/] Next: [bold]make up[/] to look around, README.md for the tour.")
    return 0


def _seed(console: Console, stack: Stack) -> Seeded:
    seeder = Seeder(datetime.now(UTC), seed=7, soon_after=SOON_AFTER, soon_for=SOON_FOR)
    with _progress(console) as progress:
        task = progress.add_task("deals", total=DEALS)
        seeded = asyncio.run(
            seeder.run(stack.url("postgres"), DEALS, lambda done: progress.update(task, completed=done))
        )
    console.print(
        f"{seeded.deals} deals of {len(TENANT_NAMES)} tenants with {seeded.steps} steps: "
        f"{len(seeded.overdue_at_start)} past their due time, {len(seeded.due_soon)} fall due within half a minute, "
        f"the others later, never, or done",
        highlight=False,
    )
    return seeded


def _show(demo: Demo, watcher: Watcher) -> None:
    console, stack = demo.console, demo.stack
    console.rule("[bold]3. One deal, by hand over HTTP[/]")
    with stack.client("crm", stack.issuer.token(tenant(0))) as client:
        deal = _open_deal(client)
        console.print(_timeline(client, deal, "before"))
        console.rule("[bold]4. Time passes[/]: the job looks every second here (every 5 minutes in production)")
        expected = {*demo.seeded.overdue_at_start, *demo.seeded.due_soon, *_own_due_steps(client, deal)}
        _watch(demo, watcher, expected)
        console.rule("[bold]5. The same deal, after[/]")
        console.print(_timeline(client, deal, "after"))
        _show_event(demo, watcher, deal)
        items = client.get(f"/v1/deals/{deal}/timeline").json()["items"]
        late = [item for item in items if item["icon"] == "просрочено"]
        demo.check("the overdue step shows the icon «просрочено»", len(late) == 1, f"{len(late)} of {len(items)} steps")
        client.post(f"/v1/deals/{deal}/timeline", json=_step("DocumentUploaded")).raise_for_status()
        again = client.get(f"/v1/deals/{deal}/timeline").json()["items"]
        demo.check("the document came late: the step is Done and keeps no icon", not any(i["icon"] for i in again))
    console.rule("[bold]6. What must hold[/]")
    asyncio.run(_verify(demo, watcher, expected))


def _open_deal(client: httpx.Client) -> str:
    title = {"title": "ЖК «Речной парк», корпус 7, кв. 42"}
    deal = str(client.post("/v1/deals", json=title).raise_for_status().json()["id"])
    for kind, seconds in (("DocumentRequested", 5.0), ("PaymentRequested", 86400.0), ("SigningRequested", None)):
        client.post(f"/v1/deals/{deal}/timeline", json=_step(kind, seconds)).raise_for_status()
    return deal


def _step(kind: str, due_in: float | None = None) -> dict[str, Any]:
    now = datetime.now(UTC)
    body: dict[str, Any] = {"type": kind, "occurredAt": now.isoformat(), "payload": {"что": "выписка ЕГРН"}}
    if due_in is not None:
        body["dueAt"] = (now + timedelta(seconds=due_in)).isoformat()
    return body


def _own_due_steps(client: httpx.Client, deal: str) -> set[UUID]:
    items = client.get(f"/v1/deals/{deal}/timeline").json()["items"]
    return {UUID(item["id"]) for item in items if item["type"] == "DocumentRequested"}


def _timeline(client: httpx.Client, deal: str, when: str) -> Table:
    title = client.get(f"/v1/deals/{deal}").json()["title"]
    table = Table(title=f"Ход сделки: {title} ({when})", title_justify="left")
    for column in ("step", "status", "", "due"):
        table.add_column(column)
    for item in client.get(f"/v1/deals/{deal}/timeline").json()["items"]:
        due = "-" if item["dueAt"] is None else item["dueAt"][:19].replace("T", " ")
        table.add_row(item["type"], item["status"], f"[red]{item['icon']}[/]" if item["icon"] else "", due)
    return table


def _watch(demo: Demo, watcher: Watcher, expected: set[UUID]) -> None:
    deadline = time.monotonic() + PATIENCE
    with _progress(demo.console) as progress:
        task = progress.add_task("overdue events read by the foreign consumer", total=len(expected))
        while time.monotonic() < deadline:
            arrived = {UUID(a.payload["TimelineEventId"]) for a in watcher.of_type(TIMELINE_OVERDUE_TOPIC)}
            progress.update(task, completed=len(arrived & expected))
            if expected <= arrived:
                break
            time.sleep(0.1)
    per_run: dict[str, list[Arrival]] = {}
    for arrival in watcher.of_type(TIMELINE_OVERDUE_TOPIC):
        per_run.setdefault(str(arrival.event.get_extension("correlationid")), []).append(arrival)
    for arrivals in per_run.values():
        first = arrivals[0]
        instant = str(first.payload["OverdueAt"])[11:19]
        tenants = len({a.payload["TenantId"] for a in arrivals})
        demo.console.print(
            f"  cycle {instant}  {len(arrivals):5} steps became overdue, {tenants} tenants", highlight=False
        )


def _show_event(demo: Demo, watcher: Watcher, deal: str) -> None:
    for arrival in watcher.of_type(TIMELINE_OVERDUE_TOPIC):
        if arrival.payload["DealId"] == deal:
            demo.console.print("its event, as the CloudEvents SDK reads it:")
            demo.console.print_json(data={**arrival.event.get_attributes(), "data": arrival.payload}, default=str)
            return
    demo.check("the deal's event arrived", good=False)


async def _verify(demo: Demo, watcher: Watcher, expected: set[UUID]) -> None:
    arrivals = watcher.of_type(TIMELINE_OVERDUE_TOPIC)
    steps = [UUID(arrival.payload["TimelineEventId"]) for arrival in arrivals]
    ids = {str(arrival.event.get_id()) for arrival in arrivals}
    connection = await asyncpg.connect(demo.stack.url("postgres"))
    try:
        moved = await connection.fetchval(
            "select count(*) from crm.deal_timeline_event where id = any($1::uuid[]) and status <> 'InProgress'"
            " and (completed_at is null or status = 'Done')",
            list(expected),
        )
        untouched = await connection.fetchval(
            "select count(*) from crm.deal_timeline_event where id = any($1::uuid[]) and status <> 'Overdue'",
            list(demo.seeded.never),
        )
        audited = await connection.fetchval("select count(*) from crm.audit_log where action = 'timeline-step.overdue'")
        commits = await connection.fetch(
            "select entity_id, extract(epoch from pg_xact_commit_timestamp(xmin))::float8 as at"
            " from crm.audit_log where action = 'timeline-step.overdue'"
        )
        pending = await _settled(connection)
    finally:
        await connection.close()
    chain = await _audit_chain(demo)
    demo.check("every due step is overdue", moved == len(expected), f"{moved} of {len(expected)}")
    demo.check("no other step was touched", untouched == len(demo.seeded.never), f"{untouched} steps")
    demo.check("exactly one event per transition", sorted(steps) == sorted(expected), f"{len(steps)} events")
    demo.check("every event has an id of its own", len(ids) == len(arrivals))
    keys = set(DealTimelineOverduePayload.__annotations__)
    demo.check("payloads have exactly the six fields", all(set(a.payload) == keys for a in arrivals), ", ".join(keys))
    demo.check("one audit row per transition", audited == len(expected), audited)
    sealed = f"{chain.sequence} rows sealed" if isinstance(chain, Head) else chain
    demo.check("the audit log is a whole chain of hashes", isinstance(chain, Head), sealed)
    demo.check("the outbox is empty", pending == 0)
    demo.check("the foreign consumer could read everything", not watcher.trouble, "; ".join(watcher.trouble[:3]))
    _latency(demo, arrivals, {row["entity_id"]: row["at"] for row in commits})


async def _settled(connection: "asyncpg.Connection[asyncpg.Record]") -> int:
    """Wait until every audit row is sealed and announced, 20 s at most; return how many rows the outbox still has."""
    unsealed = "select exists (select from crm.audit_log where id not in (select audit_id from crm.audit_seal))"
    pending = 0
    for _ in range(100):
        pending = await connection.fetchval("select count(*) from crm.outbox")
        if not pending and not await connection.fetchval(unsealed):
            break
        await asyncio.sleep(0.2)
    return pending


async def _audit_chain(demo: Demo) -> BrokenLink | Head:
    database = Database(demo.stack.url("crm_system"), application_name="demo")
    try:
        async with database.read() as session:
            return await verify(session, "crm")
    finally:
        await database.close()


def _latency(demo: Demo, arrivals: list[Arrival], committed: dict[UUID, float]) -> None:
    live = {*demo.seeded.due_soon}
    groups = {"backlog at the start": [], "falling due while we watched": []}  # type: dict[str, list[float]]
    for arrival in arrivals:
        step = UUID(arrival.payload["TimelineEventId"])
        name = "falling due while we watched" if step in live else "backlog at the start"
        if step in committed:
            groups[name].append((arrival.at - committed[step]) * 1000)
    table = Table(title="From commit to consumer", title_justify="left")
    for column in ("events", "count", "p50 ms", "p95 ms", "max ms"):
        table.add_column(column, justify="left" if column == "events" else "right")
    for name, values in groups.items():
        if values:
            ordered = sorted(values)
            marks = (ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.95)], ordered[-1])
            table.add_row(name, str(len(values)), *(f"{mark:.0f}" for mark in marks))
    demo.console.print(table)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
