"""Pages of a list by keyset: a cursor says after which row the next page begins, so that inserts move no row.

A cursor is opaque to callers and belongs to one list; it holds the order's columns of the last row and no secret.
"""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, TypeVar
from uuid import UUID

import orjson

from chassis.web.answers import InputRefused

Row = TypeVar("Row")
LONGEST_CURSOR: Final = 512
_READERS: Final[dict[type, Callable[[Any], Any]]] = {
    UUID: UUID,
    datetime: datetime.fromisoformat,
    int: lambda value: value,
    str: lambda value: value,
}


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """One page: its rows, and the cursor of the following one (None: there is none)."""

    items: Sequence[Row]
    next: str | None


class Keyset:
    """The order of one list.

    Args:
        name: of the list; a cursor of another one is refused.
        columns: types of the order's columns, the last of which makes a row unique.
    """

    def __init__(self, name: str, *columns: type) -> None:
        self._name = name
        self._columns = columns

    def position(self, cursor: str | None, parameter: str = "query.after") -> tuple[Any, ...] | None:
        """Return the order's columns of the row that a cursor names; None for the first page.

        Raises:
            InputRefused: it is not a cursor of this list (422).
        """
        if cursor is None:
            return None
        try:
            return self._read(cursor)
        except (ValueError, TypeError, LookupError) as error:
            raise InputRefused(parameter, "not a cursor of this list") from error

    def page(self, rows: Sequence[Row], limit: int, key: Callable[[Row], tuple[Any, ...]]) -> Page[Row]:
        """Return the page of `limit` rows out of `limit + 1` that were asked for.

        Args:
            rows: in the list's order, one more than the page holds where there are more.
            limit: rows of a page.
            key: gives the order's columns of a row.
        """
        items = rows[:limit]
        return Page(items, self.cursor(key(items[-1])) if len(rows) > limit else None)

    def cursor(self, key: tuple[Any, ...]) -> str:
        """Return the cursor after the row with these columns."""
        values = [str(value) if isinstance(value, UUID) else value for value in key]
        return base64.urlsafe_b64encode(orjson.dumps([self._name, *values])).rstrip(b"=").decode()

    def _read(self, cursor: str) -> tuple[Any, ...]:
        if len(cursor) > LONGEST_CURSOR:
            raise ValueError("too long")
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        name, *values = orjson.loads(text)
        if name != self._name or len(values) != len(self._columns):
            raise ValueError("another list's")
        found = tuple(_value(kind, value) for kind, value in zip(self._columns, values, strict=True))
        if self.cursor(found) != cursor:
            raise ValueError("not as it was given")
        return found


def _value(kind: type, value: Any) -> Any:
    if kind is int and not (type(value) is int and abs(value) < 2**63):
        raise TypeError("not a whole number")
    if kind is not int and (not isinstance(value, str) or "\0" in value):
        raise TypeError("not a text")
    found = _READERS[kind](value)
    if isinstance(found, datetime) and found.tzinfo is None:
        raise ValueError("an instant without offset")
    return found
