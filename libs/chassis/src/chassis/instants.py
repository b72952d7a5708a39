"""Instants as text: always with their offset, always UTC on the wire."""

from datetime import UTC, datetime
from functools import lru_cache


def rfc3339(instant: datetime) -> str:
    """Return an aware instant as RFC 3339 in UTC with the suffix Z, microseconds only where there are any.

    Raises:
        ValueError: the instant is naive, or lies outside the years 1 to 9999 in UTC.
    """
    if instant.tzinfo is UTC:
        return _text(instant)
    if instant.tzinfo is None:
        raise ValueError(f"naive datetime: {instant!r}")
    try:
        return _text(instant.astimezone(UTC))
    except OverflowError as error:
        raise ValueError(f"not representable in UTC: {instant!r}") from error


@lru_cache(maxsize=1024)
def _text(instant: datetime) -> str:
    """Return a UTC instant's text; keyed by UTC, as two readings of one ambiguous wall clock time compare equal."""
    return instant.isoformat().replace("+00:00", "Z")
