"""What every route of crm shares: which error is which answer, and who gives a command."""

from typing import Annotated, Final

from pydantic import AfterValidator, Field

from chassis.identity import Forbidden
from chassis.problems import ErrorAnswer
from chassis.web import Call
from crm import commands
from crm.domain import (
    BookingNotFound,
    BookingNotPriced,
    BookingsNotConfirmed,
    BookingTransitionRefused,
    DealNotActive,
    DealNotFound,
    NoOpenStep,
    ObjectTaken,
    PartnerLimitExceeded,
    QuoteExpired,
    ReservationExpired,
    StepTransitionRefused,
    ValidationError,
)

MOST_MINOR: Final = 10**15
Money = Annotated[int, Field(ge=0, le=MOST_MINOR)]
"""A sum in minor units of its currency."""


def _currency(value: str) -> str:
    if not (value.isascii() and value.isalpha()):
        raise ValueError("a currency is three letters")
    return value.upper()


Currency = Annotated[str, Field(min_length=3, max_length=3), AfterValidator(_currency)]
ERRORS: Final[dict[type[Exception], ErrorAnswer]] = {
    ValidationError: ErrorAnswer(422, "validation_error"),
    DealNotFound: ErrorAnswer(404, "deal_not_found"),
    DealNotActive: ErrorAnswer(409, "deal_not_active"),
    NoOpenStep: ErrorAnswer(409, "no_open_step"),
    StepTransitionRefused: ErrorAnswer(409, "step_transition_refused"),
    BookingNotFound: ErrorAnswer(404, "booking_not_found"),
    BookingTransitionRefused: ErrorAnswer(409, "booking_transition_refused"),
    ObjectTaken: ErrorAnswer(409, "object_taken"),
    QuoteExpired: ErrorAnswer(409, "quote_expired"),
    ReservationExpired: ErrorAnswer(409, "reservation_expired"),
    BookingNotPriced: ErrorAnswer(409, "booking_not_priced"),
    PartnerLimitExceeded: ErrorAnswer(409, "partner_limit_exceeded"),
    BookingsNotConfirmed: ErrorAnswer(409, "bookings_not_confirmed"),
    commands.LimitCurrencyFixed: ErrorAnswer(409, "limit_currency_fixed"),
}


def refuse_partners(call: Call) -> None:
    """Keep an act to the tenant's own people: a partner sees only its own bookings and would decide over others'.

    Raises:
        Forbidden: the caller is a partner.
    """
    if call.principal.partner_id is not None:
        raise Forbidden("not for partners")


async def by_of(call: Call) -> commands.By:
    """Return who gives a command, and when."""
    principal = call.principal
    role = min(principal.roles, default=None)
    return commands.By(
        principal.tenant_id, principal.subject, role, await call.now(), call.correlation_id, principal.partner_id
    )
