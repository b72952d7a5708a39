"""Working-time arithmetic: a calendar says what is working time, and all sums are exact to the microsecond.

Invariant: nothing here reads a clock, a file or an environment variable; equal arguments give equal results.
"""

from bizcal.calendar import Calendar, UsedInterval
from bizcal.timeline import NoWorkingTime

__all__ = ["Calendar", "NoWorkingTime", "UsedInterval"]
