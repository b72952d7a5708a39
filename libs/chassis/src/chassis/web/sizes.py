"""The largest request that a service reads."""

from typing import Final

MAX_BODY_BYTES: Final = 1024 * 1024
