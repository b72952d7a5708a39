"""What CRM asks of an object: every branch, and legal histories of CRM that arrive in any order across topics."""

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

import pytest
from board_pieces import NOW, UNTIL, is_sound, state, unit
from hypothesis import given, settings
from hypothesis import strategies as st

from chessboard.domain import (
    Ask,
    Hold,
    Ledger,
    Outcome,
    PropertyObject,
    Reason,
    Request,
    Result,
    Settlement,
    Status,
    StatusSource,
    settle,
)

A, B, C = (Hold(UUID(int=number), UUID(int=100 + number)) for number in (1, 2, 3))
HOLD, BOOK, SELL, RELEASE = Ask
FREE, RESERVED, BOOKED, SOLD, HIDDEN = Status


@dataclass
class Board:
    """One object and its ledger, to which requests come."""

    of: PropertyObject
    ledger: Ledger

    @classmethod
    def fresh(cls, status: Status = FREE) -> "Board":
        of = unit(status)
        of.hold = A if of.hold else None
        return cls(of, Ledger(of.id))

    def ask(self, ask: Ask, hold: Hold, sequence: int) -> Settlement:
        at = None if ask is RELEASE else UNTIL
        request = Request(ask, self.of.id, self.of.tenant_id, hold, sequence, at)
        return settle(request, self.of, self.ledger, NOW)

    def told(self, *asked: tuple[Ask, Hold, int]) -> Settlement:
        """Send requests and return what became of the last."""
        return [self.ask(*one) for one in asked][-1]

    def net_frees(self) -> None:
        self.of.release(None, StatusSource.EXPIRATION_JOB, NOW)

    @property
    def shows(self) -> tuple[Status, Hold | None]:
        return self.of.status, self.of.hold


def answer(settlement: Settlement) -> tuple[Result, Outcome, Reason | None]:
    return settlement.result, settlement.outcome, settlement.reason


def test_a_booking_is_held_booked_and_sold():
    board = Board.fresh()
    assert answer(board.ask(HOLD, A, 1)) == (Result.CHANGED, Outcome.HELD, None)
    assert board.shows == (RESERVED, A)
    assert answer(board.ask(BOOK, A, 2)) == (Result.CHANGED, Outcome.BOOKED, None)
    assert answer(board.ask(SELL, A, 3)) == (Result.CHANGED, Outcome.SOLD, None)
    assert board.shows == (SOLD, None)
    assert board.of.version == 8


@pytest.mark.parametrize("held", [[(HOLD, A, 1)], [(HOLD, A, 1), (BOOK, A, 2)]])
def test_its_own_booking_releases_a_hold(held):
    board = Board.fresh()
    board.told(*held)
    assert answer(board.ask(RELEASE, A, 3)) == (Result.CHANGED, Outcome.RELEASED, None)
    assert board.shows == (FREE, None)
    assert board.ledger.entries[A.booking_id].released


def test_a_booking_may_ask_for_another_time():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    board.of.reserved_until = NOW
    settlement = board.ask(HOLD, A, 2)
    assert (settlement.outcome, board.of.reserved_until, board.of.version) == (Outcome.HELD, UNTIL, 7)
    board.told((BOOK, A, 3))
    board.of.booked_until = NOW
    assert board.ask(BOOK, A, 4).outcome is Outcome.BOOKED
    assert board.of.booked_until == UNTIL


@pytest.mark.parametrize(
    ("before", "again", "outcome", "reason"),
    [
        ([(HOLD, A, 1)], (HOLD, A, 1), Outcome.HELD, None),
        ([(HOLD, A, 1), (BOOK, A, 2)], (HOLD, A, 1), Outcome.BOOKED, None),
        ([(HOLD, A, 1), (BOOK, A, 2)], (BOOK, A, 2), Outcome.BOOKED, None),
        ([(HOLD, A, 1), (BOOK, A, 2), (SELL, A, 3)], (SELL, A, 3), Outcome.SOLD, None),
        ([(HOLD, A, 1), (RELEASE, A, 2)], (RELEASE, A, 2), Outcome.RELEASED, None),
        ([(HOLD, A, 1), (RELEASE, A, 2)], (HOLD, A, 1), Outcome.REJECTED, Reason.ALREADY_RELEASED),
        ([(RELEASE, A, 2)], (HOLD, A, 1), Outcome.REJECTED, Reason.ALREADY_RELEASED),
        ([(HOLD, A, 1), (HOLD, B, 3)], (HOLD, A, 1), Outcome.REJECTED, Reason.HELD_BY_ANOTHER),
        ([(HOLD, A, 2)], (RELEASE, A, 1), Outcome.HELD, None),
    ],
)
def test_what_is_not_newer_changes_nothing_and_is_answered_with_what_is_there_now(before, again, outcome, reason):
    board = Board.fresh()
    board.told(*before)
    seen, entries = state(board.of), repr(board.ledger.entries)
    assert answer(board.ask(*again)) == (Result.REPEATED, outcome, reason)
    assert (state(board.of), repr(board.ledger.entries)) == (seen, entries)


def test_a_commit_that_the_net_has_overtaken_is_shown_as_not_held_when_it_is_repeated():
    board = Board.fresh()
    board.told((HOLD, A, 1), (BOOK, A, 2))
    board.net_frees()
    assert answer(board.ask(BOOK, A, 2)) == (Result.REPEATED, Outcome.REJECTED, Reason.NOT_HELD)
    assert board.shows == (FREE, None)


def test_a_release_before_its_hold_leaves_a_tombstone():
    board = Board.fresh()
    assert answer(board.ask(RELEASE, A, 2)) == (Result.NOTHING_TO_DO, Outcome.RELEASED, None)
    assert board.ask(HOLD, A, 1).outcome is Outcome.REJECTED
    assert board.shows == (FREE, None)
    assert board.ask(HOLD, A, 3).outcome is Outcome.HELD, "asked anew after its release"


def test_a_hold_with_a_higher_number_takes_over_from_the_holder():
    board = Board.fresh()
    board.told((HOLD, A, 1), (BOOK, A, 2))
    settlement = board.ask(HOLD, B, 4)
    assert [change.to_status for change in settlement.changes] == [FREE, RESERVED]
    assert [change.version for change in settlement.changes] == [8, 9]
    assert board.shows == (RESERVED, B)
    assert board.ledger.entries[A.booking_id].released
    assert answer(board.ask(RELEASE, A, 3)) == (Result.NOTHING_TO_DO, Outcome.RELEASED, None)
    assert board.shows == (RESERVED, B)


def test_a_hold_with_a_lower_number_than_another_bookings_is_too_late():
    board = Board.fresh()
    board.told((HOLD, B, 3))
    assert answer(board.ask(HOLD, A, 1)) == (Result.REJECTED, Outcome.REJECTED, Reason.HELD_BY_ANOTHER)
    board.told((RELEASE, B, 4))
    assert board.ask(HOLD, C, 2).reason is Reason.SUPERSEDED
    assert board.shows == (FREE, None)


@pytest.mark.req("HLD-86")
def test_a_release_by_a_booking_that_is_not_known_is_a_mismatch():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    assert answer(board.ask(RELEASE, B, 5)) == (Result.MISMATCH, Outcome.REJECTED, Reason.HOLD_MISMATCH)
    assert board.shows == (RESERVED, A)
    assert board.ask(HOLD, B, 4).outcome is Outcome.REJECTED, "its hold, if there ever was one, comes too late"


@pytest.mark.req("HLD-86")
def test_a_release_that_names_another_deal_is_a_mismatch_and_leaves_the_holders_entry():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    assert board.ask(RELEASE, Hold(B.deal_id, A.booking_id), 2).result is Result.MISMATCH
    assert board.shows == (RESERVED, A)
    assert board.ask(RELEASE, A, 2).outcome is Outcome.RELEASED


@pytest.mark.req("HLD-85", "HLD-96")
@pytest.mark.parametrize("held", [[(HOLD, A, 1)], [(HOLD, A, 1), (BOOK, A, 2)]])
def test_a_late_release_after_the_net_is_nothing_to_do_and_no_mismatch(held):
    board = Board.fresh()
    board.told(*held)
    board.net_frees()
    assert answer(board.ask(RELEASE, A, 3)) == (Result.NOTHING_TO_DO, Outcome.RELEASED, None)
    assert board.shows == (FREE, None)


@pytest.mark.req("HLD-85")
def test_a_late_release_after_the_net_and_the_next_holder_is_no_mismatch_either():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    board.net_frees()
    board.told((HOLD, B, 3))
    assert answer(board.ask(RELEASE, A, 2)) == (Result.NOTHING_TO_DO, Outcome.RELEASED, None)
    assert board.shows == (RESERVED, B)


def test_a_late_release_of_what_was_hidden_meanwhile_is_nothing_to_do():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    board.net_frees()
    board.of.hide(StatusSource.ADMIN, NOW)
    assert answer(board.ask(RELEASE, A, 2)) == (Result.NOTHING_TO_DO, Outcome.RELEASED, None)


def test_a_commit_of_what_the_net_has_freed_is_accepted_unless_crm_has_released_it():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    board.net_frees()
    assert board.ask(BOOK, A, 2).outcome is Outcome.BOOKED
    board.told((RELEASE, A, 3))
    assert board.ask(BOOK, A, 4).reason is Reason.ALREADY_RELEASED


def test_a_commit_of_what_another_booking_holds_is_rejected():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    assert answer(board.ask(BOOK, B, 2)) == (Result.REJECTED, Outcome.REJECTED, Reason.HELD_BY_ANOTHER)
    board.net_frees()
    assert board.ask(BOOK, B, 2).reason is Reason.ALREADY_RELEASED, "the same request, later: the same answer"
    assert board.shows == (FREE, None)


@pytest.mark.parametrize("ask", [BOOK, SELL])
def test_a_commit_from_before_the_object_was_given_to_another_booking_is_too_late(ask):
    board = Board.fresh()
    board.told((HOLD, B, 3), (RELEASE, B, 4))
    assert answer(board.ask(ask, A, 2)) == (Result.REJECTED, Outcome.REJECTED, Reason.SUPERSEDED)
    assert board.shows == (FREE, None)


@pytest.mark.parametrize(("status", "reason"), [(SOLD, Reason.SOLD), (HIDDEN, Reason.HIDDEN)])
@pytest.mark.parametrize("ask", [HOLD, BOOK, SELL])
def test_what_is_sold_or_hidden_is_given_to_nobody(ask, status, reason):
    board = Board.fresh(status)
    board.of.status_source = StatusSource.ADMIN
    assert answer(board.ask(ask, A, 1)) == (Result.REJECTED, Outcome.REJECTED, reason)
    assert answer(board.ask(ask, A, 1)) == (Result.REPEATED, Outcome.REJECTED, reason)
    assert board.of.version == 5


def test_a_request_that_was_rejected_while_hidden_stays_so_when_it_is_repeated():
    board = Board.fresh(HIDDEN)
    board.told((HOLD, A, 1))
    board.of.unhide(StatusSource.ADMIN, NOW)
    assert board.ask(HOLD, A, 1).outcome is Outcome.REJECTED
    assert board.shows == (FREE, None)


def test_what_is_sold_to_a_booking_is_not_released_and_a_second_sale_says_so():
    board = Board.fresh()
    board.told((HOLD, A, 1), (BOOK, A, 2), (SELL, A, 3))
    assert answer(board.ask(SELL, A, 4)) == (Result.NOTHING_TO_DO, Outcome.SOLD, None)
    assert answer(board.ask(RELEASE, A, 5)) == (Result.REJECTED, Outcome.REJECTED, Reason.SOLD)
    assert answer(board.ask(RELEASE, B, 6)) == (Result.NOTHING_TO_DO, Outcome.RELEASED, None)
    assert board.ask(HOLD, B, 7).reason is Reason.SOLD


def test_a_sale_that_overtook_its_commit_books_and_sells():
    board = Board.fresh()
    board.told((HOLD, A, 1))
    settlement = board.ask(SELL, A, 3)
    assert [change.to_status for change in settlement.changes] == [BOOKED, SOLD]
    assert answer(board.ask(BOOK, A, 2)) == (Result.REPEATED, Outcome.SOLD, None)


def test_a_sale_of_what_the_net_has_freed_is_a_sale():
    board = Board.fresh()
    board.told((HOLD, A, 1), (BOOK, A, 2))
    board.net_frees()
    assert board.ask(SELL, A, 3).outcome is Outcome.SOLD


def test_a_hold_of_what_is_booked_for_the_same_booking_is_rejected():
    board = Board.fresh()
    board.told((HOLD, A, 1), (BOOK, A, 2))
    assert answer(board.ask(HOLD, A, 3)) == (Result.REJECTED, Outcome.REJECTED, Reason.ALREADY_BOOKED)
    assert board.ask(RELEASE, A, 4).outcome is Outcome.RELEASED


def test_an_object_that_is_not_there_or_anothers_is_rejected():
    board = Board.fresh()
    request = Request(HOLD, board.of.id, UUID(int=9), A, 1, UNTIL)
    for found in (None, board.of):
        assert answer(settle(request, found, board.ledger, NOW)) == (
            Result.REJECTED, Outcome.REJECTED, Reason.UNKNOWN_OBJECT,
        )  # fmt: skip
    assert board.ledger.entries == {}


TOPIC_OF = {HOLD: "hold", BOOK: "commit", SELL: "completed"}
RELEASES = ("expired", "cancelled", "deal-cancelled")


@dataclass(frozen=True)
class Sent:
    """A request of a history, the topic that brings it, and what it waited for."""

    ask: Ask
    hold: Hold
    sequence: int
    topic: str
    after: int


@st.composite
def histories(draw: st.DrawFn) -> list[Sent]:
    """What CRM may ask about one object: bookings one after the other.

    A commit waits for the answer to its hold, and a sale for that to its commit; a release, and the next booking, wait
    for nothing.
    """
    sent: list[Sent] = []
    for number in range(draw(st.integers(1, 4))):
        hold = Hold(UUID(int=number + 1), UUID(int=100 + number))
        steps = [HOLD, *[BOOK] * draw(st.integers(0, 2))]
        steps.append(SELL if len(steps) > 1 and draw(st.booleans()) else RELEASE)
        waits = 0
        for ask in steps:
            topic = draw(st.sampled_from(RELEASES)) if ask is RELEASE else TOPIC_OF[ask]
            sent.append(Sent(ask, hold, len(sent) + 1, topic, waits if ask in (BOOK, SELL) else 0))
            waits = len(sent)
        if steps[-1] is SELL:
            break
    return sent[:-1] if draw(st.booleans()) else sent


def arrivals(draw: st.DrawFn, history: list[Sent]) -> list[Sent]:
    """Draw an order that keeps each topic's, and in which nothing comes before what CRM waited for."""
    waiting, arrived = list(history), list[Sent]()
    while waiting:
        have = {one.sequence for one in arrived}
        first = {one.topic: one for one in reversed(waiting)}
        ready = [one for one in first.values() if one.after in have | {0}]
        chosen = draw(st.sampled_from(sorted(ready, key=lambda one: one.sequence)))
        waiting.remove(chosen)
        arrived.append(chosen)
        if draw(st.integers(0, 4)) == 0:
            arrived.append(draw(st.sampled_from(arrived)))
    return arrived


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_a_legal_history_in_any_order_across_topics_ends_as_crm_means_it(data: st.DataObject):
    history = data.draw(histories())
    order = data.draw(st.composite(arrivals)(history))
    board = Board.fresh()
    versions = [board.of.version]
    for one in order:
        settlement = board.ask(one.ask, one.hold, one.sequence)
        assert settlement.outcome in Outcome
        versions += [change.version for change in settlement.changes]
        assert board.of.version == versions[-1]
        assert is_sound(board.of)
        assert settlement.result is not Result.MISMATCH or _is_unknown_release(one, order)
    assert versions == list(range(5, 5 + len(versions))), "one event per change"
    last = history[-1]
    assert (
        board.shows
        == {
            HOLD: (RESERVED, last.hold),
            BOOK: (BOOKED, last.hold),
            SELL: (SOLD, None),
            RELEASE: (FREE, None),
        }[last.ask]
    )
    repeated = Board(board.of, board.ledger)
    before = state(board.of)
    for one in order:
        assert repeated.ask(one.ask, one.hold, one.sequence).result is Result.REPEATED
    assert state(board.of) == before


def _is_unknown_release(one: Sent, order: list[Sent]) -> bool:
    """Whether a release came before the hold of its booking, while another booking held the object."""
    hold = next(other for other in order if other.hold == one.hold and other.ask is HOLD)
    return one.ask is RELEASE and order.index(one) < order.index(hold)


def test_time_goes_on_only_forward():
    board = Board.fresh()
    board.of.updated_at = NOW + timedelta(seconds=9)
    assert board.ask(HOLD, A, 1).changes[0].changed_at == NOW + timedelta(seconds=9)
