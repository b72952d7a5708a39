"""How crm's entities are loaded for a change, locked, and claimed and written in sets."""

from crm.repository.booking_claims import ANSWERS_LATE, BOOKED_OVER, QUOTES_OVER, RESERVED_OVER, TimerClaim
from crm.repository.bookings import (
    add_booking,
    add_history,
    assembler,
    charge_limits,
    find_claimants,
    find_quoted,
    get_booking_for_update,
    lock_bookings,
    lock_bookings_of_deal,
    lock_limits,
    save_bookings,
    timer_of,
)
from crm.repository.deals import (
    OVERDUE,
    SINGLE_RUNNER_LOCK,
    count_overdue_backlog,
    find_leftover_steps,
    find_open_step_for_update,
    find_open_steps_for_update,
    get_deal_for_update,
    move_to_overdue,
    to_claimed_step,
    try_single_runner,
)

__all__ = [
    "ANSWERS_LATE", "BOOKED_OVER", "OVERDUE", "QUOTES_OVER", "RESERVED_OVER", "SINGLE_RUNNER_LOCK", "TimerClaim",
    "add_booking", "add_history", "assembler", "charge_limits", "count_overdue_backlog", "find_claimants",
    "find_leftover_steps", "find_open_step_for_update", "find_open_steps_for_update", "find_quoted",
    "get_booking_for_update", "get_deal_for_update", "lock_bookings", "lock_bookings_of_deal", "lock_limits",
    "move_to_overdue", "save_bookings", "timer_of", "to_claimed_step", "try_single_runner",
]  # fmt: skip
