"""Realistic deals for demonstrations: several tenants, deals in every state, steps past, future, done and without a
date."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid5

import asyncpg
import orjson

from chassis.ids import new_id
from crm.domain import CLOSES, DealStatus, DealTimelineEventType, StepStatus

TENANTS_NAMESPACE: Final = UUID("0b7d4d3e-3c8f-4f0f-8a55-7b9d6f2e1a01")
TENANT_NAMES: Final = ("СтройИнвест", "Северный берег", "Агентство «Ключ»", "Новые кварталы", "Речной парк")
_COMPLEXES: Final = ("Речной парк", "Северный берег", "Марусино", "Светлый", "Гурзуф-Ривьера", "Новое Жегалово")
_PAYLOADS: Final[dict[DealTimelineEventType, tuple[str, ...]]] = {
    DealTimelineEventType.DOCUMENT_REQUESTED: ("выписка ЕГРН", "согласие супруга", "паспорт", "справка об ипотеке"),
    DealTimelineEventType.PAYMENT_REQUESTED: ("задаток", "первый взнос", "остаток"),
    DealTimelineEventType.SIGNING_REQUESTED: ("договор бронирования", "ДДУ", "акт приёма-передачи"),
    DealTimelineEventType.INSPECTION_SCHEDULED: ("приёмка квартиры", "повторная приёмка"),
    DealTimelineEventType.REGISTRATION_SUBMITTED: ("регистрация ДДУ", "регистрация права"),
}
_CLOSER_OF: Final = {opener: closer for closer, opener in CLOSES.items()}
_STEP_COLUMNS: Final = (
    "id", "deal_id", "tenant_id", "type", "status", "occurred_at", "due_at", "payload", "actor_user_id", "actor_role",
    "created_at", "updated_at", "completed_at",
)  # fmt: skip


@dataclass
class Seeded:
    """What was put into the database.

    Attributes:
        deals: how many deals.
        steps: how many timeline steps.
        overdue_at_start: ids of the steps in progress whose time had come already.
        due_soon: id -> due time of the steps that fall due during the demonstration.
        never: ids of steps that must not become overdue (no date, later, or done).
    """

    deals: int = 0
    steps: int = 0
    overdue_at_start: set[UUID] = field(default_factory=set)
    due_soon: dict[UUID, datetime] = field(default_factory=dict)
    never: set[UUID] = field(default_factory=set)


def tenant(number: int) -> UUID:
    """Return the id of a demonstration tenant."""
    return uuid5(TENANTS_NAMESPACE, str(number))


class Seeder:
    """Puts deals into crm's tables as its owner's administrator would import history.

    Args:
        now: the database's instant.
        seed: of the random generator; the same seed gives the same shapes.
        soon_after: seconds after `now` at which the first step falls due during the demonstration.
        soon_for: seconds over which they fall due.
    """

    def __init__(self, now: datetime, *, seed: int, soon_after: float, soon_for: float) -> None:
        self._now = now
        self._random = random.Random(seed)  # noqa: S311 - demonstration data
        self._soon_after = soon_after
        self._soon_for = soon_for
        self.seeded = Seeded()

    async def run(self, url: str, deals: int, progress: Callable[[int], None]) -> Seeded:
        """Insert `deals` deals with their steps; `progress` is told how many are in."""
        connection = await asyncpg.connect(url)
        try:
            for start in range(0, deals, 500):
                count = min(500, deals - start)
                await self._insert(connection, [self._deal() for _ in range(count)])
                progress(start + count)
            await connection.execute("analyze crm.deal, crm.deal_timeline_event")
        finally:
            await connection.close()
        return self.seeded

    async def _insert(
        self,
        connection: "asyncpg.Connection[asyncpg.Record]",
        deals: list[tuple[tuple[Any, ...], list[tuple[Any, ...]]]],
    ) -> None:
        columns = ["id", "tenant_id", "title", "status", "version", "created_at", "updated_at"]
        steps = [step for _, of_deal in deals for step in of_deal]
        async with connection.transaction():
            await connection.copy_records_to_table(
                "deal", schema_name="crm", columns=columns, records=[deal for deal, _ in deals]
            )
            await connection.copy_records_to_table(
                "deal_timeline_event", schema_name="crm", columns=_STEP_COLUMNS, records=steps
            )
        self.seeded.deals += len(deals)
        self.seeded.steps += len(steps)

    def _deal(self) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
        pick = self._random
        deal_id, tenant_id = new_id(), tenant(pick.randrange(len(TENANT_NAMES)))
        opened = self._now - timedelta(days=pick.uniform(2, 90))
        ended = pick.random() < 0.1
        title = f"ЖК «{pick.choice(_COMPLEXES)}», корпус {pick.randint(1, 9)}, кв. {pick.randint(1, 400)}"
        steps = [self._step(deal_id, tenant_id, opened, ended) for _ in range(pick.randint(1, 5))]
        flat = [row for rows in steps for row in rows]
        status = pick.choice((DealStatus.COMPLETED, DealStatus.CANCELLED)) if ended else DealStatus.ACTIVE
        return (deal_id, tenant_id, title, status.value, len(flat) + 1, opened, self._now), flat

    def _step(self, deal_id: UUID, tenant_id: UUID, opened: datetime, ended: bool) -> list[tuple[Any, ...]]:
        pick = self._random
        kind = pick.choice(list(_PAYLOADS))
        asked = opened + (self._now - opened) * pick.random()
        step_id = new_id()
        due, done = self._due(step_id, asked, ended)
        what = orjson.dumps({"что": pick.choice(_PAYLOADS[kind])}).decode()
        shared = (deal_id, tenant_id)
        completed = asked + (self._now - asked) * pick.random() if done else None
        status = StepStatus.DONE if done else StepStatus.IN_PROGRESS
        rows = [
            (step_id, *shared, kind.value, status.value, asked, due, what, "seed", "MANAGER", asked, asked, completed)
        ]
        if completed is not None and not ended:
            closer = _CLOSER_OF[kind].value
            ids = (new_id(), *shared, closer, StepStatus.DONE.value, completed, None, "{}", "seed", "MANAGER")
            rows.append((*ids, completed, completed, completed))
        return rows

    def _due(self, step_id: UUID, asked: datetime, ended: bool) -> tuple[datetime | None, bool]:
        """Draw when a step is due and whether it is done; note what is to become of it."""
        pick = self._random
        draw = pick.random()
        if ended or draw < 0.4:
            self.seeded.never.add(step_id)
            return asked + timedelta(days=pick.uniform(1, 10)), True
        if draw < 0.5:
            self.seeded.never.add(step_id)
            return None, False
        if draw < 0.7:
            self.seeded.never.add(step_id)
            return self._now + timedelta(days=pick.uniform(1, 30)), False
        if draw < 0.78:
            due = self._now + timedelta(seconds=self._soon_after + pick.random() * self._soon_for)
            self.seeded.due_soon[step_id] = due
            return due, False
        self.seeded.overdue_at_start.add(step_id)
        return self._now - timedelta(hours=pick.uniform(0.1, 72)), False
