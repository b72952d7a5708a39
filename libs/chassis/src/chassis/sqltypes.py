"""Postgres types that SQLAlchemy doesn't know."""

from typing import Any

from sqlalchemy.dialects.postgresql.base import ischema_names
from sqlalchemy.types import UserDefinedType


class Xid8(UserDefinedType[int]):
    """A 64-bit transaction id (`xid8`), which doesn't wrap around."""

    cache_ok = True

    def get_col_spec(self, **kw: Any) -> str:  # noqa: ARG002 - SQLAlchemy's signature
        """Return the column type's name."""
        return "xid8"


ischema_names["xid8"] = Xid8
