"""Many small commands, few statements: what a block of commands writes goes out once, at the block's end.

Nothing of a savepoint that was rolled back goes out.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, SessionTransaction

from chassis.db import copy_lines

Item = TypeVar("Item")
_Table = tuple[str, tuple[str, ...]]
_Waiting = dict[_Table | Callable[[AsyncSession, list[Any]], Awaitable[None]], list[Any]]
"""What a block has been given so far, by where it goes: lines to a table's columns, items to a function."""


@asynccontextmanager
async def gathered(session: AsyncSession) -> AsyncIterator[None]:
    """Write what a block gives to `gather`, `copy_lines` and `flush` once, at its end: many small commands, few
    statements.

    What was given within a savepoint that is rolled back is not written.

    Raises:
        sqlalchemy.exc.DBAPIError, asyncpg.PostgresError: as those do, at the end of the block.
    """
    waiting: _Waiting = {}
    session.info["gathered"] = waiting
    try:
        with _without_undone(session.sync_session, waiting):
            yield
    finally:
        del session.info["gathered"]
    await session.flush()
    for what, given in waiting.items():
        if not isinstance(what, tuple):
            await what(session, given)
    for what, given in waiting.items():
        if isinstance(what, tuple):
            await copy_lines(session, *what, given)


async def gather(
    session: AsyncSession, write: Callable[[AsyncSession, list[Item]], Awaitable[None]], items: Iterable[Item]
) -> None:
    """Call `write` with items now, or at the end of the enclosing `gathered` block with all that it was given for.

    Args:
        session: an open write session.
        write: the same function each time; it is called before the block's lines are copied, in the order in which
            functions were first given.
        items: what it is to write, in order.
    """
    waiting: _Waiting | None = session.info.get("gathered")
    if waiting is None:
        await write(session, list(items))
    else:
        waiting.setdefault(write, []).extend(items)


@contextmanager
def _without_undone(session: Session, waiting: _Waiting) -> Iterator[None]:
    """Take out what was given within a savepoint, if that is rolled back."""
    lengths: dict[SessionTransaction, dict[Any, int]] = {}

    def begun(_: Session, transaction: SessionTransaction) -> None:
        if transaction.nested:
            lengths[transaction] = {what: len(given) for what, given in waiting.items()}

    def undone(_: Session, transaction: SessionTransaction) -> None:
        before = lengths.pop(transaction, None)
        if before is not None:
            for what, given in waiting.items():
                del given[before.get(what, 0) :]

    event.listen(session, "after_transaction_create", begun)
    event.listen(session, "after_soft_rollback", undone)
    try:
        yield
    finally:
        event.remove(session, "after_transaction_create", begun)
        event.remove(session, "after_soft_rollback", undone)


def is_gathering(session: AsyncSession) -> bool:
    """Tell whether a `gathered` block is open, so that what is written now goes out at its end."""
    return "gathered" in session.info
