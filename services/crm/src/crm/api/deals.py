"""HTTP routes of deals under /v1/deals: parse, call one command or query, answer.

Bodies are camelCase, instants carry an offset, unknown fields are refused, and so is what the database can't keep: a
body that passes here never fails in an insert.
"""

from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

from fastapi import Query, Response
from pydantic import Field
from sqlalchemy import RowMapping

from chassis.preconditions import entity_tag
from chassis.web import Body, Call, IfMatch, Instant, Keyset, Router, StorableObject, StorableText, reading, writing
from crm import commands, queries
from crm.api.errors import by_of, refuse_partners
from crm.domain import (
    CLOSES,
    DealStatus,
    DealTimelineEventType,
    StepStatus,
    ValidationError,
)

READ: Final = "crm:deals:read"
WRITE: Final = "crm:deals:write"
DEALS: Final = Keyset("deals", UUID)
"""The order of the list of deals: ids are made in time order, the newest comes first."""


class OpenDeal(Body):
    """A deal to open."""

    title: StorableText = Field(min_length=1, max_length=255)


class AddStep(Body):
    """A step to add to a deal's timeline; a closer takes no due time."""

    type: DealTimelineEventType
    occurred_at: Instant
    due_at: Instant | None = None
    payload: StorableObject = Field(default_factory=dict)


class DealView(Body):
    """A deal as its page shows it."""

    id: UUID
    title: str
    status: DealStatus
    version: int
    overdue_steps: int
    created_at: datetime
    updated_at: datetime


class DealPage(Body):
    """Deals, newest first; `next` goes into `after` for the following page."""

    items: list[DealView]
    next: str | None


class StepView(Body):
    """One line of the tab «Ход сделки»; an overdue step has the icon «просрочено»."""

    id: UUID
    type: DealTimelineEventType
    status: StepStatus
    icon: str | None
    occurred_at: datetime
    due_at: datetime | None
    completed_at: datetime | None
    updated_at: datetime
    actor_role: str | None


class TimelineView(Body):
    """The tab «Ход сделки» of a deal."""

    items: list[StepView]


class StepAdded(Body):
    """The step that was added."""

    id: UUID
    status: StepStatus


router = Router(prefix="/v1/deals", tags=["deals"])


@router.post("", status_code=201)
async def open_deal(response: Response, body: OpenDeal, call: Annotated[Call, writing(WRITE)]) -> DealView:
    """Open a deal."""
    deal = await commands.open_deal(call.session, body.title, await by_of(call))
    response.headers["location"] = f"/v1/deals/{deal.id}"
    return _tagged(response, await queries.get_deal(call.session, deal.id))


@router.get("")
async def list_deals(
    call: Annotated[Call, reading(READ)],
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    after: str | None = None,
    status: DealStatus | None = None,
) -> DealPage:
    """List deals of the caller's tenant, newest first."""
    position = DEALS.position(after)
    rows = await queries.list_deals(
        call.session, limit=limit + 1, after=position[0] if position else None, status=status
    )
    page = DEALS.page(rows, limit, lambda row: (row["id"],))
    return DealPage(items=[DealView.model_validate(row) for row in page.items], next=page.next)


@router.get("/{deal_id}")
async def get_deal(response: Response, deal_id: UUID, call: Annotated[Call, reading(READ)]) -> DealView:
    """Return one deal."""
    return _tagged(response, await queries.get_deal(call.session, deal_id))


@router.get("/{deal_id}/timeline")
async def get_timeline(response: Response, deal_id: UUID, call: Annotated[Call, reading(READ)]) -> TimelineView:
    """Return the tab «Ход сделки»; its ETag is the deal's."""
    version, rows = await queries.get_timeline(call.session, deal_id)
    response.headers["etag"] = entity_tag(version)
    return TimelineView(items=[StepView.model_validate(row) for row in rows])


@router.post("/{deal_id}/timeline", status_code=201)
async def add_step(
    response: Response,
    deal_id: UUID,
    body: AddStep,
    expected: IfMatch,
    call: Annotated[Call, writing(WRITE)],
) -> StepAdded:
    """Add a step; a closer closes the oldest open step that it is paired with."""
    if body.type in CLOSES and body.due_at is not None:
        raise ValidationError(f"{body.type} closes a step and takes no dueAt")
    new = commands.NewStep(body.type, body.occurred_at, body.due_at, body.payload)
    step = await commands.add_step(call.session, deal_id, new, await by_of(call), expected)
    _tagged(response, await queries.get_deal(call.session, deal_id))
    return StepAdded(id=step.id, status=step.status)


@router.post("/{deal_id}/complete")
async def complete_deal(
    response: Response, deal_id: UUID, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> DealView:
    """Complete a deal: its open steps are closed, the objects of its confirmed bookings are sold."""
    refuse_partners(call)
    await commands.end_deal(call.session, deal_id, DealStatus.COMPLETED, await by_of(call), expected)
    return _tagged(response, await queries.get_deal(call.session, deal_id))


@router.post("/{deal_id}/cancel")
async def cancel_deal(
    response: Response, deal_id: UUID, expected: IfMatch, call: Annotated[Call, writing(WRITE)]
) -> DealView:
    """Cancel a deal: its open steps are closed, all that its bookings may hold is released."""
    refuse_partners(call)
    await commands.end_deal(call.session, deal_id, DealStatus.CANCELLED, await by_of(call), expected)
    return _tagged(response, await queries.get_deal(call.session, deal_id))


def _tagged(response: Response, deal: RowMapping) -> DealView:
    """Return a deal as its page shows it, and its version as the answer's ETag."""
    response.headers["etag"] = entity_tag(deal["version"])
    return DealView.model_validate(deal)
