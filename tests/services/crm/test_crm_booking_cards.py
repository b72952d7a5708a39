"""Messenger's sample reader gets crm's records from the broker: one card per step, never one per object."""

import importlib.util
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import orjson
import pytest
from booking_desk import Desk, ids
from crm_world import World

SAMPLE = Path(__file__).resolve().parents[2] / "consumers" / "messenger_cards.py"


@pytest.fixture
def sample() -> ModuleType:
    spec = importlib.util.spec_from_file_location("messenger_cards", SAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Record:
    """A record as librdkafka shows it."""

    def __init__(self, booking: str, version: int, to: str, reason: str | None = None, event: str = "") -> None:
        kind = "crm.booking.state-changed"
        headers = {"ce_id": event or str(uuid4()), "ce_type": kind, "ce_subject": booking, "ce_sequence": str(version)}
        self._headers = [(name, value.encode()) for name, value in headers.items()]
        self._value = orjson.dumps({"ToState": to, "Reason": reason, "PropertyObjectIds": ["a", "b"]})

    def headers(self) -> list[tuple[str, bytes]]:
        return self._headers

    def value(self) -> bytes:
        return self._value


@pytest.mark.req("TLO-10a", "EVT-035")
def test_the_sample_shows_each_event_once_and_nothing_older_than_what_it_has_shown(sample: ModuleType) -> None:
    cards = sample.Cards()
    expired = Record("b", 5, "cancelled", "expired")
    for record in (Record("b", 4, "held"), expired, expired, Record("b", 3, "held"), Record("b", 6, "failed")):
        cards.take(record)
    assert cards.shown == {"b": ["Бронь создана (2)", "Время брони истекло (2)"]}


@pytest.mark.messaging
@pytest.mark.req("TLO-10a", "HLD-10", "EVT-142")
async def test_one_card_per_step_reaches_the_chat_whatever_the_number_of_objects(
    connected: World, sample: ModuleType
) -> None:
    desk = Desk(connected, connected.system())
    small, large = await desk.held(), await desk.held(*ids(9))
    connected.clock.advance(timedelta(days=1, seconds=1))
    await desk.run("booking-expiration")
    relay = connected.crm("relay").relays[0]
    while (await relay.run_once()).published:
        pass
    cards = sample.Cards()
    sample.read(connected.bootstrap, f"messenger-{uuid4()}", cards, [str(small), str(large)], 5)
    assert cards.shown[str(small)] == ["Бронь создана (1)", "Время брони истекло (1)"]
    assert cards.shown[str(large)] == ["Бронь создана (9)", "Время брони истекло (9)"]
