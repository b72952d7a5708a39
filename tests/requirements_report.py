"""Requirement id -> the tests that carry it, or its waiver: `make requirements`.

Reads `tests/requirements.md` (the ids, and the lines `due:` and `not yet:`), the `req` markers of the tests as pytest
collects them, and `tests/requirements_waived.md`. A due id with neither fails, and so does an id that doesn't exist.
A marker on a parent claims its lettered rows.
"""

import argparse
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROW = re.compile(r"^( *)- ((?:TLO|OPS|HLD|EVT)-[0-9A-Za-z]+)", re.MULTILINE)
MARK = re.compile(r"^REQ (\S+) (\S+)$", re.MULTILINE)
WAIVER = re.compile(r"^- ((?:TLO|OPS|HLD|EVT)-[0-9A-Za-z]+): (\S.*)$", re.MULTILINE)


def rows(text: str) -> dict[str, str | None]:
    """Return every id of the list with its parent row, if it is a lettered one under a parent."""
    found: dict[str, str | None] = {}
    parent = None
    for indent, name in ROW.findall(text):
        if not indent:
            parent = name
        found[name] = parent if indent else None
    return found


def due(text: str, known: dict[str, str | None]) -> set[str]:
    """Return the ids that the line `due:` asks for, less those of the line `not yet:`.

    Both lines name single ids and ranges `A-01..A-61`; a parent brings its lettered rows along.
    """
    return _named(text, "due", known) - _named(text, "not yet", known)


def covered(marks: Iterable[str], known: dict[str, str | None]) -> set[str]:
    """Return the ids that the markers claim; a parent claims its lettered rows."""
    direct = set(marks)
    return direct | {name for name, parent in known.items() if parent in direct}


def problems(text: str, marks: Iterable[str], waived: Iterable[str]) -> list[str]:
    """Return one sentence per due id without test or waiver, and per id that doesn't exist."""
    known = rows(text)
    marks, waived = set(marks), set(waived)
    asked = {name for label in ("due", "not yet") for item in _words(text, label) for name in item.split("..")}
    strange = sorted((marks | waived | asked) - set(known))
    missing = sorted(due(text, known) - covered(marks, known) - covered(waived, known))
    return [f"{name}: no such requirement" for name in strange] + [f"{name}: no test and no waiver" for name in missing]


def collected_marks(tests: Path = TESTS) -> dict[str, list[str]]:
    """Return the tests that carry each id, as pytest collects them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(tests)]
    plugin = ["-p", "tests.requirements_collect"]
    done = subprocess.run(command + plugin, capture_output=True, text=True, check=False, cwd=TESTS.parent)
    if done.returncode not in (0, 5):
        raise SystemExit(
            f"requirements: pytest could not collect the tests:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
        )
    found: dict[str, list[str]] = defaultdict(list)
    for name, test in MARK.findall(done.stdout):
        found[name].append(test)
    return found


def _named(text: str, label: str, known: dict[str, str | None]) -> set[str]:
    order = list(known)
    named: set[str] = set()
    for item in _words(text, label):
        first, _, last = item.partition("..")
        if {first, last or first} <= set(known):
            named |= set(order[order.index(first) : order.index(last or first) + 1])
    return covered(named, known)


def _words(text: str, label: str) -> list[str]:
    line = re.search(rf"^{label}: (.*)$", text, re.MULTILINE)
    return line[1].split() if line else []


def main() -> int:
    """Print the table and the verdict; exit status 1 when something is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="list every id with its tests, not only the summary")
    options = parser.parse_args()
    text = (TESTS / "requirements.md").read_text()
    marks = collected_marks()
    waivers = dict(WAIVER.findall((TESTS / "requirements_waived.md").read_text()))
    known = rows(text)
    if options.all:
        for name, parent in known.items():
            tests = marks.get(name) or marks.get(parent or "", [])
            print(f"{name:9} {(waivers.get(name) and 'waived: ' + waivers[name]) or ', '.join(tests) or '-'}")
    found = problems(text, marks, waivers)
    for sentence in found:
        print(sentence)
    wanted = due(text, known)
    held = covered(marks, known) | covered(waivers, known)
    print(f"requirements: {len(wanted & held)} of {len(wanted)} due ids held by tests or waivers; {len(known)} in all")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
