"""The audit chain: what is committed is sealed once, in an order nothing can slip into; tampering is named."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import asyncpg
import orjson
import pytest
from prometheus_client import CollectorRegistry

from chassis.audit import Audit, AuditRecord, AuditSealer, BrokenLink, Head, find_head, verify
from chassis.audit.sealer import AuditBroken
from chassis.clock import MovableClock
from chassis.db import Database
from chassis.messaging import Producer
from chassis.outbox import EventType
from chassis.platform_events import audit_recorded
from chassis.relay import Relay, RelayMetrics, Wakeup
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker, TestDatabase

AUDIT = Audit("crm")
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=UTC)
TENANT = UUID(int=9)
EVENT = audit_recorded("crm")
Admin = asyncpg.Connection


def record(number: int, **details: object) -> AuditRecord:
    return AuditRecord("thing.moved", "thing", UUID(int=number), TENANT if number % 2 else None, details)


async def note(database: Database, *numbers: int, actor: str | None = "user-1", **details: object) -> None:
    """Write audit rows in one transaction."""
    async with database.write() as session:
        await AUDIT.record(
            session,
            [record(number, **details) for number in numbers],
            occurred_at=NOW,
            actor=actor,
            correlation_id=f"req-{numbers[0]}",
        )


class Scene:
    def __init__(self, database: Database, clock: MovableClock) -> None:
        self.database, self.clock = database, clock
        self.registry = CollectorRegistry()
        self.sealer = self.make(CollectorRegistry(), EVENT)
        self.sealer = self.make(self.registry, EVENT)

    def make(self, registry: CollectorRegistry, event: EventType | None) -> AuditSealer:
        return AuditSealer(self.database, self.clock, schema="crm", registry=registry, event=event, interval=0.02)

    async def check(self, remembered: Head | None = None, page: int = 2) -> str | None:
        async with self.database.read() as session:
            found = await verify(session, "crm", remembered=remembered, page=page)
        return str(found) if isinstance(found, BrokenLink) else None

    async def head(self) -> Head:
        async with self.database.read() as session:
            return await find_head(session, "crm")


@pytest.fixture
def scene(system: Database, clock: MovableClock) -> Scene:
    return Scene(system, clock)


@pytest.fixture
async def sealed(scene: Scene) -> Scene:
    """Seven sealed rows of seven transactions."""
    for number in range(1, 8):
        await note(scene.database, number, rank=number)
    assert await scene.sealer.run_once() == 7
    return scene


async def chain(admin: Admin) -> list[asyncpg.Record]:
    return await admin.fetch("select * from crm.audit_seal order by sequence")


# --- sealing


async def test_rows_are_chained_in_order_and_only_once(sealed: Scene, admin: Admin) -> None:
    assert await sealed.sealer.run_once() == 0
    links = await chain(admin)
    assert [(link["sequence"], link["audit_id"]) for link in links] == [(number, number) for number in range(1, 8)]
    assert links[0]["previous_hash"] == bytes(32)
    assert [link["previous_hash"] for link in links[1:]] == [link["hash"] for link in links[:-1]]
    assert {link["sealed_at"] for link in links} == {NOW}
    assert sealed.registry.get_sample_value("pin_audit_sealed_total") == 7
    assert await sealed.check() is None
    assert await sealed.head() == Head(7, links[-1]["hash"])


async def test_a_link_can_be_computed_by_anyone_from_the_row(sealed: Scene, admin: Admin) -> None:
    row = await admin.fetchrow("select * from crm.audit_log where id = 1")
    content = [
        1, "2026-11-30T09:00:00Z", "user-1", "thing.moved", "thing", str(UUID(int=1)), str(TENANT), "req-1",
        row["details"],
    ]  # fmt: skip
    expected = hashlib.sha256(bytes(32) + (1).to_bytes(8, "big") + orjson.dumps(content)).digest()
    assert (await chain(admin))[0]["hash"] == expected


async def test_nothing_above_a_running_transaction_is_sealed_so_nothing_slips_in_between(
    scene: Scene, admin: Admin, connect: Callable[[str], Awaitable[Admin]], scratch: TestDatabase
) -> None:
    """The row with the lower ids commits last: it must come first all the same, or be seen as slipped in."""
    late = await connect(scratch.admin_url)
    transaction = late.transaction()
    await transaction.start()
    await late.execute(
        "insert into crm.audit_log (occurred_at, action, entity_type, entity_id, correlation_id, details)"
        " values ($1, 'thing.moved', 'thing', $2, 'late', '{}')",
        NOW,
        UUID(int=1),
    )
    await note(scene.database, 2)
    assert await scene.sealer.run_once() == 0
    assert await chain(admin) == []
    await transaction.commit()
    assert await scene.sealer.run_once() == 2
    assert [link["audit_id"] for link in await chain(admin)] == [1, 2]
    assert await scene.check() is None


async def test_a_transaction_that_only_reads_holds_nothing_up(
    scene: Scene, connect: Callable[[str], Awaitable[Admin]], scratch: TestDatabase
) -> None:
    reader = await connect(scratch.admin_url)
    async with reader.transaction(isolation="repeatable_read"):
        await reader.fetch("select * from crm.audit_log")
        await note(scene.database, 1)
        assert await scene.sealer.run_once() == 1


async def test_sealers_of_many_processes_make_one_chain(scene: Scene, admin: Admin) -> None:
    stop = Stop()
    sealers = [scene.make(CollectorRegistry(), None) for _ in range(4)]
    running = [asyncio.create_task(sealer.run(stop)) for sealer in sealers]
    await asyncio.gather(*(note(scene.database, *range(n * 10 + 1, n * 10 + 11)) for n in range(12)))
    async with asyncio.timeout(20):
        while await admin.fetchval("select count(*) from crm.audit_seal") < 120:
            await asyncio.sleep(0)
    stop.request()
    await asyncio.gather(*running)
    assert [link["sequence"] for link in await chain(admin)] == list(range(1, 121))
    assert await scene.check(page=50) is None


async def test_rows_of_a_rolled_back_transaction_leave_no_gap_in_the_chain(scene: Scene, admin: Admin) -> None:
    async def fail() -> None:
        async with scene.database.write() as session:
            await AUDIT.record(session, [record(2)], occurred_at=NOW, actor=None, correlation_id="x")
            raise LookupError

    await note(scene.database, 1)
    with pytest.raises(LookupError):
        await fail()
    await note(scene.database, 3)
    assert await scene.sealer.run_once() == 2
    assert [link["audit_id"] for link in await chain(admin)] == [1, 3]
    assert await scene.check() is None


async def test_a_failed_turn_seals_and_announces_nothing(scene: Scene, admin: Admin, alter: Callable) -> None:
    await note(scene.database, 1)
    await alter(
        "alter table crm.outbox add constraint no_more check (false) not valid",
        "alter table crm.outbox drop constraint no_more",
    )
    with pytest.raises(asyncpg.CheckViolationError):
        await scene.sealer.run_once()
    assert await chain(admin) == []
    assert scene.registry.get_sample_value("pin_audit_sealed_total") == 0


async def test_the_age_of_the_oldest_unsealed_row_is_shown(scene: Scene) -> None:
    def age() -> float | None:
        return scene.registry.get_sample_value("pin_audit_oldest_unsealed_age_seconds")

    await scene.sealer.observe()
    assert age() == 0
    await note(scene.database, 1)
    scene.clock.move_to(NOW.replace(minute=5))
    await scene.sealer.observe()
    assert age() == 300
    await scene.sealer.run_once()
    await scene.sealer.observe()
    assert age() == 0


async def test_the_age_is_shown_though_nothing_can_be_sealed(sealed: Scene, admin: Admin) -> None:
    await admin.execute("delete from crm.audit_log where id = 7")
    await note(sealed.database, 8)
    sealed.clock.move_to(NOW.replace(minute=5))
    with pytest.raises(AuditBroken):
        await sealed.sealer.run(Stop())
    assert sealed.registry.get_sample_value("pin_audit_oldest_unsealed_age_seconds") == 300


async def test_the_age_is_shown_after_a_restore_into_a_server_whose_transaction_ids_start_over(
    sealed: Scene, admin: Admin
) -> None:
    await admin.execute("update crm.audit_log set xid = (xid::text::bigint + 1000000)::text::xid8")
    await note(sealed.database, 8)
    sealed.clock.move_to(NOW.replace(minute=5))
    with pytest.raises(AuditBroken, match="one that nobody has had yet"):
        await asyncio.wait_for(sealed.sealer.run(Stop()), 10)
    assert sealed.registry.get_sample_value("pin_audit_oldest_unsealed_age_seconds") == 300


# --- announcing


async def test_a_sealed_row_is_announced_in_the_same_transaction(scene: Scene, admin: Admin) -> None:
    await note(scene.database, 1, rank=1)
    await note(scene.database, 2, actor=None)
    await scene.sealer.run_once()
    first, second = await admin.fetch("select * from crm.outbox order by id")
    (link, _) = await chain(admin)
    assert orjson.loads(first["payload"]) == {
        "auditId": "1", "sequence": 1, "occurredAt": "2026-11-30T09:00:00Z", "actor": "user-1", "action": "thing.moved",
        "entityType": "thing", "entityId": str(UUID(int=1)), "tenantId": str(TENANT), "correlationId": "req-1",
        "details": {"rank": 1}, "previousHash": "00" * 32, "hash": link["hash"].hex(),
    }  # fmt: skip
    headers = orjson.loads(first["headers"])
    assert (first["topic"], first["message_key"], second["message_key"]) == ("pin.crm.audit.v1", "user-1", "system")
    assert (headers["ce_type"], headers["ce_eventclass"], headers["ce_source"]) == (
        "audit.recorded", "audit", "/pin/crm",
    )  # fmt: skip
    assert (headers["ce_correlationid"], headers["ce_tenantid"], headers["ce_subject"]) == ("req-1", str(TENANT), "1")
    assert orjson.loads(second["payload"])["tenantId"] is None


async def test_sealing_again_after_a_crash_announces_with_the_same_ids(scene: Scene, admin: Admin) -> None:
    await note(scene.database, 1, 2)
    await scene.sealer.run_once()
    before = await admin.fetch("select event_id, payload from crm.outbox order by id")
    await admin.execute("truncate crm.audit_seal, crm.outbox")
    await scene.sealer.run_once()
    assert await admin.fetch("select event_id, payload from crm.outbox order by id") == before
    assert len({row["event_id"] for row in before}) == 2


async def test_a_row_too_large_for_a_record_is_sealed_and_announced_without_its_details(
    scene: Scene, admin: Admin
) -> None:
    await note(scene.database, 1, text="x" * 1_000_000)
    await note(scene.database, 2)
    assert await scene.sealer.run_once() == 2
    payloads = [orjson.loads(row["payload"]) for row in await admin.fetch("select payload from crm.outbox order by id")]
    assert [payload["details"] for payload in payloads] == [{"omitted": "too large"}, {}]
    assert await scene.check() is None


@pytest.mark.messaging
async def test_a_sealed_row_arrives_on_kafka(scene: Scene, broker: TestBroker, topic: str) -> None:
    event = EventType(topic, "audit.recorded", "/pin/test", "AuditRecord", "audit")
    await note(scene.database, 1)
    await scene.make(CollectorRegistry(), event).run_once()
    producer = Producer(broker.address, client_id="test")
    metrics = RelayMetrics(CollectorRegistry())
    await Relay(scene.database, producer, schema="crm", wakeup=Wakeup(), metrics=metrics).run_once()
    await producer.close()
    arrived = broker.expect(topic, "audit.recorded")
    assert (arrived.key, arrived.payload["sequence"]) == ("user-1", 1)


# --- tampering


TAMPERING = {
    "a changed actor": ("update crm.audit_log set actor = 'somebody' where id = 4", "4", "row 4: the row was changed"),
    "a changed instant": (
        "update crm.audit_log set occurred_at = occurred_at + interval '1 us' where id = 4", "4", "the row was changed",
    ),
    "a changed detail": (
        """update crm.audit_log set details = '{"rank": 4.0}' where id = 4""", "4", "the row was changed",
    ),
    "the first row changed": ("update crm.audit_log set tenant_id = null where id = 1", "1", "the row was changed"),
    "the last row changed": ("update crm.audit_log set action = 'x' where id = 7", "7", "the row was changed"),
    "a deleted row": ("delete from crm.audit_log where id = 4", "4", "audit row 4: the row was deleted"),
    "another id": ((
            "with moved as (delete from crm.audit_log where id = 4 returning *)"
            " insert into crm.audit_log overriding system value"
            " select 99, occurred_at, actor, action, entity_type, entity_id, tenant_id, correlation_id, details, xid"
            " from moved"
        ), "4", "the row was deleted"),
    "a row inserted into the middle": (
        (
            "insert into crm.audit_log (id, occurred_at, action, entity_type, entity_id, correlation_id, details, xid)"
            " overriding system value"
            " select 99, occurred_at, action, entity_type, entity_id, correlation_id, details, xid"
            " from crm.audit_log where id = 4"
        ),
        "", "audit row 99: the row was inserted between sealed ones",
    ),
    "a changed hash": (
        r"update crm.audit_seal set hash = sha256('x') where sequence = 4", "4", "the seal was changed",
    ),
    "a changed predecessor": (
        r"update crm.audit_seal set previous_hash = sha256('x') where sequence = 4", "4", "the seal was changed",
    ),
    "a seal of another row": (
        "update crm.audit_seal set audit_id = 99 where sequence = 4", "4", "audit row 99: the row was deleted",
    ),
    "a missing seal": ("delete from crm.audit_seal where sequence = 4", "4", "the seal is missing"),
    "the first seal missing": ("delete from crm.audit_seal where sequence = 1", "1", "the seal is missing"),
    "a moved transaction": (
        "update crm.audit_log set xid = (select xid from crm.audit_log where id = 1) where id = 4", "4",
        "transaction id was changed",
    ),
    "the last transaction moved up": (
        "update crm.audit_log set xid = (xid::text::bigint + 1000000)::text::xid8 where id = 7", "7",
        "transaction id is one that nobody has had yet",
    ),
}  # fmt: skip


@pytest.mark.req("EVT-138b", "EVT-138e")
@pytest.mark.parametrize("page", [1, 3, 2000])
@pytest.mark.parametrize("kind", TAMPERING)
async def test_a_tampered_audit_row_is_named_by_the_verifier(sealed: Scene, admin: Admin, kind: str, page: int) -> None:
    statement, link, reason = TAMPERING[kind]
    assert await sealed.check(page=page) is None
    await admin.execute(statement)
    said = await sealed.check(page=page)
    assert said is not None
    assert said.startswith(f"link {link}")
    assert reason in said


async def test_of_two_broken_links_the_first_is_named(sealed: Scene, admin: Admin) -> None:
    await admin.execute("update crm.audit_log set actor = 'x' where id in (3, 6)")
    assert (await sealed.check() or "").startswith("link 3,")


async def test_a_tail_that_was_cut_off_is_seen_by_a_remembered_head(sealed: Scene, admin: Admin) -> None:
    head = await sealed.head()
    assert await sealed.check(head) is None
    await admin.execute("delete from crm.audit_seal where sequence > 5; delete from crm.audit_log where id > 5")
    assert await sealed.check() is None, "nothing in the database can show it"
    assert await sealed.check(head) == "link 6: the chain ends before the remembered head 7"


async def test_a_chain_made_anew_is_seen_by_a_remembered_head(sealed: Scene, admin: Admin) -> None:
    head = await sealed.head()
    await admin.execute("update crm.audit_log set actor = 'somebody' where id = 3; truncate crm.audit_seal")
    await sealed.sealer.run_once()
    assert await sealed.check() is None
    assert "made anew" in (await sealed.check(head) or "")


async def test_a_head_still_holds_when_the_chain_has_grown(sealed: Scene) -> None:
    head = await sealed.head()
    await note(sealed.database, 8)
    await sealed.sealer.run_once()
    assert await sealed.check(head) is None
    assert Head.parse(str(head)) == head


@pytest.mark.parametrize("said", ["", "7", "x:00", "7:zz", "7:00", "-1:" + "00" * 32])
def test_what_is_no_head_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Head.parse(said)


async def test_nothing_is_sealed_on_top_of_a_deleted_row(sealed: Scene, admin: Admin) -> None:
    await admin.execute("delete from crm.audit_log where id = 7")
    await note(sealed.database, 8)
    with pytest.raises(AuditBroken, match="the last seal is gone"):
        await sealed.sealer.run_once()


async def test_nothing_is_passed_over_silently_behind_a_transaction_id_that_nobody_has_had(
    sealed: Scene, admin: Admin
) -> None:
    await admin.execute("update crm.audit_log set xid = (xid::text::bigint + 1000000)::text::xid8 where id = 7")
    await note(sealed.database, 8)
    with pytest.raises(AuditBroken, match="transaction id"):
        await sealed.sealer.run_once()
    assert "audit row 7: the row's transaction id" in (await sealed.check() or "")


async def test_an_empty_log_is_whole(scene: Scene, admin: Admin) -> None:
    empty: Any = await scene.head()
    assert (await scene.check(), str(empty)) == (None, "0:" + "00" * 32)
    assert await scene.sealer.run_once() == 0
