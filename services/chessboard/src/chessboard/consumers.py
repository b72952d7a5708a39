"""What chessboard consumes: CRM's requests about property objects, each translated and settled by one command.

A release by a booking that doesn't hold the object is refused as CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH and answered
all the same, in the transaction that sets the record aside.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers import Consumer, Delivery, Handler, Refused
from chessboard import commands, repository
from chessboard.domain import Ask, Result, Settlement
from chessboard.messages import CRM_TOPICS, CrmRequest
from chessboard.repository import Origin

CRM_PROPERTY_OBJECT_STATUS: Final = "pin.chessboard.crm-property-object-status"
HOLD_MISMATCH: Final = "CHESSBOARD_PROPERTY_OBJECT_HOLD_MISMATCH"
SEQUENCE_UNUSABLE: Final = "CHESSBOARD_REQUEST_SEQUENCE_UNUSABLE"
_LARGEST_SEQUENCE: Final = 2**63 - 1


class CrmRequests:
    """Settles CRM's requests and counts what became of them, once it is committed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._settled = Counter(
            "chessboard_crm_requests_total", "Requests of CRM settled.", ["ask", "result"], registry=registry
        )
        for ask in Ask:
            for result in Result:
                self._settled.labels(ask.value, result.value)

    async def on_request(self, session: AsyncSession, delivery: Delivery[CrmRequest]) -> None:
        """Settle a request and answer it.

        Raises:
            Refused: it has no usable number, or it releases what another booking holds.
        """
        settlement = await self._settle(session, delivery)
        if settlement.result is Result.MISMATCH:

            async def answer(session: AsyncSession) -> None:
                await self._settle(session, delivery)

            raise Refused(HOLD_MISMATCH, "the release is not of the booking that holds the object", answer)

    async def _settle(self, session: AsyncSession, delivery: Delivery[CrmRequest]) -> Settlement:
        sequence = delivery.envelope.sequence
        if sequence is None or not 1 <= sequence <= _LARGEST_SEQUENCE:
            raise Refused(SEQUENCE_UNUSABLE, "the request has no ce_sequence, or none that can be kept")
        request = delivery.payload.numbered(sequence)
        settlement = await commands.settle_request(session, request, Origin(delivery.now, None, delivery.cause))
        self._count(session, request.ask, settlement.result)
        return settlement

    def _count(self, session: AsyncSession, ask: Ask, result: Result) -> None:
        counted: list[tuple[str, str]] | None = session.info.get("settled")
        if counted is None:
            counted = session.info["settled"] = []
            event.listen(session.sync_session, "after_commit", lambda _: self._show(counted))
        counted.append((ask.value, result.value))

    def _show(self, counted: list[tuple[str, str]]) -> None:
        for labels in counted:
            self._settled.labels(*labels).inc()
        counted.clear()


def declare_consumers(registry: CollectorRegistry) -> list[Consumer]:
    """Return chessboard's consumers."""
    requests = CrmRequests(registry)
    handlers = [
        Handler(topic, topic, read, requests.on_request, lambda request: [request.property_object_id])
        for topic, read in CRM_TOPICS.items()
    ]
    return [Consumer(CRM_PROPERTY_OBJECT_STATUS, handlers, repository.preload)]
