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
    found = [
        *(ROOT / "services").glob("*/src/*/messages.py"),
        *(ROOT / "services").glob("*/src/*/messages/__init__.py"),
    ]
    packages = sorted(path.parent if path.stem == "messages" else path.parents[1] for path in found)
    return [published_by(package.parents[1].name, package.name) for package in packages]


__all__ = ["contracts", "declared", "publishers", "story"]
