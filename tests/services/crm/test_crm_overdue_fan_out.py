"""From the outbox to two foreign consumers: nothing before the commit, then a card in the chat and a push, each once.

Messenger and notifications are systems of others. Two small consumers, in consumer groups of their own and with a
client library that the services don't use, stand in for them and do what the source says they do.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID, uuid4

import httpx
import orjson
import pytest
from confluent_kafka import Consumer
from confluent_kafka import Message as RawMessage
from crm_world import World, driver_of, token

from chassis.jobs import Run
from chassis.relay import Relay
from chassis.runtime import Stop
from chassis.testing.plugin import TestBroker
from crm import commands
from crm.app import Crm
from crm.domain import OverdueLimits

pytestmark = pytest.mark.messaging

TENANT, OTHER_TENANT = uuid4(), uuid4()
OURS: Final = {str(TENANT), str(OTHER_TENANT)}
"""The broker may hold what other tests have sent; the readers look at these tenants only."""
TOPIC: Final = "pin.crm.timeline-overdue.v1"
CARD: Final = {
    "DocumentRequested": "Шаг просрочен: документ не получен",
    "PaymentRequested": "Шаг просрочен: оплата не поступила",
    "SigningRequested": "Шаг просрочен: договор не подписан",
    "InspectionScheduled": "Шаг просрочен: осмотр не проведён",
    "RegistrationSubmitted": "Шаг просрочен: регистрация не завершена",
}
"""The readers' own words for each type; the producer sends none."""


@dataclass
class Reader:
    """A consumer group of one member that handles each event id once and commits what it has handled."""

    bootstrap: str
    group: str
    handled: list[str] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 20,
                "log_level": 0,
            }
        )
        self._consumer.subscribe([TOPIC])

    def until(self, enough: Callable[[], bool], seconds: float = 30.0) -> None:
        """Read until a condition on what was handled is true."""
        deadline = time.monotonic() + seconds
        while not enough():
            assert time.monotonic() < deadline, f"{self.group} has handled {len(self.handled)} events"
            messages = self._consumer.consume(num_messages=500, timeout=0.2)
            for message in messages:
                assert message.error() is None, message.error()
                self._take(message)
            if messages:
                self._consumer.commit(asynchronous=False)

    def close(self) -> None:
        self._consumer.close()

    def handle(self, payload: dict[str, Any]) -> None:
        """Do what this reader does with one event."""

    def _take(self, message: RawMessage) -> None:
        headers = {name: (value or b"").decode(errors="replace") for name, value in message.headers() or []}
        if headers.get("ce_tenantid") not in OURS:
            return
        assert (message.key() or b"").decode() == headers["ce_subject"]
        self.received.append({"headers": headers, "payload": orjson.loads(message.value() or b"")})
        if headers["ce_type"] != TOPIC or headers["ce_id"] in self.handled:
            return
        self.handled.append(headers["ce_id"])
        self.handle(self.received[-1]["payload"])


@dataclass
class Messenger(Reader):
    """Puts a card into the chat of the deal; the text is its own, by type."""

    chats: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def handle(self, payload: dict[str, Any]) -> None:
        self.chats[payload["DealId"]].append(CARD[payload["Type"]])


@dataclass
class Notifications(Reader):
    """Sends a push and a mail to the participants of the deal, whom it knows and the event doesn't name."""

    participants: dict[str, list[str]] = field(default_factory=dict)
    sent: list[tuple[str, str, str]] = field(default_factory=list)

    def handle(self, payload: dict[str, Any]) -> None:
        for person in self.participants.get(payload["DealId"], []):
            for channel in ("push", "email"):
                self.sent.append((person, channel, CARD[payload["Type"]]))


@pytest.fixture
def messenger(broker: TestBroker) -> Iterator[Messenger]:
    reader = Messenger(broker.address.bootstrap, f"pin.messenger.{uuid4()}")
    yield reader
    reader.close()


@pytest.fixture
def notifications(broker: TestBroker) -> Iterator[Notifications]:
    reader = Notifications(broker.address.bootstrap, f"pin.notifications.{uuid4()}")
    yield reader
    reader.close()


async def relay_all(crm: Crm) -> int:
    """Let a process's relay publish until nothing is left; return how many events it published."""
    relay: Relay = crm.relays[0]
    published = 0
    while (turn := await relay.run_once()).published or turn.more:
        published += turn.published
    return published


async def icons(client: httpx.AsyncClient, deal: UUID) -> list[str | None]:
    items = (await client.get(f"/v1/deals/{deal}/timeline")).json()["items"]
    return [item["icon"] for item in items]


@pytest.mark.req("TLO-03", "TLO-09", "TLO-50", "TLO-51", "TLO-52", "TLO-59", "TLO-61")
async def test_icon_comes_with_the_commit_and_card_and_push_when_the_readers_have_read(
    connected: World, messenger: Messenger, notifications: Notifications
) -> None:
    world = connected
    deals = [await world.deal(TENANT), await world.deal(OTHER_TENANT)]
    for deal in deals:
        for kind in CARD:
            await world.step(deal, due=world.ago(hours=1), kind=kind)
    first = str(deals[0])
    notifications.participants = {first: ["buyer", "manager"]}
    crm = world.crm("api", "jobs", "relay")
    client = world.client(crm, token(TENANT))

    assert (await driver_of(crm).run_once()).counts["processed"] == 10
    assert await icons(client, deals[0]) == ["просрочено"] * 5, "right after the commit"
    assert len(await world.outbox()) == 10, "nothing is published yet"
    assert (messenger.chats, notifications.sent) == ({}, [])

    assert await relay_all(crm) == 10
    assert await world.outbox() == []
    ours = {str(deal) for deal in deals}
    await asyncio.to_thread(messenger.until, lambda: sum(len(messenger.chats[deal]) for deal in ours) == 10)
    for deal in ours:
        assert sorted(messenger.chats[deal]) == sorted(CARD.values()), "one card per transition, worded by type"
    assert notifications.sent == [], "the groups are independent"
    await asyncio.to_thread(notifications.until, lambda: len(notifications.sent) == 20)
    assert sorted(notifications.sent) == sorted(
        (person, channel, text)
        for person in ("buyer", "manager")
        for channel in ("push", "email")
        for text in CARD.values()
    )


@pytest.mark.req("TLO-44", "TLO-45", "TLO-48", "TLO-50")
async def test_readers_find_the_payload_and_the_envelope_of_the_contract(
    connected: World, messenger: Messenger
) -> None:
    world = connected
    deal = await world.deal(TENANT, title="Квартира Иванова")
    step = await world.step(deal, due=world.ago(hours=1), payload={"fullName": "Иванов"})
    crm = world.crm("jobs", "relay")
    await driver_of(crm).run_once()
    (row,) = await world.outbox()
    await relay_all(crm)
    await asyncio.to_thread(messenger.until, lambda: str(deal) in messenger.chats)
    (event,) = [event for event in messenger.received if event["payload"]["DealId"] == str(deal)]
    assert event["headers"] == row["headers"]
    assert event["headers"]["ce_contractversion"] == "1"
    assert (
        event["payload"]
        == row["payload"]
        == {
            "DealId": str(deal),
            "TimelineEventId": str(step),
            "TenantId": str(TENANT),
            "Type": "DocumentRequested",
            "DueAt": "2026-11-30T08:00:00Z",
            "OverdueAt": "2026-11-30T09:00:00Z",
        }
    )


@asynccontextmanager
async def batch_held_open(world: World) -> AsyncIterator[None]:
    """Run one batch and keep its transaction open for the block; an exception in it rolls the batch back."""
    run = Run(uuid4(), world.now, Stop(), lambda: None)
    async with world.system().write() as session:
        assert (await commands.mark_overdue_steps(session, run, OverdueLimits(5, 1), None)).processed_count == 1
        yield


async def mark_and_publish(crm: Crm) -> None:
    """Make one step overdue in a batch of its own and publish its event, and no other."""
    assert (await driver_of(crm).run_once()).counts["processed"] == 1
    assert await relay_all(crm) == 1


@pytest.mark.req("TLO-47", "TLO-61a")
async def test_nothing_is_published_before_the_batch_has_committed(connected: World, messenger: Messenger) -> None:
    """An event of the same deal, so of the same partition, is sent and read while the batch is open."""
    deal = await connected.deal(TENANT)
    await connected.step(deal, due=connected.ago(hours=2), kind="PaymentRequested")
    crm = connected.crm("jobs", "relay")
    chat = messenger.chats[str(deal)]
    async with batch_held_open(connected):
        assert await relay_all(crm) == 0
        await connected.step(deal, due=connected.ago(hours=1), kind="SigningRequested")
        await mark_and_publish(crm)
        await asyncio.to_thread(messenger.until, lambda: len(chat) > 0)
        assert chat == [CARD["SigningRequested"]]
    assert await relay_all(crm) == 1
    await asyncio.to_thread(messenger.until, lambda: len(chat) > 1)
    assert chat == [CARD["SigningRequested"], CARD["PaymentRequested"]]


@pytest.mark.req("TLO-53", "TLO-61a")
async def test_batch_that_rolls_back_publishes_nothing(connected: World, messenger: Messenger) -> None:
    deal = await connected.deal(TENANT)
    step = await connected.step(deal, due=connected.ago(hours=2), kind="PaymentRequested")
    crm = connected.crm("jobs", "relay")
    chat = messenger.chats[str(deal)]
    with pytest.raises(ZeroDivisionError):
        async with batch_held_open(connected):
            raise ZeroDivisionError
    assert await relay_all(crm) == 0
    later = connected.ago(hours=-1)
    await connected.admin.execute("update crm.deal_timeline_event set due_at = $2 where id = $1", step, later)
    await connected.step(deal, due=connected.ago(hours=1), kind="SigningRequested")
    await mark_and_publish(crm)
    await asyncio.to_thread(messenger.until, lambda: len(chat) > 0)
    assert chat == [CARD["SigningRequested"]]


@pytest.mark.req("TLO-61a", "TLO-61d")
async def test_running_service_publishes_by_itself(connected: World, messenger: Messenger) -> None:
    world = connected
    deal = await world.deal(TENANT)
    crm = world.crm("jobs", "relay", job_timeline_overdue_interval=0.05, relay_interval=60)
    async with crm.app.router.lifespan_context(crm.app):
        await world.step(deal, due=world.ago(hours=1))
        await asyncio.to_thread(messenger.until, lambda: str(deal) in messenger.chats)
    assert messenger.chats[str(deal)] == [CARD["DocumentRequested"]]


@pytest.mark.req("TLO-43")
async def test_readers_see_one_card_though_the_relay_sent_the_event_twice(
    connected: World, messenger: Messenger
) -> None:
    """A crash between the broker's acknowledgement and our commit repeats the record under its own id."""
    deal = await connected.deal(TENANT)
    await connected.step(deal, due=connected.ago(hours=1), kind="PaymentRequested")
    crm = connected.crm("jobs", "relay")
    await driver_of(crm).run_once()
    await connected.admin.execute("create temporary table kept as select * from crm.outbox")
    assert await relay_all(crm) == 1
    await connected.admin.execute("insert into crm.outbox overriding user value select * from kept")
    assert await relay_all(crm) == 1
    await connected.step(deal, due=connected.ago(minutes=1), kind="SigningRequested")
    await mark_and_publish(crm)
    chat = messenger.chats[str(deal)]
    await asyncio.to_thread(messenger.until, lambda: CARD["SigningRequested"] in chat)
    ids = [event["headers"]["ce_id"] for event in messenger.received if event["payload"]["DealId"] == str(deal)]
    assert len(ids) == 3
    assert ids[0] == ids[1]
    assert chat == [CARD["PaymentRequested"], CARD["SigningRequested"]]
