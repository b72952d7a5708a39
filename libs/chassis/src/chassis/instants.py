"""Instants as text: always with their offset, always UTC on the wire."""

from datetime import UTC, datetime
from functools import lru_cache


@lru_cache(maxsize=1024)
def rfc3339(instant: datetime) -> str:
    """Return an aware instant as RFC 3339 in UTC with the suffix Z, microseconds only where there are any.

    Raises:
        ValueError: the instant is naive.
    """
    if instant.tzinfo is None:
        raise ValueError(f"naive datetime: {instant!r}")
    return instant.astimezone(UTC).isoformat().replace("+00:00", "Z")
