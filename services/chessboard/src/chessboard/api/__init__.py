"""HTTP routes of chessboard under /v1: parse, call one command or query, answer.

Bodies are camelCase, instants carry an offset, unknown fields are refused, and so is what the database can't keep.
"""

from typing import Final

from chessboard.api import grid, imports, objects, projects, stream
from chessboard.api.errors import ERRORS, READ, SALES_ADMIN, WRITE
from chessboard.api.stream import read_change

ROUTERS: Final = (projects.router, objects.router, grid.router, imports.router, stream.router)

__all__ = ["ERRORS", "READ", "ROUTERS", "SALES_ADMIN", "WRITE", "read_change"]
