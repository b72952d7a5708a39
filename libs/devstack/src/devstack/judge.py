"""Lets the AsyncAPI initiative's own parser judge the contracts: code that no one here wrote has the last word.

The parser is an npm package, pinned by the lock file beside its script in `contracts/judge` and installed into `.pin`
once per lock file. Where node or npm can't be had nothing is judged, which is a failure in CI only.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from devstack.stack import HOME, ROOT

SOURCES: Final = ROOT / "contracts" / "judge"
INSTALLED: Final = HOME / "asyncapi-parser"
INSTALL_SECONDS: Final = 300
_FILES: Final = ("package.json", "package-lock.json", "judge.mjs", "events.mjs")
_NPM_CI: Final = (
    "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline", "--fetch-retries=1",
    "--fetch-retry-mintimeout=1000", "--fetch-timeout=60000",
)  # fmt: skip
_AWAY: Final = {
    "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "ENETUNREACH", "ENOTFOUND", "ERR_SOCKET_TIMEOUT",
    "ETIMEDOUT", "FETCH_ERROR",
}  # fmt: skip


class NotRun(Exception):
    """The foreign code can't be had here; the text says why."""


class _Failed(Exception):
    """npm refused to install what the lock file names; the text says why."""


def judge_contracts(contracts: Path = ROOT / "contracts", installed: Path = INSTALLED) -> int:
    """Print one line per contract, and one per error or warning that the parser finds.

    Args:
        contracts: folder of *.asyncapi.yaml.
        installed: where the parser is kept.

    Returns:
        0 when no contract has an error, or when the parser can't be had and CI isn't set in the environment; else 1.
    """
    try:
        npm, node = _program("npm"), _program("node")
        _install(npm, installed)
    except NotRun as reason:
        print(f"AsyncAPI parser: not run ({reason})")
        return 1 if os.environ.get("CI") else 0
    except _Failed as reason:
        print(f"AsyncAPI parser: {reason}")
        return 1
    files = sorted(contracts.glob("*.asyncapi.yaml"))
    judged = subprocess.run([node, "judge.mjs", *files], cwd=installed, check=False)
    return 0 if judged.returncode == 0 and files else 1


def read_records(records: bytes, installed: Path = INSTALLED) -> bytes:
    """Let the CloudEvents SDK for JavaScript read Kafka records.

    Args:
        records: a JSON list of {key, headers, value}.
        installed: where the SDK is kept.

    Returns:
        A JSON list of the events, as the SDK writes them.

    Raises:
        NotRun: no node or npm, or npm doesn't reach its registry.
        subprocess.CalledProcessError: the SDK refuses a record (`stderr` says why).
    """
    npm, node = _program("npm"), _program("node")
    _install(npm, installed)
    done = subprocess.run([node, "events.mjs"], cwd=installed, input=records, capture_output=True, check=True)
    return done.stdout


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise NotRun(f"no {name}")
    return path


def _install(npm: str, folder: Path) -> None:
    """Bring the parser of the lock file into `folder`, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    marker = folder / "installed"
    wanted = hashlib.sha256(b"".join((SOURCES / name).read_bytes() for name in _FILES[:2])).hexdigest()
    for name in _FILES:
        shutil.copyfile(SOURCES / name, folder / name)
    if marker.exists() and marker.read_text() == wanted:
        return
    marker.unlink(missing_ok=True)
    print("AsyncAPI parser: npm fetches it once", flush=True)
    try:
        done = subprocess.run(
            [npm, *_NPM_CI], cwd=folder, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise NotRun(f"npm fetched nothing within {INSTALL_SECONDS} s") from error
    if done.returncode != 0:
        raise _refusal(done.stderr)
    marker.write_text(wanted)


def _refusal(said: str) -> Exception:
    codes = re.findall(r"^npm (?:error|ERR!) code (\S+)$", said, re.MULTILINE)
    if _AWAY & set(codes):
        return NotRun(f"npm does not reach its registry: {codes[0]}")
    lines = [line for line in said.splitlines() if line.startswith(("npm error ", "npm ERR! "))]
    reasons = [line.split(" ", 2)[2] for line in lines if " code " not in line]
    reason = reasons[0] if reasons else (said.strip().splitlines() or ["it said nothing"])[-1]
    return _Failed(f"npm failed: {' '.join([*codes[:1], reason])[:300]}")
