"""The nightly look for steps that are open though their deal has ended."""

from datetime import UTC, datetime

from crm_world import World

from crm.jobs import NIGHTLY


async def test_steps_left_open_under_an_ended_deal_are_counted_and_not_changed(world: World) -> None:
    ended = await world.deal(status="Cancelled")
    alive = await world.deal()
    left = [await world.step(ended, due=None), await world.step(ended, due=world.ago(hours=1))]
    await world.step(alive, due=None)
    crm = world.crm("jobs")
    (leftovers,) = [driver for driver in crm.drivers if driver.job.name == "timeline-leftovers"]
    assert (await leftovers.run_once()).counts == {"leftovers": 2}
    assert leftovers.job.metrics.backlog._value.get() == 2
    assert {(await world.step_row(step))["status"] for step in left} == {"InProgress"}


async def test_without_leftovers_the_nightly_look_reports_none(world: World) -> None:
    await world.step(await world.deal(), due=None)
    crm = world.crm("jobs")
    assert (await crm.drivers[1].run_once()).counts == {"leftovers": 0}


def test_the_nightly_look_is_at_three_in_the_platform_zone() -> None:
    assert NIGHTLY.next_after(datetime(2026, 11, 30, 2, 59, tzinfo=UTC)) == datetime(2026, 11, 30, 3, 0, tzinfo=UTC)
    assert NIGHTLY.next_after(datetime(2026, 11, 30, 3, 0, tzinfo=UTC)) == datetime(2026, 12, 1, 3, 0, tzinfo=UTC)
