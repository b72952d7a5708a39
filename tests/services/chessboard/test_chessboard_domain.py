"""A property object's status: the whole table of status, act and source, and what must hold after each change."""

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from uuid import UUID

import pytest
from board_pieces import MINE, NOW, UNTIL, is_sound, state, unit

from chessboard.domain import (
    HELD,
    Act,
    Change,
    Hold,
    HoldMismatch,
    PropertyObject,
    Status,
    StatusSource,
    StatusTransitionRefused,
    ValidationError,
)

OTHER = Hold(UUID(int=3), UUID(int=4))
CRM, ADMIN, IMPORT, JOB = StatusSource
FREE, RESERVED, BOOKED, SOLD, HIDDEN = Status

ALLOWED = {
    (FREE, Act.HOLD): (RESERVED, {CRM}),
    (FREE, Act.BOOK): (BOOKED, {CRM}),
    (FREE, Act.SELL): (SOLD, {CRM, ADMIN}),
    (FREE, Act.HIDE): (HIDDEN, {ADMIN, IMPORT}),
    (RESERVED, Act.HOLD): (RESERVED, {CRM}),
    (RESERVED, Act.BOOK): (BOOKED, {CRM}),
    (RESERVED, Act.RELEASE): (FREE, {CRM, JOB}),
    (BOOKED, Act.BOOK): (BOOKED, {CRM}),
    (BOOKED, Act.SELL): (SOLD, {CRM}),
    (BOOKED, Act.RELEASE): (FREE, {CRM, JOB}),
    (HIDDEN, Act.UNHIDE): (FREE, {ADMIN, IMPORT}),
}
"""The table as it is specified, written down a second time."""

ACTS: dict[Act, Callable[[PropertyObject, Hold | None, StatusSource], Change]] = {
    Act.HOLD: lambda unit, hold, source: unit.reserve(hold or MINE, UNTIL, source, NOW),
    Act.BOOK: lambda unit, hold, source: unit.book(hold or MINE, UNTIL, source, NOW),
    Act.SELL: lambda unit, hold, source: unit.sell(hold, NOW, source, NOW),
    Act.RELEASE: lambda unit, hold, source: unit.release(hold, source, NOW),
    Act.HIDE: lambda unit, _, source: unit.hide(source, NOW),
    Act.UNHIDE: lambda unit, _, source: unit.unhide(source, NOW),
}


@pytest.mark.req("HLD-52", "HLD-62", "HLD-63", "HLD-65")
@pytest.mark.parametrize(("status", "act", "source"), list(product(Status, Act, StatusSource)))
def test_every_act_in_every_status_from_every_source_is_as_the_table_says(
    status: Status, act: Act, source: StatusSource
) -> None:
    of = unit(status)
    before = state(of)
    to, sources = ALLOWED.get((status, act), (None, set()))
    hold = None if source is JOB else MINE
    if source not in sources:
        with pytest.raises(StatusTransitionRefused):
            ACTS[act](of, hold, source)
        assert state(of) == before
        return
    change = ACTS[act](of, hold, source)
    assert of.status is change.to_status is to  # type: ignore[union-attr]
    assert of.status_source is change.source is source
    assert of.version == change.version == 6
    assert of.status_changed_at == of.updated_at == change.changed_at == NOW
    assert is_sound(of)
    assert change.from_status is status  # type: ignore[union-attr]


def test_the_walk_goes_through_the_whole_table():
    assert len(ALLOWED) == 11
    assert len(list(product(Status, Act, StatusSource))) == 120


@pytest.mark.req("HLD-63")
@pytest.mark.parametrize("status", sorted(HELD))
@pytest.mark.parametrize(
    "hold", [OTHER, None, Hold(MINE.deal_id, OTHER.booking_id), Hold(OTHER.deal_id, MINE.booking_id)]
)
def test_a_held_object_obeys_its_own_booking_and_the_job_only(status: Status, hold: Hold | None):
    for act in (Act.HOLD, Act.BOOK, Act.SELL, Act.RELEASE):
        if CRM not in ALLOWED.get((status, act), (None, set()))[1] or (hold is None and act in (Act.HOLD, Act.BOOK)):
            continue
        of = unit(status)
        before = state(of)
        with pytest.raises(HoldMismatch):
            ACTS[act](of, hold, CRM)
        assert state(of) == before
    freed = unit(status)
    assert freed.release(None, JOB, NOW).previous_hold == MINE
    assert freed.status is FREE


def test_a_change_tells_what_was_before_it():
    change = unit(BOOKED).release(MINE, CRM, NOW)
    assert (change.previous_hold, change.previous_until, change.hold) == (MINE, UNTIL, None)


def test_a_change_that_waited_for_the_row_is_not_dated_before_the_last_one():
    of = unit()
    of.updated_at = NOW + timedelta(seconds=3)
    assert of.hide(ADMIN, NOW).changed_at == NOW + timedelta(seconds=3)


@pytest.mark.parametrize("status", sorted(set(Status) - {SOLD}))
def test_a_price_changes_in_every_status_but_sold_and_changes_no_status(status: Status):
    of = unit(status)
    change = of.reprice(7, "EUR", NOW)
    assert (of.price_minor, of.currency, of.version) == (7, "EUR", 6)
    assert (change.previous_price_minor, change.status) == (100, status)
    assert of.status_changed_at == NOW - timedelta(days=1)
    assert is_sound(of)


def test_the_price_of_what_is_sold_stays_and_no_price_is_negative():
    with pytest.raises(StatusTransitionRefused):
        unit(SOLD).reprice(7, "RUB", NOW)
    with pytest.raises(ValidationError):
        unit().reprice(-1, "RUB", NOW)
