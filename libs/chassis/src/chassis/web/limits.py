"""How many requests one principal may send to one process; what is beyond is refused before any row is read."""

import time
from dataclasses import dataclass
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
        reset_seconds: after which the window is renewed.
    """

    granted: bool
    limit: int
    remaining: int
    reset_seconds: float

    def headers(self) -> dict[str, str]:
        """Return the answer's RateLimit headers."""
        return {
            "ratelimit-limit": str(self.limit),
            "ratelimit-remaining": str(self.remaining),
            "ratelimit-reset": str(max(0, round(self.reset_seconds))),
        }


class RateLimiter:
    """Counts the requests of each principal in a sliding window of this process.

    Args:
        rate: such as "600/minute".
    """

    def __init__(self, rate: str) -> None:
        self._rate: Final = parse(rate)
        self._limiter: Final = SlidingWindowCounterRateLimiter(MemoryStorage())

    async def charge(self, tenant_id: UUID, subject: str) -> Allowance:
        """Count one request of a principal and return what is left to it."""
        whose = (str(tenant_id), subject)
        granted = await self._limiter.hit(self._rate, *whose)
        window = await self._limiter.get_window_stats(self._rate, *whose)
        return Allowance(granted, self._rate.amount, window.remaining, window.reset_time - time.time())
