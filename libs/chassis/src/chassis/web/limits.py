"""How many requests one principal may send to one process; what is beyond is refused before any row is read.

A refusal tells truly when the next request will be granted.
"""

from dataclasses import dataclass
from math import ceil, floor
from typing import Final
from uuid import UUID

from limits import parse
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left to a principal.

    Attributes:
        granted: whether this request may go on.
        limit: requests per window.
        remaining: how many of them are left.
        wait_seconds: after which one more is granted; 0: at once.
    """

    granted: bool
    limit: int
    remaining: int
    wait_seconds: float

    def headers(self) -> dict[str, str]:
        """Return the answer's RateLimit headers."""
        return {
            "ratelimit-limit": str(self.limit),
            "ratelimit-remaining": str(self.remaining),
            "ratelimit-reset": str(ceil(self.wait_seconds)),
        }


class RateLimiter:
    """Counts the requests of each principal in a sliding window of this process.

    Args:
        rate: such as "600/minute".
    """

    def __init__(self, rate: str) -> None:
        self._rate: Final = parse(rate)
        self._storage: Final = MemoryStorage()
        self._limiter: Final = SlidingWindowCounterRateLimiter(self._storage)

    async def charge(self, tenant_id: UUID, subject: str) -> Allowance:
        """Count one request of a principal and return what is left to it."""
        whose = (str(tenant_id), subject)
        granted = await self._limiter.hit(self._rate, *whose)
        limit, window = self._rate.amount, self._rate.get_expiry()
        counts = await self._storage.get_sliding_window(self._rate.key_for(*whose), window)
        before, before_ends_in, now, now_ends_in = counts
        used = before * before_ends_in / window + now
        wait = _wait(limit, window, before, before_ends_in, now, now_ends_in - window)
        return Allowance(granted, limit, max(0, limit - floor(used)), wait)


def _wait(limit: int, window: int, before: int, before_ends_in: float, now: int, now_ends_in: float) -> float:
    """Return the seconds after which the weighted count falls below the limit.

    The window before counts by the share of it that is still in sight; the one of now becomes that when it ends.
    """
    if now >= limit:
        return now_ends_in + window * (1 - limit / now)
    if before == 0:
        return 0.0
    return max(0.0, before_ends_in - (limit - now) * window / before)
