"""The verb `outbox` of a service's command line: what is parked, and letting it go; every act is audited."""

import argparse
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from chassis.clock import DatabaseClock
from chassis.db import Database
from chassis.relay.parking import ParkedKey, Parking


def add_outbox_verb(verbs: Any) -> argparse.ArgumentParser:
    """Add `outbox parked | unpark KEY | discard ID --reason TEXT` to a command line's verbs; return its parser."""
    parser: argparse.ArgumentParser = verbs.add_parser("outbox", help="show and let go what the broker refused")
    acts = parser.add_subparsers(required=True, metavar="ACT", dest="act")
    parked = acts.add_parser("parked", help="list the keys that wait")
    parked.add_argument("--limit", type=int, default=100)
    unpark = acts.add_parser("unpark", help="send a key's rows again, in order")
    unpark.add_argument("key")
    unpark.add_argument("--reason", default="")
    discard = acts.add_parser("discard", help="delete a parked row: it is never sent")
    discard.add_argument("id", type=int)
    discard.add_argument("--reason", required=True)
    for act in (unpark, discard):
        act.add_argument("--actor", default=None, help="who does it, for the audit")
    return parser


async def run_outbox_verb(database: Database, schema: str, options: argparse.Namespace) -> Sequence[str]:
    """Do what the verb asks and return the lines to print.

    Args:
        database: the service's database under its system role.
        schema: its schema.

    Raises:
        NotParked: there is nothing of that name.
        ValueError: the reason is empty.
    """
    async with database.write() as session:
        return await _act(Parking(schema), session, options, await DatabaseClock().now(session))


async def _act(parking: Parking, session: AsyncSession, options: argparse.Namespace, now: datetime) -> Sequence[str]:
    if options.act == "parked":
        return [_line(key) for key in await parking.parked(session, options.limit)] or ["nothing is parked"]
    actor = f"cli:{options.actor}" if options.actor else "cli"
    if options.act == "unpark":
        rows = await parking.unpark(session, options.key, at=now, actor=actor, reason=options.reason)
        return [f"unparked={rows}"]
    key = await parking.discard(session, options.id, at=now, actor=actor, reason=options.reason)
    return [f"discarded={options.id} key={key}"]


def _line(key: ParkedKey) -> str:
    waits = "operator" if key.next_attempt_at is None else f"{key.next_attempt_at:%Y-%m-%dT%H:%M:%SZ}"
    return (
        f"key={key.key} first_id={key.first_id} topic={key.topic} rows={key.rows} attempts={key.attempts}"
        f" parked_at={key.parked_at:%Y-%m-%dT%H:%M:%SZ} next={waits} reason={key.reason}"
    )
