"""HTTP routes of crm under /v1."""

from crm.api import bookings, deals, limits
from crm.api.errors import ERRORS

ROUTERS = (deals.router, bookings.router, limits.router)
__all__ = ["ERRORS", "ROUTERS"]
