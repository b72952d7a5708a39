"""Makes the project's virtual environment from requirements.lock; standard library only, run by the system's Python.

    python3 libs/devstack/setup_env.py

Does nothing when the environment already fits the lock file. Every way to fail is one line on standard error.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENV = ROOT / ".venv"
LOG = ROOT / ".pin" / "setup.log"
STAMP = ENV / "pin-stamp"
NEEDED_MB = 700
PIP = (str(ENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input")
PACKAGES = [
    *sorted((ROOT / "libs").glob("*/pyproject.toml")),
    *sorted((ROOT / "services").glob("*/pyproject.toml")),
]


class CannotSetUp(Exception):
    """The environment can't be made; the text is one line."""


def main() -> int:
    """Make the environment if need be; return the exit status."""
    try:
        set_up()
    except CannotSetUp as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("setup: interrupted; run it again", file=sys.stderr)
        return 130
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else f"{error.strerror}: {error.filename}"
        print(f"setup: {reason}", file=sys.stderr)
        return 1
    return 0


def set_up() -> None:
    """Bring .venv in line with requirements.lock and the packages of the workspace."""
    if sys.version_info < (3, 11):
        raise CannotSetUp(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]} (make PYTHON=python3.12)")
    wanted = _fingerprint()
    if STAMP.exists() and STAMP.read_text() == wanted:
        return
    free_mb = shutil.disk_usage(ROOT).free // 2**20
    if free_mb < NEEDED_MB:
        raise CannotSetUp(f"{free_mb} MB are free on the disk, {NEEDED_MB} MB are needed")
    LOG.parent.mkdir(exist_ok=True)
    print("setup: installing the locked packages into .venv (a minute or two the first time)", file=sys.stderr)
    if not _fits():
        _create()
    _install_locked()
    editable = [argument for package in PACKAGES for argument in ("--editable", str(package.parent))]
    _run(*PIP, "install", "--no-deps", "--no-build-isolation", *editable)
    STAMP.write_text(wanted)


def _fits() -> bool:
    """Tell whether .venv is whole and of this Python's version; one that was interrupted has no pip."""
    python = ENV / "bin" / "python"
    wanted = f"({sys.version_info[0]}, {sys.version_info[1]})"
    command = [str(python), "-c", "import pip, sys; print(sys.version_info[:2])"]
    if not python.exists():
        return False
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == wanted


def _create() -> None:
    try:
        venv.create(ENV, with_pip=True, clear=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(ENV, ignore_errors=True)
        raise CannotSetUp(
            "this Python can't make virtual environments: install python3-venv (Debian, Ubuntu) or use make PYTHON=..."
        ) from None


def _install_locked() -> None:
    """Install the lock file: with uv, itself taken from the lock file, as it is much faster; with pip where that
    fails."""
    lock = ROOT / "requirements.lock"
    only_uv = LOG.parent / "uv.lock.txt"
    found = re.search(r"^uv==.*(?:\n    .*)*", lock.read_text(), re.MULTILINE)
    if found is None:
        raise CannotSetUp("requirements.lock has no uv")
    only_uv.write_text(found[0] + "\n")
    _run(*PIP, "install", "--require-hashes", "--no-deps", "--requirement", str(only_uv))
    try:
        command = [
            str(ENV / "bin" / "uv"),
            "--quiet",
            "pip",
            "install",
            "--compile-bytecode",
            "--python",
            str(ENV / "bin" / "python"),
        ]
        _run(*command, "--require-hashes", "--requirement", str(lock))
    except CannotSetUp:
        _run(*PIP, "install", "--require-hashes", "--requirement", str(lock))


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in (ROOT / "requirements.lock", *PACKAGES):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(*command: str) -> None:
    with LOG.open("w") as log:
        log.write(" ".join(command) + "\n")
        log.flush()
        environment = {**os.environ, "PIP_RETRIES": "2"}
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environment).returncode
    if status:
        raise CannotSetUp(_reason(LOG.read_text(errors="replace")))


def _reason(log: str) -> str:
    if "No space left on device" in log:
        return "the disk is full"
    trouble = ("NewConnectionError", "Temporary failure in name resolution", "ConnectTimeout", "Connection refused",
               "Network is unreachable", "Max retries exceeded")  # fmt: skip
    if any(sign in log for sign in trouble):
        return f"the package registry can't be reached: is there a network? (details: {LOG.relative_to(ROOT)})"
    errors = [line for line in log.splitlines() if line.startswith("ERROR")]
    return f"{errors[-1] if errors else 'pip failed'} (details: {LOG.relative_to(ROOT)})"


if __name__ == "__main__":
    sys.exit(main())
