"""Every known fault names tests that exist: a table that points nowhere protects nothing."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\|(?P<fault>[^|]*)\|(?P<shows>[^|]*)\|(?P<tests>.*)\|$")
NAME = re.compile(r"`([^`]+)`")


def names_in(path: Path) -> set[str]:
    """Return the names of a file's test functions and methods."""
    if not path.is_file():
        return set()
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, functions)}


def broken_rows(table: str, tests: Path = TESTS) -> list[str]:
    """Return one sentence per row without a test, and per named test that doesn't exist."""
    found = []
    for line in table.splitlines():
        row = ROW.match(line)
        if row is None or row["fault"].strip() in ("fault", "---"):
            continue
        names = NAME.findall(row["tests"])
        if not names or not row["shows"].strip():
            found.append(f"{row['fault'].strip()}: no test, or not said how it would show")
        for name in names:
            file, _, test = name.partition("::")
            if test not in names_in(tests / file):
                found.append(f"{row['fault'].strip()}: there is no {name}")
    return found


def test_every_known_fault_has_tests_that_exist():
    table = (TESTS / "faults.md").read_text()
    assert len([line for line in table.splitlines() if "::" in line]) > 40
    assert broken_rows(table) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("| a fault | somehow | |", "no test"),
        ("| a fault | | `unit/test_faults_table.py::names_in` |", "how it would show"),
        ("| a fault | somehow | `unit/test_faults_table.py::test_gone` |", "there is no unit/test_faults_table.py"),
        ("| a fault | somehow | `unit/test_gone.py::test_gone` |", "there is no unit/test_gone.py"),
    ],
)
def test_a_row_that_points_nowhere_is_refused(row, said):
    (sentence,) = broken_rows(row)
    assert said in sentence
