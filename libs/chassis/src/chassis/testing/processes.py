"""Child processes that end with their parent, even when the parent is killed."""

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Final

HOST: Final = "127.0.0.1"
_PR_SET_PDEATHSIG: Final = 1
_LIBC: ctypes.CDLL | None = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


class CannotStart(Exception):
    """A server can't be run here; the text is one line that says why."""


def free_ports(count: int) -> list[int]:
    """Return loopback TCP ports that are free now, below the range that the kernel gives to outgoing connections.

    In that range a client that retries while its server is down may be given the server's own port, connect to itself
    and so keep the server from coming back.

    Raises:
        CannotStart: not enough were found.
    """
    top = 32768
    with contextlib.suppress(OSError, ValueError):
        top = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    low, high = (10000, top) if top > 12000 else (20000, 60000)
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(low, high), 1000):
        if is_free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise CannotStart(f"no free port among those tried between {low} and {high}")


def is_free(port: int) -> bool:
    """Tell whether a loopback port can be listened on."""
    with contextlib.suppress(CannotStart):
        require_free(port, "")
        return True
    return False


def require_free(port: int, what: str) -> None:
    """Check that a loopback port can be listened on.

    Raises:
        CannotStart: it can't (the text names the port and what wanted it).
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise CannotStart(f"{what}: port {port} is not free ({error.strerror})") from error


def wait_until(ready: Callable[[], bool], seconds: float, process: subprocess.Popen[bytes] | None = None) -> bool:
    """Poll `ready` until it is true, the time is over or the process has ended; return whether it became true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready():
            return True
        if process is not None and process.poll() is not None:
            return False
        time.sleep(0.02)
    return False


def accepts_connections(port: int, host: str = HOST) -> bool:
    """Tell whether something listens on a port (of this machine, if no other is named)."""
    try:
        with socket.create_connection((host, port), timeout=2):
            return True
    except (OSError, OverflowError, UnicodeError):
        return False


def service_variables(schema: str, url_of: Callable[[str], str], bootstrap: str) -> dict[str, str]:
    """Return the environment variables with which a service runs on servers of this package.

    Args:
        schema: the service's schema, which its three roles are named after.
        url_of: gives the database's address for a role.
        bootstrap: `host:port` of the broker.
    """
    return {
        "PIN_ENV": "development",
        "PIN_DATABASE_URL": url_of(f"{schema}_system"),
        "PIN_API_DATABASE_URL": url_of(f"{schema}_api"),
        "PIN_MIGRATE_DATABASE_URL": url_of(f"{schema}_owner"),
        "PIN_KAFKA_BOOTSTRAP": bootstrap,
        "PIN_KAFKA_SECURITY": "plaintext",
    }


def without_variables() -> dict[str, str]:
    """Return this process's environment less what would reach a service as a setting."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PIN_")}


def popen_tied(
    command: Sequence[str],
    *,
    cwd: Path,
    output: IO[bytes] | int,
    env: Mapping[str, str] | None = None,
    uid: int | None = None,
    death_signal: int = signal.SIGKILL,
) -> subprocess.Popen[bytes]:
    """Start a process that doesn't outlive this one (Linux), in its own process group and without input.

    The kernel ties a child to the *thread* that started it, so the child is started in a thread that lasts until it
    ends.

    Args:
        command: the program and its arguments; the server's own binary, as its children are not tied.
        cwd: where it runs.
        output: gets its standard output and error.
        env: its environment; this process's if not given.
        uid: user and group to run as (only root may say so).
        death_signal: what the child gets when this process ends.

    Raises:
        OSError: the program could not be started.
    """
    me = os.getpid()

    def tie() -> None:
        if _LIBC is None:
            return
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != me:
            os._exit(1)

    def popen() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            list(command),
            cwd=cwd,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            user=uid,
            group=uid,
            extra_groups=[] if uid is not None else None,
            preexec_fn=tie,  # noqa: PLW1509 - two system calls, no lock is taken
        )

    return _in_lasting_thread(popen) if sys.platform == "linux" else popen()


def stop(process: subprocess.Popen[bytes], seconds: float = 20.0, first: int = signal.SIGTERM) -> int:
    """End a process we started: politely, then by SIGKILL; return its exit code."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(first)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def _in_lasting_thread(popen: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    child: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            process = popen()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            child.set_exception(error)
            return
        child.set_result(process)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    threading.Thread(target=keep, name="keep-child", daemon=True).start()
    return child.result()
