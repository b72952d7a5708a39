"""The contracts, what the services' code publishes, and the records that crm really wrote."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from contract_checks import ROOT, Publisher, published_by
from crm_story import declared, story

from chassis.contracts import Contract, load_contracts


@pytest.fixture(scope="session")
def contracts() -> list[Contract]:
    """Every contract of the repository."""
    return load_contracts(ROOT / "contracts")


@pytest.fixture(scope="session")
def publishers() -> list[Publisher]:
    """What each service's `messages` module publishes."""
    paths = sorted((ROOT / "services").glob("*/src/*/messages.py"))
    return [published_by(path.parents[2].name, path.parent.name) for path in paths]


__all__ = ["contracts", "declared", "publishers", "story"]
