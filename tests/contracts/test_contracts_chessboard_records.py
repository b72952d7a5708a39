"""What chessboard really writes is what its contract declares: its commands and its consumer run on a real database,
and the records are judged byte by byte in the outbox."""

import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from contract_checks import ROOT, contract_named, unproduced
from crm_story import NOWHERE, Written
from prometheus_client import CollectorRegistry

from chassis.audit import AuditSealer
from chassis.consumers.batches import Batches
from chassis.contracts.releases import breaches
from chassis.db import Actor, Database
from chassis.messaging import Received
from chassis.runtime import Stop
from chessboard import commands, messages
from chessboard.app import build
from chessboard.settings import ChessboardSettings

TENANT, PROJECT, BUILDING, UNIT = (UUID(int=number) for number in (1, 2, 3, 4))
AT = "'2026-11-01T00:00:00Z'"
SEED = f"""
insert into chessboard.project (id, tenant_id, name, version, created_at, updated_at)
values ('{PROJECT}', '{TENANT}', 'P', 1, {AT}, {AT});
insert into chessboard.building (id, tenant_id, project_id, name, sections, created_at, updated_at)
values ('{BUILDING}', '{TENANT}', '{PROJECT}', 'A', 1, {AT}, {AT});
insert into chessboard.property_object (id, tenant_id, project_id, building_id, section, number, floor, rooms, area,
  price_minor, currency, status, status_source, status_changed_at, version, created_at, updated_at)
values ('{UNIT}', '{TENANT}', '{PROJECT}', '{BUILDING}', 1, '12', 3, 2, 54.3, 100, 'RUB', 'Free', 'Import', {AT}, 1,
  {AT}, {AT})
"""


@pytest.fixture
async def records(databases: Any, clock: Any, connect: Any, contracts: Any) -> AsyncIterator[list[Written]]:
    """What a chessboard writes: every declared example of CRM's requests, a change by a person, a sealed audit."""
    database = await databases.make("chessboard", ROOT / "services/chessboard/migrations")
    settings = ChessboardSettings(
        env="development",
        database_url=database.system_url,
        api_database_url=database.api_url,
        migrate_database_url=database.owner_url,
        kafka_bootstrap=NOWHERE,
        kafka_security="plaintext",
    )
    board = build(settings, frozenset({"consumers"}), clock)
    api = Database(database.api_url, application_name="contracts")
    system = Database(database.system_url, application_name="contracts")
    admin = await connect(database.admin_url)
    await admin.execute(SEED)
    by = commands.By(TENANT, "user-7", clock.instant, "request-1")
    async with api.write(Actor(TENANT, user_id="user-7")) as session:
        await commands.reprice_object(session, UNIT, 200, "RUB", by)
    [handling] = board.handlings
    todo = [record(message, example) for message, example in _requests(contracts)]
    todo.append(record(*next(_requests(contracts)), value=b"{"))
    await Batches(handling).take(todo, Stop())
    sealer = AuditSealer(
        system, clock, schema="chessboard", registry=CollectorRegistry(), event=messages.AUDIT_RECORDED
    )
    assert await sealer.run_once() > 0
    rows = await admin.fetch("select topic, message_key, headers, payload from chessboard.outbox order by id")
    yield [Written(row["topic"], row["message_key"], json.loads(row["headers"]), row["payload"]) for row in rows]
    for opened in (api, system, board):
        await opened.close()
    await databases.drop(database)


def _requests(contracts: Any) -> Any:
    """Yield CRM's declared requests with each example."""
    for message in contract_named(contracts, "crm").messages():
        if message.topic in messages.CRM_TOPICS:
            for example in message.examples:
                yield message, example


def record(message: Any, example: Any, value: bytes | None = None) -> Received:
    """Return a declared example as a record about the object that there is."""
    payload = example["payload"] | {"PropertyObjectId": str(UNIT), "TenantId": str(TENANT)}
    headers = example["headers"] | {"ce_id": str(uuid4())}
    pairs = tuple((name, text.encode()) for name, text in headers.items())
    offset = uuid4().int % 10**6
    body = json.dumps(payload).encode() if value is None else value
    return Received(message.topic, 0, offset, 1_796_000_000_000, str(UNIT).encode(), body, pairs)


async def test_every_declared_message_is_produced_and_keeps_to_its_schemas_with_no_field_more(
    records: list[Written], contracts: Any
) -> None:
    assert unproduced("chessboard", {(one.topic, one.type) for one in records}, contracts) == []
    declared = {(one.topic, one.type): one for one in contract_named(contracts, "chessboard").messages()}
    found = {
        f"{one.type} {breach}"
        for one in records
        for breach in breaches(declared[one.topic, one.type], one.headers, one.payload)
    }
    assert found == set()


@pytest.mark.req("HLD-69", "HLD-70", "HLD-71", "HLD-72")
async def test_every_change_of_status_is_announced_under_its_objects_key(records: list[Written]) -> None:
    changes = [one for one in records if one.topic == "pin.chessboard.property-object-status-changed.v1"]
    assert changes
    for one in changes:
        assert one.key == one.headers["ce_subject"] == one.payload["PropertyObjectId"] == str(UNIT)
        assert one.headers["ce_aggregatetype"] == "PropertyObject"
        assert one.headers["ce_contractversion"] == "1"
        assert one.headers["ce_sequence"] == str(one.payload["Version"])
        assert one.headers["ce_causationid"]
