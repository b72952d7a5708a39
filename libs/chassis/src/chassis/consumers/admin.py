"""HTTP routes and command line of dead letters; both call `DeadLetters` and say the same.

The routes are for the role platform-admin and stand in no published OpenAPI document, as those of jobs.
"""

import argparse
import getpass
import os
from datetime import datetime
from typing import Annotated, Any, Final
from uuid import UUID

import orjson
from fastapi import Depends, Query

from chassis.clock import Clock
from chassis.consumers.dead_letters import By, DeadLetterNotFound, DeadLetterResolved, DeadLetters, Filter
from chassis.consumers.store import Disposition
from chassis.db import Database
from chassis.ids import new_id
from chassis.web import Body, Call, ErrorAnswer, Reason, Router, operating

ERRORS: Final[dict[type[Exception], ErrorAnswer]] = {
    DeadLetterNotFound: ErrorAnswer(404, "dead_letter_not_found"),
    DeadLetterResolved: ErrorAnswer(409, "dead_letter_resolved"),
}


class DeadLetterView(Body):
    """A dead letter without its record."""

    id: UUID
    consumer: str
    topic: str
    partition: int
    record_offset: int
    recorded_at: datetime
    message_key: str | None
    event_id: UUID | None
    type: str | None
    disposition: Disposition
    error_class: str
    error_code: str
    error: str
    attempts: int
    first_failed_at: datetime
    last_failed_at: datetime
    retry_requested_at: datetime | None
    resolved_at: datetime | None
    resolution: str | None


class DeadLetterRecord(DeadLetterView):
    """A dead letter with its record, value and header values in base64, null where Kafka has null."""

    value: str | None
    headers: list[tuple[str, str | None]]


class DeadLetterPage(Body):
    """Dead letters, oldest first; `next` goes into `after` for the following page."""

    items: list[DeadLetterView]
    next: UUID | None


class RetryRequest(Body):
    """Which dead letters to retry; `dryRun` only counts them."""

    consumer: str | None = None
    topic: str | None = None
    type: str | None = None
    disposition: Disposition | None = None
    error_code: str | None = None
    dry_run: bool = False


class RetryAnswer(Body):
    """How many dead letters will be (or with `dryRun` would be) retried."""

    count: int
    dry_run: bool


class DiscardRequest(Body):
    """Why a dead letter is given up."""

    reason: Reason


def router(service: str, schema: str) -> Router:
    """Return the routes /v1/admin/dead-letters of a service.

    Args:
        service: how its scopes begin: `<service>:dead-letters:read` and `:operate`.
        schema: its schema.
    """
    read, operate = f"{service}:dead-letters:read", f"{service}:dead-letters:operate"
    letters = DeadLetters(schema)
    routes = Router(prefix="/v1/admin/dead-letters", tags=["operation"], include_in_schema=False)

    @routes.get("")
    async def list_dead_letters(
        call: Annotated[Call, operating(read)],
        matching: Annotated[Filter, Depends(_filter)],
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
        after: UUID | None = None,
    ) -> DeadLetterPage:
        """List dead letters, oldest first; unresolved ones unless asked otherwise."""
        rows = await letters.find(call.session, matching, limit=limit + 1, after=after)
        items = [DeadLetterView.model_validate(row) for row in rows[:limit]]
        return DeadLetterPage(items=items, next=items[-1].id if len(rows) > limit else None)

    @routes.get("/{letter_id}")
    async def get_dead_letter(letter_id: UUID, call: Annotated[Call, operating(read)]) -> DeadLetterRecord:
        """Return one dead letter with its record."""
        return DeadLetterRecord.model_validate(await letters.get(call.session, letter_id))

    @routes.post("/retry", status_code=202)
    async def retry_dead_letters(body: RetryRequest, call: Annotated[Call, operating(operate)]) -> RetryAnswer:
        """Ask for a retry of all unresolved dead letters that match."""
        matching = Filter(None, body.consumer, body.topic, body.type, body.disposition, body.error_code)
        if body.dry_run:
            return RetryAnswer(count=await letters.count(call.session, matching), dry_run=True)
        by = await _by(call)
        return RetryAnswer(count=await letters.retry(call.session, matching, by), dry_run=False)

    @routes.post("/{letter_id}/retry", status_code=202)
    async def retry_dead_letter(letter_id: UUID, call: Annotated[Call, operating(operate)]) -> RetryAnswer:
        """Ask for a retry of one dead letter (of a parked key: of the whole key)."""
        count = await letters.retry(call.session, Filter(id=letter_id), await _by(call))
        return RetryAnswer(count=count, dry_run=False)

    @routes.post("/{letter_id}/discard")
    async def discard_dead_letter(
        letter_id: UUID, body: DiscardRequest, call: Annotated[Call, operating(operate)]
    ) -> DeadLetterRecord:
        """Give a dead letter up; what waits behind it in its key goes on."""
        await letters.discard(call.session, letter_id, body.reason, await _by(call))
        return DeadLetterRecord.model_validate(await letters.get(call.session, letter_id))

    return routes


def _filter(
    consumer: str | None = None,
    topic: str | None = None,
    type: str | None = None,  # noqa: A002 - the query parameter's name
    disposition: Disposition | None = None,
    error_code: Annotated[str | None, Query(alias="errorCode")] = None,
    *,
    resolved: bool = False,
) -> Filter:
    return Filter(None, consumer, topic, type, disposition, error_code, resolved)


async def _by(call: Call) -> By:
    return By(call.principal.subject, await call.now(), call.correlation_id)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the acts of the verb `dead-letters` on a command line."""
    acts = parser.add_subparsers(required=True, dest="act", metavar="ACT")
    which = argparse.ArgumentParser(add_help=False)
    for name in ("consumer", "topic", "type", "disposition"):
        which.add_argument(f"--{name}")
    which.add_argument("--error-code", dest="error_code")
    listing = acts.add_parser("list", parents=[which], help="one JSON line per dead letter, oldest first")
    listing.add_argument("--resolved", action="store_true", help="those handled or discarded")
    listing.add_argument("--limit", type=int, default=50)
    acts.add_parser("show", help="one dead letter with its record").add_argument("id", type=UUID)
    retry = acts.add_parser("retry", parents=[which], help="ask for a retry of one, or of all that match")
    retry.add_argument("id", type=UUID, nargs="?")
    retry.add_argument("--all", action="store_true", help="needed where neither an id nor a filter is given")
    retry.add_argument("--dry-run", action="store_true", help="only count them")
    discard = acts.add_parser("discard", help="give one up; what waits behind it goes on")
    discard.add_argument("id", type=UUID)
    discard.add_argument("--reason", required=True)


async def run(database: Database, schema: str, clock: Clock, options: argparse.Namespace) -> list[str]:
    """Do what the command line asks for and return the lines to print.

    Raises:
        DeadLetterNotFound, DeadLetterResolved, ValueError: it can't be done; nothing was changed.
    """
    letters = DeadLetters(schema)
    async with database.write() as session:
        by = By(f"cli:{_user()}", await clock.now(session), str(new_id()))
        match options.act:
            case "list":
                found = await letters.find(session, _matching(options, resolved=options.resolved), limit=options.limit)
                return [_line(row) for row in found]
            case "show":
                return [_line(await letters.get(session, options.id))]
            case "retry":
                matching = _matching(options)
                if matching == Filter() and not options.all:
                    raise ValueError("which ones? give an id, a filter, or --all")
                if options.dry_run:
                    return [f"would retry {await letters.count(session, matching)}"]
                return [f"retry requested for {await letters.retry(session, matching, by)}"]
            case _:
                await letters.discard(session, options.id, options.reason, by)
                return [f"discarded {options.id}"]


def _user() -> str:
    """Return who runs the command; a container's user may have no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


def _matching(options: argparse.Namespace, *, resolved: bool = False) -> Filter:
    letter_id = getattr(options, "id", None)
    return Filter(
        letter_id,
        options.consumer,
        options.topic,
        options.type,
        options.disposition,
        options.error_code,
        resolved,
    )


def _line(row: dict[str, Any]) -> str:
    return orjson.dumps(row, default=str).decode()
