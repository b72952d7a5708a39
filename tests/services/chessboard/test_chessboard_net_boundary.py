"""The safety net towards the outside: what it doesn't need and doesn't send; its event's contract, lag and trace."""

import ast
import re
from pathlib import Path

import pytest
from board_world import NOBODY_LISTENS, World, scrape
from net_pieces import CHANGED, JOB, counted, cycle, lost, net
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_trace_id

import chessboard
from chassis.contracts import Contract, DeclaredMessage
from chassis.relay import Relay
from chassis.testing.plugin import TestBroker
from chassis.tracing import configure_tracing
from chessboard.consumers import CRM_PROPERTY_OBJECT_STATUS
from chessboard.messages import CRM_TOPICS

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(chessboard.__file__).parent
OF_THE_NET = ("jobs.py", "radar.py", "expired_holds.py", "commands/expirations.py", "domain/expirations.py")
LAG = "chessboard_property_object_status_changed_delivery_lag_seconds"


@pytest.fixture(scope="module")
def declared() -> DeclaredMessage:
    """The event as the registry declares it."""
    contract = Contract(ROOT / "contracts/chessboard.asyncapi.yaml")
    (message,) = [message for message in contract.messages() if message.topic == CHANGED]
    return message


def imported(name: str) -> set[str]:
    """Return what a module of chessboard imports, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((SOURCE / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.req("HLD-98")
@pytest.mark.parametrize("name", OF_THE_NET)
def test_the_normal_path_stays_separate_from_the_job(name: str) -> None:
    """The job calls neither the consumer nor what settles CRM's requests."""
    of_the_consumer = re.compile(r"chessboard\.consumers|commands\.requests|settle|Ledger|\bRequest\b|to_answer")
    assert not [one for one in imported(name) if of_the_consumer.search(one)]
    assert "hold_ledger" not in (SOURCE / name).read_text()


@pytest.mark.req("HLD-98", "HLD-09", "HLD-04", "HLD-05", "HLD-06")
async def test_the_normal_path_runs_without_the_job_and_the_job_without_it(world: World) -> None:
    only_consumers, only_jobs = world.board("consumers"), world.board("jobs")
    (handling,) = only_consumers.handlings
    assert handling.consumer.group == CRM_PROPERTY_OBJECT_STATUS == "pin.chessboard.crm-property-object-status"
    assert handling.consumer.topics >= {
        "pin.crm.booking-expired.v1", "pin.crm.booking-cancelled.v1", "pin.crm.deal-cancelled.v1",
    }  # fmt: skip
    await lost(world)
    assert await cycle(only_jobs) == counted(1), "no consumer ran"
    assert {row["topic"] for row in await world.outbox()} == {CHANGED}, "and nothing was said in its name"
    assert await world.admin.fetchval("select count(*) from chessboard.inbox") == 0


@pytest.mark.req("HLD-10")
async def test_the_job_sends_no_chat_message(world: World) -> None:
    await lost(world)
    await cycle(net(world))
    (event,) = await world.outbox()
    assert event["topic"] == CHANGED
    assert not [topic for topic in CRM_TOPICS if topic == event["topic"]]


@pytest.mark.req("HLD-14")
async def test_the_job_needs_neither_redis_nor_a_scheduler_nor_the_broker(world: World) -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"^(redis|hiredis|valkey|apscheduler|celery|rq|dramatiq)\b", lock, re.MULTILINE)
    await lost(world)
    assert await cycle(net(world, kafka_bootstrap=NOBODY_LISTENS)) == counted(1)


@pytest.mark.req("HLD-17")
async def test_objects_stand_in_one_plain_table(world: World) -> None:
    kind = await world.admin.fetchval(
        "select relkind::text from pg_class where oid = 'chessboard.property_object'::regclass"
    )
    assert kind == "r"


@pytest.mark.req("HLD-69", "HLD-70", "HLD-71", "HLD-72", "HLD-74", "HLD-75")
def test_contract_of_the_event_names_its_consumers_and_carries_nothing_personal(declared: DeclaredMessage) -> None:
    assert set(declared.governance["consumers"]) >= {"catalog", "favorites", "selections", "notifications"}
    assert declared.governance["producer"] == "chessboard"
    assert set(declared.payload["properties"]) == set(declared.payload["required"]) == {
        "PropertyObjectId", "TenantId", "ProjectId", "BuildingId", "FromStatus", "ToStatus", "StatusSource",
        "ReservedUntil", "BookedUntil", "HoldDealId", "SoldAt", "StatusChangedAt", "Version",
    }  # fmt: skip


@pytest.mark.messaging
@pytest.mark.req("HLD-93g")
async def test_delivery_lag_of_the_event_is_measured_from_its_row_to_the_acknowledgement(
    connected: World, broker: TestBroker
) -> None:
    await lost(connected)
    await lost(connected)
    board = connected.board("jobs", "relay")
    await cycle(board)
    await connected.admin.execute("update chessboard.outbox set created_at = created_at - interval '20 seconds'")
    relay: Relay = board.relays[0]
    while (await relay.run_once()).published:
        pass
    assert await connected.outbox() == []
    samples = await scrape(board)
    assert samples[f"{LAG}_count"] == 2
    assert 40 <= samples[f"{LAG}_sum"] < 80
    assert (samples[f'{LAG}_bucket{{le="10.0"}}'], samples[f'{LAG}_bucket{{le="60.0"}}']) == (0, 2)


@pytest.mark.req("HLD-94c", "HLD-94d")
async def test_a_cycle_is_a_span_that_carries_the_runs_id_and_its_events_belong_to_it(world: World) -> None:
    await lost(world)
    board, exporter = net(world), InMemorySpanExporter()
    tracing = configure_tracing("chessboard", None, exporter=exporter)
    assert tracing is not None
    try:
        await cycle(board)
        (span,) = [one for one in exporter.get_finished_spans() if one.name == f"job {JOB}"]
    finally:
        tracing.close()
    (event,) = await world.outbox()
    assert str(event["run_id"]) in map(str, (span.attributes or {}).values())
    assert event["headers"]["traceparent"].split("-")[1] == format_trace_id(span.context.trace_id)
