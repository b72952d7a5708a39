"""The three kinds of failure, told apart: what waits, what is set aside at once, and what is tried again and parked.

1. Infrastructure (database, broker, a source that is down): nothing is counted against the message, the consumer waits.
2. Contract (unreadable, in breach of its schema, refused by the business): set aside at once, never retried by itself.
3. Handler (anything else): tried five times within about ten seconds, then its key is parked.
"""

import asyncio
import traceback
from dataclasses import dataclass
from typing import Final

import asyncpg
from sqlalchemy.exc import DBAPIError

from chassis.consumers.declaration import Refused, SourceUnavailable
from chassis.consumers.envelope import Unreadable
from chassis.db import DATABASE_ERRORS, Database, driver_error, is_infrastructure
from chassis.messaging import BrokerUnavailable

LONGEST_TEXT: Final = 1000
PING_SECONDS: Final = 5.0
TRANSACTION_ROLLBACK: Final = "40"
"""SQLSTATE class of deadlocks and serialization failures: the same statements may well succeed the next time."""


class HandlerTooSlow(Exception):
    """A handler exceeded its time limit; its transaction was rolled back."""


class HandlerMissing(Exception):
    """A dead letter's handler is declared no more, or not yet: the process may be older than the one that kept it."""


class HandlerCancelled(Exception):
    """A handler let out the cancellation of something inside it, which nobody had asked us for."""


class ConnectionLost(Exception):
    """The database connection of a transaction died, whatever error told so."""


_AMBIGUOUS: Final = (OSError, TimeoutError, asyncpg.InterfaceError, HandlerTooSlow)
"""What a database that is away causes, and a handler's own mistake too."""


class ParkingFull(Exception):
    """A key, or too many keys, can't be parked any more: the partition has to pause."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is kept of an error: no text of unknown origin, which could hold personal data.

    Attributes:
        error_class: the exception's class.
        code: its stable code, or SQLSTATE, or "".
        text: our own sentence, or the place in our code where it was raised.
    """

    error_class: str
    code: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """Describe an error."""
        cause = driver_error(error)
        if isinstance(error, (Unreadable, Refused)):
            return cls(type(error).__name__, error.code, _storable(str(error)))
        code = str(getattr(cause, "sqlstate", None) or "")
        return cls(type(cause).__name__, code, _storable(_place(error)))


async def must_wait(error: BaseException, database: Database) -> bool:
    """Tell whether an error speaks of something that is away, so that the message isn't to blame.

    An error that a handler's own mistake raises as well (a time-out, a closed connection) is settled by asking the
    database for one row.
    """
    cause = driver_error(error)
    if isinstance(error, (SourceUnavailable, BrokerUnavailable, ConnectionLost)):
        return True
    if isinstance(cause, asyncpg.QueryCanceledError):
        return False
    if str(getattr(cause, "sqlstate", None) or "").startswith(TRANSACTION_ROLLBACK):
        return True
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return True
    if isinstance(cause, _AMBIGUOUS):
        return not await _answers(database)
    return is_infrastructure(error)


async def _answers(database: Database) -> bool:
    try:
        async with asyncio.timeout(PING_SECONDS):
            await database.ping()
    except DATABASE_ERRORS:
        return False
    return True


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/src/" in frame.filename] or frames
    if not ours:
        return ""
    module = ours[-1].filename.removesuffix(".py").rpartition("/src/")[2].strip("/").replace("/", ".")
    return f"raised in {module}.{ours[-1].name}, line {ours[-1].lineno}"


def _storable(text: str) -> str:
    return text[:LONGEST_TEXT].encode(errors="replace").decode().replace("\0", "?")
