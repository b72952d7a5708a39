"""Alembic environment of crm; chassis holds what all services share."""

from chassis.migrations import run_env
from crm.tables import SCHEMA, metadata

run_env(metadata, SCHEMA)
