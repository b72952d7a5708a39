"""The import contracts of pyproject.toml hold, and each has been seen broken: a violation is planted into a copy of the
packages and the linter must name it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = "crm imports in one direction, and has no module outside the layers"
PURE = "domain code knows no framework"
PACKAGES = {"bizcal": "libs/bizcal/src", "chassis": "libs/chassis/src", "devstack": "libs/devstack/src"}
PACKAGES |= {path.name: path.parent.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("services/*/src/*"))}
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the packages, without their tests."""
    folder = tmp_path_factory.mktemp("packages")
    for package, source in PACKAGES.items():
        leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / source / package, folder / package, ignore=leave_out)
    return folder


def lint(tree: Path) -> str:
    """Return what the linter says of a copy under the contracts of pyproject.toml."""
    done = subprocess.run(
        [sys.executable, "-c", LINT, str(ROOT / "pyproject.toml"), "--no-cache", "--no-logo"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_every_package_of_ours_is_under_the_contracts():
    text = (ROOT / "pyproject.toml").read_text()
    line = next(line for line in text.splitlines() if line.startswith("root_packages"))
    assert [package for package in PACKAGES if f'"{package}"' not in line] == []


def test_the_packages_keep_the_contracts(tree):
    said = lint(tree)
    assert " 0 broken." in said, said


@pytest.mark.parametrize(
    ("module", "line", "contract", "found"),
    [
        ("crm/domain/deals.py", "import sqlalchemy", PURE, "crm.domain.deals -> sqlalchemy"),
        ("crm/domain/bookings.py", "import chassis.ids", PURE, "crm.domain.bookings -> chassis.ids"),
        ("crm/domain/deals.py", "import crm.tables", LAYERS, "crm.domain.deals -> crm.tables"),
        ("crm/api/deals.py", "from crm import jobs", LAYERS, "crm.api.deals -> crm.jobs"),
        ("crm/commands/deals.py", "import crm.queries", LAYERS, "crm.commands.deals -> crm.queries"),
        (
            "chessboard/consumers.py",
            "import crm.domain",
            "services never import one another",
            "chessboard.consumers -> crm.domain",
        ),
        ("chessboard/domain/objects.py", "import chassis.ids", PURE, "chessboard.domain.objects -> chassis.ids"),
        ("crm/saga.py", "x = 1", LAYERS, "- crm.saga"),
        ("chassis/db.py", "import crm.domain", "chassis imports nothing of ours", "chassis.db -> crm.domain"),
        (
            "bizcal/hours.py",
            "import chassis.ids",
            "bizcal is calendar math and nothing else",
            "bizcal.hours -> chassis.ids",
        ),
        (
            "crm/jobs.py",
            "import devstack.stack",
            "devstack is a tool: nothing imports it",
            "crm.jobs -> devstack.stack",
        ),
        (
            "crm/jobs.py",
            "import aiokafka",
            "aiokafka is imported by chassis.messaging.kafka alone",
            "crm.jobs -> aiokafka",
        ),
        (
            "chassis/relay.py",
            "from aiokafka import errors",
            "aiokafka is imported by chassis.messaging.kafka alone",
            "chassis.relay -> aiokafka",
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(module, line, contract, found, tree):
    path = tree / module
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        said = lint(tree)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert f"{contract} BROKEN" in said, said
    assert found in said
