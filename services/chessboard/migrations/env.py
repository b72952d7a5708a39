"""Alembic environment of chessboard; chassis holds what all services share."""

from chassis.migrations import run_env
from chessboard.tables import SCHEMA, metadata

run_env(metadata, SCHEMA)
