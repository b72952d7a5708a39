"""The use cases that change something: one function each, called by HTTP routes, consumers and jobs alike.

A command locks the rows it changes, calls the domain, and writes rows, audit and events in the caller's transaction.
"""

from crm.commands.bookings import (
    NewBooking,
    Price,
    ask_amendment,
    ask_payment,
    ask_registration,
    cancel_booking,
    commit_booking,
    decide_amendment,
    draft_booking,
    quote_booking,
    register_booking,
    reserve_booking,
    resolve_booking,
)
from crm.commands.deals import Cursor, NewStep, add_step, end_deal, mark_overdue_steps, open_deal
from crm.commands.limits import LimitCurrencyFixed, set_partner_limit
from crm.commands.reactions import Freed, invalidate_quotes, react_to_net, sweep_bookings, take_answer
from crm.commands.settling import AUDIT, OUTBOX, By, Change, Why, change_of, settle

__all__ = [
    "AUDIT", "OUTBOX", "By", "Change", "Cursor", "Freed", "LimitCurrencyFixed", "NewBooking", "NewStep", "Price",
    "Why", "add_step", "ask_amendment", "ask_payment", "ask_registration", "cancel_booking", "change_of",
    "commit_booking", "decide_amendment", "draft_booking", "end_deal", "invalidate_quotes", "mark_overdue_steps",
    "open_deal", "quote_booking", "react_to_net", "register_booking", "reserve_booking", "resolve_booking",
    "set_partner_limit", "settle", "sweep_bookings", "take_answer",
]  # fmt: skip
