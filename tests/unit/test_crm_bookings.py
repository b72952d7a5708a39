"""The domain of bookings: the whole state machine, timers, claims, answers, the safety net's releases."""

from datetime import UTC, datetime, timedelta
from itertools import product
from uuid import UUID, uuid4

import pytest

from crm.domain import (
    ANSWER_TIMEOUT,
    BOOKED,
    BOOKING_TRANSITIONS,
    LIVE,
    OPERATION_TIMEOUT,
    RESERVED,
    TERMINAL,
    WAITING,
    Answer,
    Asked,
    Booking,
    BookingAct,
    BookingMoved,
    BookingNotDue,
    BookingNotPriced,
    BookingObject,
    BookingState,
    BookingTransitionRefused,
    ObjectAsked,
    ObjectClaim,
    ObjectTaken,
    Outcome,
    PartnerLimit,
    PartnerLimitExceeded,
    PersonAsked,
    QuoteExpired,
    QuoteInvalidated,
    Reason,
    ReservationExpired,
    ValidationError,
    next_booking_state,
    require_objects,
)

NOW = datetime(2026, 12, 1, 9, 0, tzinfo=UTC)
INSTANT = timedelta(microseconds=1)
SOON = NOW + timedelta(days=1)
LATER = NOW + timedelta(days=14)
S, A = BookingState, BookingAct

TABLE = """
draft                quote=quoted ask-hold=pending_supplier cancel=cancelled end-with-deal=cancelled
quoted               invalidate-quote=draft ask-hold=pending_supplier cancel=cancelled end-with-deal=cancelled
pending_supplier     all-held=held hold-rejected=failed probe=pending_supplier time-out=unknown
                     end-with-deal=cancellation_pending net-freed-due=pending_supplier
                     net-freed-early=pending_supplier
held                 ask-payment=pending_payment commit=committing expire=cancelled cancel=cancellation_pending
                     end-with-deal=cancellation_pending net-freed-due=cancelled net-freed-early=unknown
pending_payment      commit=committing expire=cancelled cancel=cancellation_pending
                     end-with-deal=cancellation_pending net-freed-due=cancelled net-freed-early=unknown
committing           all-booked=confirmed some-booked=partially_confirmed none-booked=failed probe=committing
                     time-out=unknown end-with-deal=cancellation_pending net-freed-due=committing
                     net-freed-early=committing
partially_confirmed  all-booked=confirmed compensate=failed time-out=failed cancel=cancelled
                     probe=partially_confirmed end-with-deal=cancellation_pending
                     net-freed-due=partially_confirmed net-freed-early=partially_confirmed
confirmed            ask-amendment=amendment_pending ask-registration=confirmed register=ticketed expire=cancelled
                     cancel=cancellation_pending end-with-deal=cancellation_pending net-freed-due=cancelled
                     net-freed-early=unknown
amendment_pending    apply-amendment=confirmed refuse-amendment=confirmed ask-registration=amendment_pending
                     register=ticketed expire=cancelled cancel=cancellation_pending
                     end-with-deal=cancellation_pending net-freed-due=cancelled net-freed-early=unknown
cancellation_pending all-free=cancelled probe=cancellation_pending time-out=unknown
                     net-freed-due=cancellation_pending net-freed-early=cancellation_pending
unknown              all-held=held hold-rejected=failed all-booked=confirmed some-booked=partially_confirmed
                     none-booked=failed all-free=cancelled probe=unknown resolve-held=held
                     resolve-confirmed=confirmed resolve-cancelled=cancelled resolve-failed=failed
                     end-with-deal=cancellation_pending
ticketed
cancelled
failed
"""
"""State, and act=new state for every act that it allows; written out once more, by hand."""


def the_table() -> dict[tuple[BookingState, BookingAct], BookingState]:
    found, state = {}, None
    for word in TABLE.split():
        if "=" not in word:
            state = S(word)
            continue
        act, to = word.split("=")
        found[state, A(act)] = S(to)
    return found


def a_booking(objects: int = 1, partner: UUID | None = None) -> Booking:
    made = [BookingObject(uuid4(), ObjectClaim(uuid4())) for _ in range(objects)]
    for one in made:
        one.claim.property_object_id = one.property_object_id
    return Booking(uuid4(), uuid4(), uuid4(), partner, NOW, NOW, made)


def answered(booking: Booking, outcome: Outcome, *numbers: int, at: datetime = NOW, version: int = 5) -> bool:
    """Answer the newest request of the given objects (all if none is named); return whether all said something new."""
    chosen = [booking.objects[number] for number in numbers] or booking.objects
    news = [
        booking.take_answer(Answer(booking.id, one.property_object_id, one.sequence or 0, outcome, version), at)
        for one in chosen
    ]
    return all(news)


def held(objects: int = 1, partner: UUID | None = None) -> Booking:
    booking = a_booking(objects, partner)
    booking.quote(1000, "EUR", SOON, NOW)
    booking.ask_hold(SOON, NOW)
    answered(booking, Outcome.HELD)
    return booking


def committing(objects: int = 1) -> Booking:
    booking = held(objects)
    booking.book(LATER, NOW)
    return booking


def confirmed(objects: int = 1) -> Booking:
    booking = committing(objects)
    answered(booking, Outcome.BOOKED)
    return booking


def in_state(state: BookingState, objects: int = 2) -> Booking:
    """Return a booking that has come to a state by its acts."""
    booking = {
        S.DRAFT: a_booking,
        S.QUOTED: a_booking,
        S.PENDING_SUPPLIER: a_booking,
        S.HELD: held,
        S.PENDING_PAYMENT: held,
        S.COMMITTING: committing,
        S.PARTIALLY_CONFIRMED: committing,
        S.CONFIRMED: confirmed,
        S.AMENDMENT_PENDING: confirmed,
        S.TICKETED: confirmed,
        S.CANCELLATION_PENDING: held,
        S.CANCELLED: held,
        S.FAILED: a_booking,
        S.UNKNOWN: a_booking,
    }[state](objects)
    match state:
        case S.QUOTED:
            booking.quote(1000, "EUR", SOON, NOW)
        case S.PENDING_SUPPLIER | S.FAILED | S.UNKNOWN:
            booking.ask_hold(SOON, NOW)
            if state is S.FAILED:
                answered(booking, Outcome.REJECTED, 0)
            if state is S.UNKNOWN:
                time_out(booking)
        case S.PENDING_PAYMENT:
            booking.ask_payment(NOW)
        case S.PARTIALLY_CONFIRMED:
            answered(booking, Outcome.BOOKED, 0)
            answered(booking, Outcome.REJECTED, 1)
        case S.AMENDMENT_PENDING:
            booking.ask_amendment(1200, NOW)
        case S.TICKETED:
            booking.register(NOW)
        case S.CANCELLATION_PENDING:
            booking.cancel(Reason.CANCELLED, NOW)
        case S.CANCELLED:
            booking.expire(SOON + INSTANT)
    assert booking.state is state
    return booking


def time_out(booking: Booking) -> datetime:
    """Let the answer's time pass twice."""
    at = NOW
    for _ in range(2):
        assert booking.answer_due_at is not None
        at = booking.answer_due_at + INSTANT
        booking.miss_answer(at)
    return at


def asked(booking: Booking, kind: Asked | None = None) -> list[ObjectAsked]:
    return [e for e in booking.events if isinstance(e, ObjectAsked) and kind in (None, e.asked)]


def moves(booking: Booking) -> list[str]:
    return [event.to_state.value for event in booking.events if isinstance(event, BookingMoved)]


@pytest.mark.req("EVT-141")
def test_there_are_fourteen_states_and_the_whole_table_is_as_decided() -> None:
    assert len(BookingState) == 14
    wanted = the_table()
    assert dict(BOOKING_TRANSITIONS) == wanted
    assert {state for state, _ in wanted} | TERMINAL == set(BookingState)
    assert {act for _, act in wanted} == set(BookingAct)
    for state, act in product(BookingState, BookingAct):
        if (state, act) in wanted:
            assert next_booking_state(state, act) is wanted[state, act]
        else:
            with pytest.raises(BookingTransitionRefused):
                next_booking_state(state, act)


def test_the_states_are_divided_into_before_live_and_terminal() -> None:
    assert {S.DRAFT, S.QUOTED} | LIVE | TERMINAL == set(S)
    assert len(LIVE) == 9
    assert RESERVED | BOOKED | WAITING < LIVE


DO = {
    A.QUOTE: lambda b: b.quote(1000, "EUR", SOON, NOW),
    A.INVALIDATE_QUOTE: lambda b: b.invalidate_quote(Reason.PRICE_CHANGED, NOW),
    A.ASK_HOLD: lambda b: b.ask_hold(SOON, NOW),
    A.ASK_PAYMENT: lambda b: b.ask_payment(NOW),
    A.COMMIT: lambda b: b.book(LATER, NOW),
    A.ASK_AMENDMENT: lambda b: b.ask_amendment(None, NOW),
    A.APPLY_AMENDMENT: lambda b: b.decide_amendment(NOW, is_applied=True),
    A.REFUSE_AMENDMENT: lambda b: b.decide_amendment(NOW, is_applied=False),
    A.ASK_REGISTRATION: lambda b: b.ask_registration(NOW),
    A.REGISTER: lambda b: b.register(NOW),
    A.CANCEL: lambda b: b.cancel(Reason.CANCELLED, NOW),
    A.END_WITH_DEAL: lambda b: b.cancel(Reason.DEAL_CANCELLED, NOW),
    A.EXPIRE: lambda b: b.expire(LATER + INSTANT),
    A.PROBE: lambda b: b.probe(NOW),
}
"""The acts that a caller chooses; the others follow from answers and time."""


@pytest.mark.req("EVT-142")
@pytest.mark.parametrize("state", S)
@pytest.mark.parametrize("act", DO)
def test_every_method_does_what_the_table_says_in_every_state_with_one_event_per_transition(state, act) -> None:
    booking = in_state(state)
    booking.events.clear()
    version = booking.version
    wanted = the_table().get((state, act))
    if wanted is None:
        before = [getattr(booking, name) for name in Booking.__slots__ if name != "objects"]
        with pytest.raises(BookingTransitionRefused):
            DO[act](booking)
        assert [getattr(booking, name) for name in Booking.__slots__ if name != "objects"] == before
        return
    DO[act](booking)
    assert booking.state is wanted
    moved = [event for event in booking.events if isinstance(event, BookingMoved)]
    assert [(event.from_state, event.to_state) for event in moved] == ([] if wanted is state else [(state, wanted)])
    assert booking.version == version + (act is not A.PROBE)
    assert [event.version for event in moved] == [booking.version][: len(moved)]
    timers(booking)


def timers(booking: Booking) -> None:
    """Every timer is set exactly in the states that have it."""
    state = booking.state
    assert (booking.quote_expires_at is not None) == (state is S.QUOTED)
    assert (booking.answer_due_at is not None) == (state in WAITING | {S.UNKNOWN})
    assert (booking.came_from is not None) == (state is S.UNKNOWN)
    if state is not S.UNKNOWN:
        reserved = RESERVED | BOOKED | {S.PENDING_SUPPLIER, S.COMMITTING, S.PARTIALLY_CONFIRMED}
        assert (booking.reserved_until is not None) == (state in reserved)
        assert (booking.booked_until is not None) == (state in BOOKED | {S.COMMITTING, S.PARTIALLY_CONFIRMED})


@pytest.mark.parametrize("state", S)
def test_every_state_has_its_timers_and_only_live_ones_keep_their_claims(state) -> None:
    booking = in_state(state)
    timers(booking)
    for one in booking.objects:
        assert one.claim.booking_id == (booking.id if state in LIVE else None)


def test_an_object_that_another_live_booking_has_is_refused_until_that_one_ends() -> None:
    first, second = a_booking(), a_booking()
    second.objects = [BookingObject(first.objects[0].property_object_id, first.objects[0].claim)]
    first.ask_hold(SOON, NOW)
    with pytest.raises(ObjectTaken):
        second.ask_hold(SOON, NOW)
    answered(first, Outcome.REJECTED)
    third = a_booking()
    third.objects = [BookingObject(first.objects[0].property_object_id, first.objects[0].claim)]
    third.ask_hold(SOON, NOW)
    assert third.objects[0].sequence == 2


def test_sequences_of_an_object_grow_with_each_request_and_a_probe_keeps_them() -> None:
    booking = a_booking(2)
    booking.ask_hold(SOON, NOW)
    booking.probe(NOW)
    answered(booking, Outcome.HELD)
    booking.book(LATER, NOW)
    answered(booking, Outcome.BOOKED)
    booking.cancel(Reason.CANCELLED, NOW)
    of_first = [e for e in asked(booking) if e.property_object_id == booking.objects[0].property_object_id]
    assert [(e.asked, e.sequence) for e in of_first] == [
        (Asked.HOLD, 1), (Asked.HOLD, 1), (Asked.COMMIT, 2), (Asked.RELEASE, 3),
    ]  # fmt: skip


def test_answers_that_are_old_repeated_or_of_another_object_say_nothing() -> None:
    booking = held()
    one = booking.objects[0]
    booking.book(LATER, NOW)
    booking.events.clear()
    assert not booking.take_answer(Answer(booking.id, one.property_object_id, 1, Outcome.REJECTED, 6), NOW)
    assert not booking.take_answer(Answer(booking.id, uuid4(), 2, Outcome.BOOKED, 6), NOW)
    assert not booking.take_answer(Answer(booking.id, one.property_object_id, 2, Outcome.HELD, 6), NOW)
    assert booking.events == []
    assert answered(booking, Outcome.BOOKED)
    assert not answered(booking, Outcome.BOOKED)
    assert booking.state is S.CONFIRMED


def test_one_rejected_object_fails_the_booking_and_releases_the_others_held_or_not_yet_answered() -> None:
    booking = a_booking(3)
    booking.ask_hold(SOON, NOW)
    answered(booking, Outcome.HELD, 0)
    answered(booking, Outcome.REJECTED, 1)
    assert booking.state is S.FAILED
    released = {event.property_object_id for event in asked(booking, Asked.RELEASE)}
    assert released == {booking.objects[0].property_object_id, booking.objects[2].property_object_id}
    assert not answered(booking, Outcome.HELD, 2)
    assert booking.state is S.FAILED


def test_a_commit_with_some_booked_is_partial_then_confirmed_or_undone() -> None:
    booking = committing(2)
    answered(booking, Outcome.BOOKED, 0)
    assert booking.state is S.COMMITTING
    answered(booking, Outcome.REJECTED, 1)
    assert booking.state is S.PARTIALLY_CONFIRMED
    booking.miss_answer(NOW + OPERATION_TIMEOUT / 2 + INSTANT)
    assert [e.sequence for e in asked(booking, Asked.COMMIT)] == [2, 2, 2]
    answered(booking, Outcome.BOOKED, 1)
    assert booking.state is S.CONFIRMED

    refused = in_state(S.PARTIALLY_CONFIRMED)
    refused.miss_answer(NOW + OPERATION_TIMEOUT / 2 + INSTANT)
    answered(refused, Outcome.REJECTED, 1)
    assert refused.state is S.FAILED
    assert [e.property_object_id for e in asked(refused, Asked.RELEASE)] == [refused.objects[0].property_object_id]

    silent = in_state(S.PARTIALLY_CONFIRMED)
    time_out(silent)
    assert (silent.state, silent.reason) == (S.FAILED, Reason.NOT_COMPLETED)
    assert len(asked(silent, Asked.RELEASE)) == 2

    nothing = committing(2)
    answered(nothing, Outcome.REJECTED)
    assert nothing.state is S.FAILED
    assert asked(nothing, Asked.RELEASE) == []


@pytest.mark.req("EVT-008")
@pytest.mark.parametrize("state", [S.PENDING_SUPPLIER, S.COMMITTING, S.CANCELLATION_PENDING])
def test_a_late_answer_is_asked_for_again_once_and_then_a_person_is_called(state) -> None:
    booking = in_state(state)
    booking.events.clear()
    with pytest.raises(BookingNotDue):
        booking.miss_answer(NOW + ANSWER_TIMEOUT)
    booking.miss_answer(NOW + ANSWER_TIMEOUT + INSTANT)
    assert [type(event) for event in booking.events] == [ObjectAsked, ObjectAsked]
    assert booking.state is state
    booking.miss_answer(NOW + 2 * ANSWER_TIMEOUT + 2 * INSTANT)
    assert (booking.state, booking.came_from) == (S.UNKNOWN, state)
    (call,) = [event for event in booking.events if isinstance(event, PersonAsked)]
    assert (call.is_needed, call.reason) == (True, Reason.ANSWER_TIMEOUT)


@pytest.mark.req("EVT-008")
@pytest.mark.parametrize(
    ("state", "outcome", "to"),
    [
        (S.PENDING_SUPPLIER, Outcome.HELD, S.HELD),
        (S.PENDING_SUPPLIER, Outcome.REJECTED, S.FAILED),
        (S.COMMITTING, Outcome.BOOKED, S.CONFIRMED),
        (S.COMMITTING, Outcome.REJECTED, S.FAILED),
        (S.CANCELLATION_PENDING, Outcome.RELEASED, S.CANCELLED),
        (S.CANCELLATION_PENDING, Outcome.REJECTED, S.CANCELLED),
    ],
)
def test_a_late_answer_ends_that_a_booking_is_unknown(state, outcome, to) -> None:
    booking = in_state(state, objects=1 if outcome is Outcome.REJECTED else 2)
    time_out(booking)
    assert answered(booking, outcome)
    assert booking.state is to
    calls = [event for event in booking.events if isinstance(event, PersonAsked)]
    assert [call.is_needed for call in calls] == [True, False]


def test_an_answer_after_the_end_brings_nothing_back() -> None:
    booking = a_booking()
    booking.ask_hold(SOON, NOW)
    first = booking.objects[0].sequence or 0
    booking.cancel(Reason.DEAL_CANCELLED, NOW)
    answered(booking, Outcome.RELEASED)
    assert booking.state is S.CANCELLED
    one = booking.objects[0].property_object_id
    assert not booking.take_answer(Answer(booking.id, one, first, Outcome.HELD, 9), NOW)
    assert booking.state is S.CANCELLED


@pytest.mark.req("HLD-08")
@pytest.mark.parametrize("state", sorted(RESERVED | BOOKED))
def test_expiry_comes_strictly_after_the_timer_and_releases_every_object(state) -> None:
    booking = in_state(state)
    timer = SOON if state in RESERVED else LATER
    with pytest.raises(BookingNotDue):
        booking.expire(timer)
    booking.expire(timer + INSTANT)
    assert (booking.state, booking.reason) == (S.CANCELLED, Reason.EXPIRED)
    assert [event.reason for event in asked(booking, Asked.RELEASE)] == [Reason.EXPIRED] * 2


@pytest.mark.parametrize("state", sorted(RESERVED | BOOKED))
def test_what_the_net_frees_in_time_cancels_and_what_it_frees_early_calls_a_person(state) -> None:
    timer = SOON if state in RESERVED else LATER
    due = in_state(state)
    assert due.learn_freed(due.objects[0].property_object_id, 6, timer)
    assert (due.state, due.reason) == (S.CANCELLED, Reason.EXPIRED)
    assert [e.property_object_id for e in asked(due, Asked.RELEASE)] == [due.objects[1].property_object_id]

    early = in_state(state)
    assert early.learn_freed(early.objects[0].property_object_id, 6, timer - INSTANT)
    assert (early.state, early.came_from, early.reason) == (S.UNKNOWN, state, Reason.FREED_EARLY)
    assert any(isinstance(event, PersonAsked) and event.is_needed for event in early.events)
    answered(early, Outcome.RELEASED, 0, version=7)
    assert early.state is S.UNKNOWN, "a person decides"
    early.resolve(S.FAILED, NOW)
    assert early.state is S.FAILED
    assert [e.property_object_id for e in asked(early, Asked.RELEASE)] == [early.objects[1].property_object_id]


@pytest.mark.parametrize("state", sorted(WAITING))
def test_what_the_net_frees_while_an_answer_is_outstanding_changes_nothing_and_asks_at_once(state) -> None:
    booking = in_state(state)
    booking.events.clear()
    version = booking.version
    assert booking.learn_freed(booking.objects[0].property_object_id, 6, LATER)
    assert (booking.state, booking.version) == (state, version)
    assert booking.events
    assert all(isinstance(event, ObjectAsked) for event in booking.events)


@pytest.mark.parametrize("state", sorted(TERMINAL | {S.UNKNOWN, S.DRAFT, S.QUOTED}))
def test_what_the_net_frees_is_only_counted_where_nothing_is_held_or_a_person_is_at_work(state) -> None:
    booking = in_state(state)
    booking.events.clear()
    assert not booking.learn_freed(booking.objects[0].property_object_id, 99, LATER)
    assert booking.events == []
    assert booking.state is state


def test_news_of_the_net_that_is_older_than_the_last_answer_is_stale() -> None:
    booking = held()
    assert not booking.learn_freed(booking.objects[0].property_object_id, 5, NOW)
    assert booking.state is S.HELD


@pytest.mark.req("EVT-016")
def test_a_quote_lives_until_its_end_and_is_taken_back_with_an_event() -> None:
    booking = a_booking()
    with pytest.raises(ValidationError):
        booking.quote(1000, "EUR", NOW, NOW)
    booking.quote(1000, "EUR", SOON, NOW)
    with pytest.raises(QuoteExpired):
        booking.ask_hold(LATER, SOON)
    with pytest.raises(BookingNotDue):
        booking.expire_quote(SOON)
    booking.expire_quote(SOON + INSTANT)
    assert (booking.state, booking.price_minor) == (S.DRAFT, None)
    assert moves(booking) == ["quoted", "draft"]
    (gone,) = [event for event in booking.events if isinstance(event, QuoteInvalidated)]
    assert (gone.reason, gone.version) == (Reason.QUOTE_EXPIRED, booking.version)


def test_a_commit_after_the_reservations_time_is_refused_though_no_job_has_run() -> None:
    booking = held()
    with pytest.raises(ReservationExpired):
        booking.book(LATER, SOON)
    booking.book(LATER, SOON - INSTANT)


@pytest.mark.req("EVT-019")
def test_a_partners_booking_is_charged_from_the_commit_until_it_is_undone() -> None:
    booking = held(partner=uuid4())
    booking.book(LATER, NOW)
    assert booking.charged_minor == 1000
    answered(booking, Outcome.BOOKED)
    booking.ask_amendment(1500, NOW)
    booking.decide_amendment(NOW, is_applied=True)
    assert (booking.price_minor, booking.charged_minor) == (1500, 1500)
    booking.cancel(Reason.CANCELLED, NOW)
    assert booking.charged_minor == 1500
    answered(booking, Outcome.RELEASED)
    assert (booking.state, booking.charged_minor) == (S.CANCELLED, 0)
    unpriced = a_booking(partner=uuid4())
    unpriced.ask_hold(SOON, NOW)
    answered(unpriced, Outcome.HELD)
    with pytest.raises(BookingNotPriced):
        unpriced.book(LATER, NOW)


@pytest.mark.req("EVT-019")
def test_a_limit_covers_up_to_its_last_unit_in_its_own_currency() -> None:
    limit = PartnerLimit(uuid4(), uuid4(), "EUR", 100, 40)
    limit.take(60, "EUR")
    assert limit.used_minor == 100
    for amount, currency in ((1, "EUR"), (0, "USD"), (0, None)):
        with pytest.raises(PartnerLimitExceeded):
            limit.take(amount, currency)


def test_a_person_decides_what_became_of_an_unknown_booking_within_what_was_asked() -> None:
    booking = in_state(S.UNKNOWN)
    with pytest.raises(BookingTransitionRefused):
        booking.resolve(S.CONFIRMED, NOW)
    with pytest.raises(ReservationExpired):
        booking.resolve(S.HELD, SOON)
    booking.resolve(S.HELD, NOW)
    assert booking.state is S.HELD
    with pytest.raises(BookingTransitionRefused):
        booking.resolve(S.HELD, NOW)
    calls = [event for event in booking.events if isinstance(event, PersonAsked)]
    assert [(call.is_needed, call.by_person) for call in calls] == [(True, False), (False, True)]


@pytest.mark.parametrize("objects", [[], [UUID(int=1)] * 2, [UUID(int=n) for n in range(21)]])
def test_a_booking_has_one_to_twenty_objects_each_once(objects) -> None:
    with pytest.raises(ValidationError):
        require_objects(objects)


def test_a_sale_that_is_refused_calls_a_person() -> None:
    booking = in_state(S.TICKETED)
    answered(booking, Outcome.SOLD, 0)
    answered(booking, Outcome.REJECTED, 1)
    assert booking.state is S.TICKETED
    (call,) = [event for event in booking.events if isinstance(event, PersonAsked)]
    assert (call.is_needed, call.reason) == (True, Reason.SALE_REJECTED)
