"""What crm does with the chessboard's messages: lock a batch's rows in order, translate, call a command.

hold-answers: bookings take the answers to what they asked. object-status: the safety net's releases reach the booking
that thinks it has the object. offers: a changed price takes open quotes back.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from prometheus_client import CollectorRegistry, Counter
from sqlalchemy.ext.asyncio import AsyncSession

from chassis.consumers import Consumer, Delivery, Handler
from crm import commands, repository
from crm.commands import Freed, Why
from crm.domain import Booking
from crm.messages import (
    HOLD_ANSWERED_TOPIC,
    OFFER_TOPIC,
    OFFER_UPDATED,
    STATUS_CHANGED_TOPIC,
    HoldAnswered,
    OfferUpdated,
    StatusChanged,
    read_hold_answered,
    read_offer_updated,
    read_status_changed,
)

HOLD_ANSWERS: Final = "pin.crm.hold-answers"
OBJECT_STATUS: Final = "pin.crm.object-status"
OFFERS: Final = "pin.crm.offers"


class Reactions:
    """The handlers of crm's consumers, and what they count.

    Args:
        registry: where the counters are registered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "crm_booking_answers_total",
            "Answers of the chessboard by whether they said anything new to their booking.",
            ["fate"],
            registry=registry,
        )
        self._freed = Counter(
            "crm_booking_net_releases_total",
            "Objects that the safety net freed, by whether a booking had to react.",
            ["fate"],
            registry=registry,
        )
        self._quotes = Counter(
            "crm_booking_quotes_invalidated_total", "Quotes taken back after a change of price.", registry=registry
        )
        for fate in ("taken", "ignored"):
            self._answers.labels(fate)
            self._freed.labels(fate)

    async def on_hold_answered(self, session: AsyncSession, delivery: Delivery[HoldAnswered]) -> None:
        """Let the booking take the answer; one that is old, repeated or nobody's is counted."""
        told = delivery.payload
        taken = await commands.take_answer(session, told.answer, told.tenant_id, _why(delivery))
        self._answers.labels("taken" if taken else "ignored").inc()

    async def on_status_changed(self, session: AsyncSession, delivery: Delivery[StatusChanged]) -> None:
        """React to the safety net; all other changes follow from what crm has asked for."""
        told = delivery.payload
        if not told.is_freed_by_net:
            return
        freed = Freed(told.property_object_id, told.tenant_id, told.version)
        reacted = await commands.react_to_net(session, freed, _why(delivery))
        self._freed.labels("taken" if reacted else "ignored").inc()

    async def on_offer_updated(self, session: AsyncSession, delivery: Delivery[OfferUpdated]) -> None:
        """Take back the open quotes of bookings with the object."""
        told = delivery.payload
        count = await commands.invalidate_quotes(session, told.property_object_id, told.tenant_id, _why(delivery))
        self._quotes.inc(count)


def declare_consumers(registry: CollectorRegistry) -> list[Consumer]:
    """Return crm's consumers."""
    reactions = Reactions(registry)
    answered = Handler(
        HOLD_ANSWERED_TOPIC,
        HOLD_ANSWERED_TOPIC,
        read_hold_answered,
        reactions.on_hold_answered,
        lambda told: (told.answer.booking_id,),
    )
    status = Handler(
        STATUS_CHANGED_TOPIC,
        STATUS_CHANGED_TOPIC,
        read_status_changed,
        reactions.on_status_changed,
        _freed_objects,
    )
    offer = Handler(
        OFFER_TOPIC,
        OFFER_UPDATED,
        read_offer_updated,
        reactions.on_offer_updated,
        lambda told: (told.property_object_id,),
    )
    return [
        Consumer(HOLD_ANSWERS, [answered], _lock),
        Consumer(OBJECT_STATUS, [status], _lock_claimants),
        Consumer(OFFERS, [offer], _lock_quoted),
    ]


def _freed_objects(told: StatusChanged) -> Iterable[UUID]:
    return (told.property_object_id,) if told.is_freed_by_net else ()


async def _lock(session: AsyncSession, booking_ids: Sequence[UUID]) -> None:
    """Lock what a batch may change, in the one order: bookings, claims, limits."""
    bookings = await repository.lock_bookings(session, booking_ids)
    await repository.lock_limits(session, [partner for one in bookings if (partner := _charged(one)) is not None])


async def _lock_claimants(session: AsyncSession, object_ids: Sequence[UUID]) -> None:
    claimants = await repository.find_claimants(session, object_ids)
    await _lock(session, [booking for bookings in claimants.values() for booking in bookings])


async def _lock_quoted(session: AsyncSession, object_ids: Sequence[UUID]) -> None:
    await _lock(session, await repository.find_quoted(session, object_ids))


def _charged(booking: Booking) -> tuple[UUID, UUID] | None:
    if booking.partner_id is None or not booking.charged_minor:
        return None
    return booking.tenant_id, booking.partner_id


def _why(delivery: Delivery[Any]) -> Why:
    return Why(delivery.now, delivery.cause)
