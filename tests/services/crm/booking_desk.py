"""What the tests of bookings share: commands as a person gives them, and the chessboard's side of the messages.

The stand-in reads crm's outbox as the chessboard reads the topics, and its answers go through crm's real consumers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import orjson
from crm_world import TENANT, World, token
from prometheus_client import CollectorRegistry

from chassis.consumers import ConsumerMetrics
from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.db import Database
from chassis.messaging import Received
from chassis.runtime import Stop
from crm.consumers import declare_consumers

BOOKINGS: Final = "crm:bookings:read crm:bookings:write crm:limits:write crm:deals:read crm:deals:write"
HOLD_ANSWERED: Final = "pin.chessboard.hold-answered.v1"
STATUS_CHANGED: Final = "pin.chessboard.property-object-status-changed.v1"
OFFER: Final = "pin.chessboard.offer.v1"
USUAL: Final = {
    "pin.crm.booking-hold-requested.v1": "held",
    "pin.crm.booking-commit-requested.v1": "booked",
    "pin.crm.deal-completed.v1": "sold",
    "pin.crm.booking-expired.v1": "released",
    "pin.crm.booking-cancelled.v1": "released",
    "pin.crm.deal-cancelled.v1": "released",
}
"""What a chessboard without quarrels answers to each topic."""

Row = dict[str, Any]


@dataclass
class Desk:
    """People, partners and the chessboard of one test's crm."""

    world: World
    system: Database
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        metrics = ConsumerMetrics(self.registry)
        self._batches: dict[str, Batches] = {}
        for consumer in declare_consumers(self.registry):
            handling = Handling(self.system, consumer, "crm", self.world.clock, metrics)
            self._batches |= {topic: Batches(handling) for topic in consumer.topics}
        self.client = self.world.client(bearer=token(scope=BOOKINGS))
        self._offset = 0
        self._answered = 0

    def partner(self, partner_id: UUID, tenant: UUID = TENANT):
        """Return the client of a partner."""
        return self.world.client(bearer=token(tenant, scope=BOOKINGS, partner_id=str(partner_id), sub="api-client"))

    async def post(self, path: str, status: int = 200, client: Any = None, **body: Any) -> Row:
        """Give a command over HTTP and return its answer."""
        answer = await (client or self.client).post(f"/v1/{path}", json=body or None)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def draft(self, *objects: UUID, deal: UUID | None = None, **more: Any) -> UUID:
        """Draft a booking of objects (a new one if none is given)."""
        ids = [str(one) for one in objects or (uuid4(),)]
        body = {"dealId": str(deal or await self.world.deal()), "propertyObjectIds": ids, **more}
        return UUID((await self.post("bookings", 201, **body))["id"])

    async def reserved(self, *objects: UUID, price: int = 1000, **more: Any) -> UUID:
        """Return a booking that is quoted and whose hold has been asked for."""
        booking = await self.draft(*objects, **more)
        expires = (self.world.now + timedelta(hours=1)).isoformat()
        await self.post(f"bookings/{booking}/quote", priceMinor=price, currency="EUR", expiresAt=expires)
        until = (self.world.now + timedelta(days=1)).isoformat()
        await self.post(f"bookings/{booking}/reserve", 202, reservedUntil=until)
        return booking

    async def held(self, *objects: UUID, **more: Any) -> UUID:
        """Return a booking whose objects are held."""
        booking = await self.reserved(*objects, **more)
        await self.answer_all()
        return booking

    async def committing(self, *objects: UUID, **more: Any) -> UUID:
        """Return a booking whose objects were asked to be booked."""
        booking = await self.held(*objects, **more)
        await self.commit(booking)
        return booking

    async def confirmed(self, *objects: UUID, **more: Any) -> UUID:
        """Return a confirmed booking."""
        booking = await self.committing(*objects, **more)
        await self.answer_all()
        return booking

    async def commit(self, booking: UUID, status: int = 202) -> Row:
        """Decide to book."""
        until = (self.world.now + timedelta(days=14)).isoformat()
        return await self.post(f"bookings/{booking}/commit", status, bookedUntil=until)

    async def state(self, booking: UUID) -> str:
        """Return a booking's state."""
        return await self.world.admin.fetchval("select state from crm.booking where id = $1", booking)

    async def row(self, booking: UUID) -> Row:
        """Return a booking's row."""
        return dict(await self.world.admin.fetchrow("select * from crm.booking where id = $1", booking) or {})

    async def sent(self, *topics: str, booking: UUID | None = None) -> list[Row]:
        """Return what crm's outbox holds of topics, all or those of one booking, in order."""
        rows = await self.world.outbox()
        return [
            row
            for row in rows
            if row["topic"] in topics and (booking is None or row["payload"].get("BookingId") == str(booking))
        ]

    async def moves(self, booking: UUID) -> list[str]:
        """Return the states that a booking was announced to have come to."""
        sent = await self.sent("pin.crm.booking.v1", booking=booking)
        return [row["payload"]["ToState"] for row in sent if row["type"] == "crm.booking.state-changed"]

    async def answer_all(self, **instead: str) -> None:
        """Answer every request that was not answered yet; `instead` says otherwise for some objects (ids as hex)."""
        for request in await self.sent(*USUAL):
            if request["id"] > self._answered:
                self._answered = request["id"]
                one = UUID(request["payload"]["PropertyObjectId"])
                await self.answer(request, instead.get(one.hex, USUAL[request["topic"]]))

    async def answer(self, request: Row, outcome: str, version: int = 5) -> None:
        """Answer one request."""
        asked = request["payload"]
        sequence = int(request["headers"]["ce_sequence"])
        payload = {name: asked[name] for name in ("BookingId", "TenantId", "PropertyObjectId")}
        await self.deliver(
            HOLD_ANSWERED, payload | {"Sequence": sequence, "Outcome": outcome, "Reason": None, "Version": version}
        )

    async def net_frees(self, one: UUID, version: int = 6, source: str = "ExpirationJob") -> None:
        """Let the safety net (or another source) free an object."""
        payload = {
            "PropertyObjectId": str(one), "TenantId": str(TENANT), "ProjectId": str(uuid4()),
            "BuildingId": str(uuid4()), "FromStatus": "Reserved", "ToStatus": "Free", "StatusSource": source,
            "ReservedUntil": None, "BookedUntil": None, "HoldDealId": None, "SoldAt": None,
            "StatusChangedAt": self.world.now.isoformat(), "Version": version,
        }  # fmt: skip
        await self.deliver(STATUS_CHANGED, payload)

    async def price_changes(self, one: UUID) -> None:
        """Let an offer's price change."""
        payload = {
            "PropertyObjectId": str(one), "TenantId": str(TENANT), "ProjectId": str(uuid4()),
            "ChangedAt": self.world.now.isoformat(), "Version": 7,
        }  # fmt: skip
        await self.deliver(OFFER, payload, "chessboard.offer.updated")

    async def deliver(self, topic: str, payload: Mapping[str, Any], kind: str | None = None, times: int = 1) -> None:
        """Hand a record to the consumer of its topic, as often as is said."""
        record = self.record(topic, payload, kind)
        for _ in range(times):
            await self._batches[topic].take([record], Stop())

    def record(self, topic: str, payload: Mapping[str, Any], kind: str | None = None) -> Received:
        """Return a record as the chessboard sends it."""
        self._offset += 1
        key = str(payload["PropertyObjectId"])
        headers = {
            "content-type": "application/json", "ce_specversion": "1.0", "ce_id": str(uuid4()),
            "ce_source": "/pin/chessboard", "ce_type": kind or topic, "ce_time": self.world.now.isoformat(),
            "ce_subject": key, "ce_aggregatetype": "PropertyObject", "ce_contractversion": "1",
            "ce_correlationid": "request-1", "ce_eventclass": "domain",
        }  # fmt: skip
        raw = tuple((name, value.encode()) for name, value in headers.items())
        return Received(topic, 0, self._offset, 1_796_000_000_000, key.encode(), orjson.dumps(payload), raw)

    async def run(self, job: str, **overrides: Any) -> dict[str, int]:
        """Run one cycle of a job of bookings in a process of its own and return its counts."""
        process = self.world.crm("jobs", **overrides)
        (driver,) = [driver for driver in process.drivers if driver.job.name == job]
        return (await driver.run_once()).counts

    def counted(self, name: str, **labels: str) -> float:
        """Return a counter of the consumers."""
        return self.registry.get_sample_value(name, labels) or 0.0


def ids(count: int) -> Sequence[UUID]:
    """Return ids of objects."""
    return [uuid4() for _ in range(count)]
