"""The nightly purge: bounded transactions, and nothing goes that somebody still needs."""

from datetime import timedelta

from crm_world import World, scrape

from chassis.consumers.retention import DEAD_LETTER_LIFE, INBOX_LIFE
from chassis.retention import ROWS

MARKS = """
insert into crm.inbox (consumer, event_id, received_at)
select 'c', gen_random_uuid(), $1 from generate_series(1, $2::int)
"""
LETTER = """
insert into crm.dead_letter (id, consumer, topic, partition, record_offset, recorded_at, parking_key, headers,
  error_class, error_code, error, attempts, first_failed_at, last_failed_at, disposition, resolved_at, resolution)
select gen_random_uuid(), 'c', 't', 0, n, $1, '', '[]', 'E', '', '', 1, $1, $1, 'quarantine', $2,
  case when $2::timestamptz is not null then 'handled' end
from generate_series($3::int, $4::int) n
"""


async def test_what_is_old_goes_in_bounded_transactions_and_the_rest_stays(world: World) -> None:
    old, young = world.now - INBOX_LIFE - timedelta(hours=1), world.now - INBOX_LIFE + timedelta(hours=1)
    await world.admin.execute(MARKS, old, ROWS * 2 + 1)
    await world.admin.execute(MARKS, young, 3)
    long_ago = world.now - DEAD_LETTER_LIFE - timedelta(days=1)
    await world.admin.execute(LETTER, long_ago, long_ago, 1, 5)
    await world.admin.execute(LETTER, long_ago, None, 6, 7)
    crm = world.crm("jobs")
    (driver,) = [driver for driver in crm.drivers if driver.job.name == "retention"]
    counts = (await driver.run_once()).counts
    assert counts == {"answers": 0, "dead_letters": 5, "inbox": ROWS * 2 + 1}
    assert await world.admin.fetchval("select count(*) from crm.inbox") == 3
    assert await world.admin.fetchval("select count(*) from crm.dead_letter where resolved_at is null") == 2
    assert (await scrape(crm))['crm_retention_items_total{phase="inbox"}'] == ROWS * 2 + 1
    assert (await driver.run_once()).counts == {"answers": 0, "dead_letters": 0, "inbox": 0}
