"""Bookings and their rules; pure. crm is the source of truth of their timers.

Invariants: a booking moves by the table of `booking_states` and in no other way; each transition raises the version by
one and gives one event; a timer is set exactly in the states that have it; whoever leaves to cancelled or failed asks
that every object which may be held be released; what has ended is never brought back by a late answer.
"""

from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from crm.domain.booking_objects import (
    ANSWER_WITHIN,
    KEEPS_BOOKED_UNTIL,
    KEEPS_RESERVED_UNTIL,
    OF_DEAL,
    RESOLUTIONS,
    Answer,
    Asked,
    BookingEvent,
    BookingMoved,
    BookingNotDue,
    BookingNotPriced,
    BookingObject,
    ObjectAsked,
    Outcome,
    PersonAsked,
    QuoteExpired,
    QuoteInvalidated,
    Reason,
    ReservationExpired,
    is_past,
    require_future,
)
from crm.domain.booking_states import (
    BOOKED,
    RESERVED,
    TERMINAL,
    WAITING,
    BookingAct,
    BookingState,
    BookingTransitionRefused,
    next_booking_state,
)

_S, _A = BookingState, BookingAct


@dataclass(eq=False, slots=True)
class Booking:
    """A booking of one or more objects for a deal.

    Attributes:
        version: counts its changes; grows by one with every transition.
        charged_minor: what it takes of its partner's limit, from the commit decision until it is undone.
        charge_on_record: what the partner's limit has been told of that.
        came_from: the state before `unknown`.
        probes: how often the outstanding answer was asked for again in this state.
    """

    id: UUID
    tenant_id: UUID
    deal_id: UUID
    partner_id: UUID | None
    created_at: datetime
    updated_at: datetime
    objects: list[BookingObject]
    state: BookingState = BookingState.DRAFT
    version: int = 1
    reserved_until: datetime | None = None
    booked_until: datetime | None = None
    quote_expires_at: datetime | None = None
    answer_due_at: datetime | None = None
    registration_asked_at: datetime | None = None
    price_minor: int | None = None
    amended_price_minor: int | None = None
    currency: str | None = None
    charged_minor: int = 0
    charge_on_record: int = 0
    reason: Reason | None = None
    came_from: BookingState | None = None
    probes: int = 0
    events: list[BookingEvent] = field(default_factory=list)

    def quote(self, price_minor: int, currency: str, expires_at: datetime, now: datetime) -> None:
        """Promise a price for some time."""
        require_future("expiresAt", expires_at, now)
        self._move(_A.QUOTE, now)
        self.price_minor, self.currency, self.quote_expires_at = price_minor, currency, expires_at

    def invalidate_quote(self, reason: Reason, now: datetime) -> None:
        """Take the quote back: its life is over, or an offer's price changed."""
        self._move(_A.INVALIDATE_QUOTE, now, reason)
        self.price_minor = self.currency = None
        ids = self._object_ids()
        self.events.append(
            QuoteInvalidated(
                self.id, self.deal_id, self.tenant_id, self.partner_id, reason, ids, self.updated_at, self.version
            )
        )

    def expire_quote(self, now: datetime) -> None:
        """Take back a quote whose life is over.

        Raises:
            BookingNotDue: it isn't, or there is none.
        """
        if not is_past(self.quote_expires_at, now):
            raise BookingNotDue(f"booking {self.id} has no quote that is over")
        self.invalidate_quote(Reason.QUOTE_EXPIRED, now)

    def ask_hold(self, reserved_until: datetime, now: datetime) -> None:
        """Ask the chessboard to reserve every object.

        Raises:
            QuoteExpired: there was a quote and its life is over.
            ObjectTaken: another live booking has one of them.
        """
        require_future("reservedUntil", reserved_until, now)
        if self.quote_expires_at is not None and self.quote_expires_at <= now:
            raise QuoteExpired(f"the quote of booking {self.id} is over")
        self._check(_A.ASK_HOLD)
        self.reserved_until = reserved_until
        self._move(_A.ASK_HOLD, now)
        self._ask_all(Asked.HOLD)

    def ask_payment(self, now: datetime) -> None:
        """Wait for the payment."""
        self._check(_A.ASK_PAYMENT)
        self._require_running(now)
        self._move(_A.ASK_PAYMENT, now)

    def book(self, booked_until: datetime, now: datetime) -> None:
        """Decide to book: the payment has come, the chessboard is asked to book every object.

        Raises:
            ReservationExpired: the reservation's time is over.
            BookingNotPriced: a partner's booking has no price.
        """
        self._check(_A.COMMIT)
        require_future("bookedUntil", booked_until, now)
        self._require_running(now)
        if self.partner_id is not None:
            if self.price_minor is None:
                raise BookingNotPriced(f"booking {self.id} has no price")
            self.charged_minor = self.price_minor
        self.booked_until = booked_until
        self._move(_A.COMMIT, now)
        self._ask_all(Asked.COMMIT)

    def ask_amendment(self, price_minor: int | None, now: datetime) -> None:
        """Ask for a change, of the price or of nothing that crm knows."""
        self._check(_A.ASK_AMENDMENT)
        self._require_running(now)
        self._move(_A.ASK_AMENDMENT, now)
        self.amended_price_minor = price_minor

    def decide_amendment(self, now: datetime, *, is_applied: bool) -> None:
        """Apply or refuse what was asked for."""
        act = _A.APPLY_AMENDMENT if is_applied else _A.REFUSE_AMENDMENT
        self._check(act)
        self._require_running(now)
        if is_applied and self.amended_price_minor is not None:
            self.price_minor = self.amended_price_minor
            if self.partner_id is not None:
                self.charged_minor = self.amended_price_minor
        self._move(act, now, Reason.AMENDMENT_APPLIED if is_applied else Reason.AMENDMENT_REFUSED)

    def ask_registration(self, now: datetime) -> None:
        """Note that the registrar was asked; the state stays."""
        self._check(_A.ASK_REGISTRATION)
        self._touch(now)
        self.registration_asked_at = self.updated_at

    def register(self, now: datetime, reason: Reason | None = None) -> None:
        """End well: the chessboard is told that every object is sold."""
        self._move(_A.REGISTER, now, reason)
        self._ask_all(Asked.SELL)
        self._free_claims()

    def cancel(self, reason: Reason, now: datetime) -> None:
        """Cancel, and ask that what may be held be released."""
        self._end(_A.END_WITH_DEAL if reason in OF_DEAL else _A.CANCEL, reason, now)
        self._weigh(now)

    def expire(self, now: datetime) -> None:
        """Cancel since the time is over.

        Raises:
            BookingNotDue: it is not.
        """
        self._check(_A.EXPIRE)
        if not is_past(self._timer(), now):
            raise BookingNotDue(f"booking {self.id} is not due")
        self._end(_A.EXPIRE, Reason.EXPIRED, now)

    def take_answer(self, answer: Answer, now: datetime) -> bool:
        """Note an answer and move if it decides; return whether it said anything new."""
        told = next((o for o in self.objects if o.property_object_id == answer.property_object_id), None)
        if told is None or not told.take(answer):
            return False
        if told.asked is Asked.SELL and told.is_gone:
            self.events.append(PersonAsked(self.id, self.tenant_id, True, Reason.SALE_REJECTED, now))
        self._weigh(now)
        return True

    def miss_answer(self, now: datetime) -> None:
        """Ask again, once; then a booking is unknown and needs a person, or is undone if it is confirmed in part.

        Raises:
            BookingNotDue: the answer's time has not come.
        """
        if not is_past(self.answer_due_at, now):
            raise BookingNotDue(f"booking {self.id} waits for no answer that is late")
        if self.state is _S.UNKNOWN or self.probes == 0:
            self.probe(now)
            return
        if self.state is _S.PARTIALLY_CONFIRMED:
            self._end(_A.TIME_OUT, Reason.NOT_COMPLETED, now)
        else:
            self._move(_A.TIME_OUT, now, Reason.ANSWER_TIMEOUT)

    def probe(self, now: datetime) -> None:
        """Repeat the requests without answer, each with its own sequence."""
        self._check(_A.PROBE)
        if self.state is _S.PARTIALLY_CONFIRMED:
            for refused in (o for o in self.objects if o.is_gone):
                refused.outcome = None
        self._repeat(now)
        self.probes += 1
        self.answer_due_at = now + ANSWER_WITHIN[self.state]

    def learn_freed(self, property_object_id: UUID, version: int, now: datetime) -> bool:
        """React to the safety net, which has freed an object; return whether that meant anything."""
        freed = next((o for o in self.objects if o.property_object_id == property_object_id), None)
        if freed is None or self.state not in RESERVED | BOOKED | WAITING or freed.is_stale(version):
            return False
        freed.object_version = version
        timer = self._timer()
        if timer is not None and timer <= now:
            freed.outcome = Outcome.RELEASED
            self._end(_A.NET_FREED_DUE, Reason.EXPIRED, now)
        elif timer is not None:
            freed.outcome = None
            self._move(_A.NET_FREED_EARLY, now, Reason.FREED_EARLY)
        else:
            self._check(_A.NET_FREED_EARLY)
            if freed.asked is not Asked.RELEASE:
                freed.outcome = None
            self._repeat(now)
        return True

    def resolve(self, to: BookingState, now: datetime) -> None:
        """Let a person decide what became of an unknown booking.

        Raises:
            BookingTransitionRefused: it is not unknown, or was never so far.
            ReservationExpired: it can't be held or confirmed any more.
        """
        act = RESOLUTIONS[to]
        self._check(act)
        if to in TERMINAL:
            self._end(act, Reason.DECIDED, now)
            return
        wanted, outcome = (Asked.HOLD, Outcome.HELD) if to is _S.HELD else (Asked.COMMIT, Outcome.BOOKED)
        if any(o.asked is not wanted for o in self.objects):
            raise BookingTransitionRefused(f"booking {self.id} has not asked to be {to}")
        timer = self.reserved_until if to is _S.HELD else self.booked_until
        if timer is None or timer <= now:
            raise ReservationExpired(f"the time of booking {self.id} is over")
        for one in self.objects:
            one.outcome = outcome
        self._move(act, now, Reason.DECIDED)

    def _weigh(self, now: datetime) -> None:
        """Move if the answers that are there decide."""
        stage = self.came_from or self.state
        if stage is _S.CANCELLATION_PENDING:
            if all(o.is_gone for o in self.objects):
                self._end(_A.ALL_FREE, self.reason if self.state is stage else Reason.ANSWERED, now)
        elif stage in {_S.PENDING_SUPPLIER, *RESERVED}:
            self._weigh_holds(stage, now)
        elif stage in {_S.COMMITTING, _S.PARTIALLY_CONFIRMED, *BOOKED}:
            self._weigh_commits(stage, now)

    def _weigh_holds(self, stage: BookingState, now: datetime) -> None:
        if all(o.outcome is Outcome.HELD for o in self.objects):
            self._move(_A.ALL_HELD, now)
        elif stage is _S.PENDING_SUPPLIER and any(o.is_gone for o in self.objects):
            self._end(_A.HOLD_REJECTED, Reason.HOLD_REJECTED, now)

    def _weigh_commits(self, stage: BookingState, now: datetime) -> None:
        booked = sum(o.outcome is Outcome.BOOKED for o in self.objects)
        if booked == len(self.objects):
            self._move(_A.ALL_BOOKED, now)
        elif any(o.outcome is None for o in self.objects) or stage in BOOKED:
            return
        elif self.state is _S.PARTIALLY_CONFIRMED:
            self._end(_A.COMPENSATE, Reason.COMMIT_REJECTED, now)
        elif booked:
            self._move(_A.SOME_BOOKED, now)
        else:
            self._end(_A.NONE_BOOKED, Reason.COMMIT_REJECTED, now)

    def _end(self, act: BookingAct, reason: Reason | None, now: datetime) -> None:
        """Leave towards cancelled or failed, and ask that all that may be held be released."""
        self._move(act, now, reason)
        for one in self.objects:
            if one.asked not in {None, Asked.RELEASE} and not one.is_gone:
                one.ask(Asked.RELEASE, self.id, reason)
                self._tell_asked(one)
        if self.state in TERMINAL:
            self.charged_minor = 0
            self._free_claims()

    def _move(self, act: BookingAct, now: datetime, reason: Reason | None = None) -> None:
        left = self.state
        self.state = next_booking_state(left, act)
        self._touch(now)
        self.reason, self.probes = reason, 0
        self.came_from = left if self.state is _S.UNKNOWN else None
        self._set_timers()
        moved = BookingMoved(
            self.id, self.deal_id, self.tenant_id, self.partner_id, left, self.state, reason, self._object_ids(),
            None if self.state in BOOKED else self.reserved_until, self.booked_until, self.updated_at, self.version,
        )  # fmt: skip
        self.events.append(moved)
        if self.state is _S.UNKNOWN:
            why = Reason.ANSWER_TIMEOUT if reason is None else reason
            self.events.append(PersonAsked(self.id, self.tenant_id, True, why, self.updated_at))
        elif left is _S.UNKNOWN:
            why, by_person = reason or Reason.ANSWERED, act in RESOLUTIONS.values()
            self.events.append(PersonAsked(self.id, self.tenant_id, False, why, self.updated_at, by_person))

    def _set_timers(self) -> None:
        within = ANSWER_WITHIN.get(self.state)
        self.answer_due_at = None if within is None else self.updated_at + within
        self.quote_expires_at = self.amended_price_minor = None
        if self.state not in KEEPS_RESERVED_UNTIL:
            self.reserved_until = None
        if self.state not in KEEPS_BOOKED_UNTIL:
            self.booked_until = None

    def _timer(self) -> datetime | None:
        """Return when the state is over by itself."""
        if self.state in RESERVED:
            return self.reserved_until
        return self.booked_until if self.state in BOOKED else None

    def _require_running(self, now: datetime) -> None:
        timer = self._timer()
        if timer is not None and timer <= now:
            raise ReservationExpired(f"the time of booking {self.id} is over")

    def _check(self, act: BookingAct) -> None:
        next_booking_state(self.state, act)

    def _touch(self, now: datetime) -> None:
        self.version += 1
        self.updated_at = max(now, self.updated_at)

    def _ask_all(self, asked: Asked) -> None:
        for one in self.objects:
            one.ask(asked, self.id)
            self._tell_asked(one)

    def _repeat(self, now: datetime) -> None:
        for one in self.objects:
            if one.asked is not None and one.outcome is None:
                self._tell_asked(one, now)

    def _tell_asked(self, one: BookingObject, now: datetime | None = None) -> None:
        if one.asked is None or one.sequence is None:
            raise AssertionError("nothing was asked")
        told = ObjectAsked(
            one.asked, self.id, self.deal_id, self.tenant_id, one.property_object_id, one.sequence,
            self.reserved_until, self.booked_until, one.reason, now or self.updated_at,
        )  # fmt: skip
        self.events.append(told)

    def _free_claims(self) -> None:
        for one in self.objects:
            one.claim.free(self.id)

    def _object_ids(self) -> tuple[UUID, ...]:
        return tuple(one.property_object_id for one in self.objects)
