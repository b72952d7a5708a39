"""Every pair of those who change a held object, in every order of their locks and commits.

Whatever the order: one event per version, versions without a gap, no mismatch of holds, and an outcome that the two
would also have had one after the other. A schedule that fails is printed; PLAYED plays it again.
"""

import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from board_world import TENANT, World
from net_pieces import run_at
from prometheus_client import CollectorRegistry
from race_laboratory import Act, Played, Schedule, explore, play
from test_chessboard_crm_requests import ANSWERED, BOOK, CHANGED, EXPIRED, HOLD, Crm

from chassis.consumers.batches import Batches
from chassis.consumers.handling import Handling
from chassis.consumers.metrics import ConsumerMetrics
from chassis.db import Actor, Database
from chassis.messaging import Received
from chassis.runtime import Stop
from chessboard import commands
from chessboard.commands import By
from chessboard.consumers import declare_consumers
from chessboard.domain import DomainError, ExpirationLimits, Phase
from chessboard.tables import SCHEMA

MINE, OTHERS = UUID(int=0xA0), UUID(int=0xB0)
PLAYED: dict[str, Schedule] = {}
"""Pairs of which one schedule alone is played, such as `{"late release+commit": ("commit", …)}`."""


@dataclass
class Scene:
    """A unit whose reservation by MINE has run out, and all who may want to change it."""

    world: World
    unit: UUID
    crm: Crm
    freed: int = 0

    def consumer(self, *records: Received) -> Act:
        async def act(database: Database) -> None:
            registry = CollectorRegistry()
            (consumer,) = declare_consumers(registry)
            handling = Handling(database, consumer, SCHEMA, self.world.clock, ConsumerMetrics(registry))
            progress = await Batches(handling, (0.0, 0.0, 0.0, 0.0)).take(records, Stop())
            assert not progress.behind
            again = {"consumer": consumer.group, "mode": "one_by_one"}
            assert not registry.get_sample_value("pin_consumer_batches_total", again), "it failed, and did not wait"

        return act

    def net(self) -> Act:
        async def act(database: Database) -> None:
            run = run_at(self.world.now, uuid4())
            for phase in Phase:
                async with database.write() as session:
                    batch = await commands.release_expired_holds(session, run, phase, LIMITS)
                assert not batch.failed
                assert not batch.conflicts, "a version moved on under a lock"
                self.freed += len(batch.released)

        return act

    def person(self, command: Callable[..., Awaitable[Any]]) -> Act:
        async def act(database: Database) -> None:
            by = By(TENANT, "user-7", self.world.now, "request-7")
            with suppress(DomainError):
                async with database.write(Actor(TENANT, None, "user-7", ())) as session:
                    await command(session, self.unit, by)

        return act

    def acts(self) -> dict[str, Act]:
        """Return what each actor does, by name; CRM's numbers are given in the order in which CRM would ask."""
        late = self.world.ago(hours=-1)
        commit = self.crm.record(BOOK, self.unit, MINE, sequence=2, at=late)
        release = self.crm.record(EXPIRED, self.unit, MINE, sequence=3)
        hold = self.crm.record(HOLD, self.unit, OTHERS, sequence=4, at=late)
        return {
            "job": self.net(),
            "commit": self.consumer(commit),
            "late release": self.consumer(release),
            "late hold": self.consumer(hold),
            "admin hide": self.person(commands.hide_object),
            "admin sell": self.person(commands.sell_object),
        }


LIMITS = ExpirationLimits(batch_size=200, hold_grace=timedelta(minutes=10))
NAMES = ("job", "commit", "late release", "late hold", "admin hide", "admin sell")
PAIRS = [f"{one}+{other}" for one, other in itertools.combinations_with_replacement(NAMES, 2)]


async def set_up(world: World, overdue: timedelta = timedelta(minutes=11)) -> Scene:
    await world.admin.execute(
        "truncate chessboard.property_object, chessboard.property_object_version, chessboard.hold_ledger,"
        " chessboard.outbox, chessboard.audit_log, chessboard.inbox, chessboard.dead_letter, chessboard.parked_key,"
        " chessboard.project_recalc_request cascade"
    )
    unit = await world.property_object(status="Free")
    crm = Crm(world)
    await crm.send(crm.record(HOLD, unit, MINE, sequence=1, at=world.now - overdue))
    return Scene(world, unit, crm)


async def outcome(scene: Scene) -> tuple[Any, ...]:
    """Return what became of the unit and of CRM's requests, after checking what must hold of every run."""
    world, unit = scene.world, scene.unit
    row, history = await world.object_row(unit), await world.history(unit)
    versions = [entry["version"] for entry in history]
    assert versions == list(range(2, row["version"] + 1)), "a gap in the history"
    changes = await world.events(CHANGED)
    assert [event["Version"] for event in changes] == versions, "one event per version, in order"
    for before, after in itertools.pairwise(changes):
        assert after["FromStatus"] == before["ToStatus"], "the events don't follow each other"
    assert row["status"] == history[-1]["to_status"]
    assert not await world.admin.fetch("select error_code from chessboard.dead_letter"), "a false mismatch"
    answers = {answer["Sequence"]: answer["Outcome"] for answer in await world.events(ANSWERED)}
    by_net = [event for event in changes if event["StatusSource"] == "ExpirationJob"]
    assert len(by_net) == scene.freed <= 1, "each warning is one release, and it happens once"
    return row["status"], row["hold_booking_id"], tuple(sorted(answers.items()))


@pytest.mark.req("HLD-20", "HLD-66", "HLD-82", "HLD-83", "HLD-85", "HLD-96")
@pytest.mark.parametrize("pair", PAIRS)
async def test_two_at_once_end_as_if_one_had_come_after_the_other(world: World, pair: str) -> None:
    one, other = pair.split("+")

    async def run(schedule: Schedule) -> tuple[Played, tuple[Any, ...]]:
        scene = await set_up(world)
        acts = scene.acts()
        both = {one: acts[one], (other if other != one else f"second {other}"): acts[other]}
        try:
            played = await play(both, world.database.system_url, world.admin, schedule)
            if "job" in both:  # what it has passed over because somebody held it is left to its next cycle
                await scene.net()(world.system())
            return played, await outcome(scene)
        except BaseException as error:
            error.add_note(f"schedule of {pair}: {schedule}")
            raise

    outcomes: dict[Schedule, tuple[Any, ...]] = {}

    async def one_schedule(schedule: Schedule) -> Played:
        played, outcomes[played.schedule] = await run(PLAYED.get(pair, schedule))
        return played

    schedules = await explore(one_schedule)
    serial = [outcomes[played.schedule] for played in schedules if is_serial(played.schedule)]
    for schedule, found in outcomes.items():
        assert found in serial, f"{pair}, schedule {schedule}: {found}, one after the other: {serial}"


@pytest.mark.req("HLD-07", "HLD-12", "HLD-40")
async def test_the_net_warns_of_nothing_while_the_normal_path_is_merely_slow(world: World) -> None:
    async def one_schedule(schedule: Schedule) -> Played:
        scene = await set_up(world, overdue=timedelta(minutes=10))
        acts = scene.acts()
        played = await play(
            {name: acts[name] for name in ("job", "late release")}, world.database.system_url, world.admin, schedule
        )
        assert (await outcome(scene))[0] == "Free"
        assert scene.freed == 0, played.schedule
        return played

    assert len(await explore(one_schedule)) >= 6


def is_serial(schedule: Schedule) -> bool:
    """Tell whether each actor ended before the other began."""
    return len([name for name, _ in itertools.groupby(schedule)]) == len(set(schedule))
