"""The lock file pins every package by hash and says nothing of where this checkout or its packages lie."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLACES = re.compile(
    r"https?://|file:|git\+|^-e\b|^(?:-i|-f|--(?:extra-)?index-url|--find-links)\b| @ |(?:^|\s)\.{0,2}/\w", re.MULTILINE
)


def breaches(text: str) -> list[str]:
    """Return a sentence per line that names a place, and per requirement without exact version or hash."""
    lines = enumerate(text.splitlines(), 1)
    found = [f"requirements.lock:{number}: names a place: {line}" for number, line in lines if PLACES.search(line)]
    for entry in re.findall(r"^[A-Za-z0-9].*(?:\n\s.*)*", text, re.MULTILINE):
        first = entry.splitlines()[0].removesuffix("\\").strip()
        if not re.fullmatch(r"[\w.\[\],-]+==[^\s;]+(?: ;.*)?", first):
            found.append(f"requirements.lock: {first} is not pinned")
        if "--hash=sha256:" not in entry:
            found.append(f"requirements.lock: {first} has no hash")
    return found


def test_the_lock_file_pins_everything_and_names_no_place():
    assert breaches((ROOT / "requirements.lock").read_text()) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--index-url https://host/simple", "requirements.lock:1: names a place: --index-url https://host/simple"),
        ("-e ./libs/chassis", "requirements.lock:1: names a place: -e ./libs/chassis"),
        ("orjson @ file:///x/orjson.whl", "requirements.lock:1: names a place: orjson @ file:///x/orjson.whl"),
        ("    # via /home/someone/pin", "requirements.lock:1: names a place:     # via /home/someone/pin"),
        ("orjson==3.11.0", "requirements.lock: orjson==3.11.0 has no hash"),
        ("orjson>=3 \\\n    --hash=sha256:00", "requirements.lock: orjson>=3 is not pinned"),
    ],
)
def test_a_lock_file_that_breaks_the_rule_is_refused(line, said):
    assert said in breaches(f"{line}\n")


def test_a_pinned_requirement_with_a_marker_passes():
    hashes = "    --hash=sha256:00 \\\n    --hash=sha256:01\n"
    text = f"uvloop==0.22.1 ; sys_platform != 'win32' \\\n{hashes}    # via chassis\n"
    assert breaches(text) == []
