"""HTTP routes of partners' limits under /v1/partner-limits; never for partners themselves to set."""

from typing import Annotated, Final
from uuid import UUID

from chassis.web import Body, Call, Router, writing
from crm import commands
from crm.api.errors import Currency, Money, by_of, refuse_partners

WRITE: Final = "crm:limits:write"


class SetLimit(Body):
    """What a partner's bookings may cost together, in minor units of a currency."""

    partner_id: UUID
    limit_minor: Money
    currency: Currency


class LimitView(Body):
    """A partner's limit and what is used of it."""

    partner_id: UUID
    limit_minor: int
    used_minor: int
    currency: str


router = Router(prefix="/v1/partner-limits", tags=["partner limits"])


@router.post("")
async def set_limit(body: SetLimit, call: Annotated[Call, writing(WRITE)]) -> LimitView:
    """Set a partner's limit; below what is used it stops further commits and undoes none."""
    refuse_partners(call)
    used = await commands.set_partner_limit(
        call.session, body.partner_id, body.limit_minor, body.currency, await by_of(call)
    )
    return LimitView(partner_id=body.partner_id, limit_minor=body.limit_minor, used_minor=used, currency=body.currency)
