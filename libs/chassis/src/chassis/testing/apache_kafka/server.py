"""One node of Apache Kafka on loopback: started, killed, restarted on the same data, and never left behind."""

import atexit
import base64
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from chassis.testing.apache_kafka.jars import (
    KafkaUnavailable,
    PortTaken,
    as_unavailable,
    command_of,
    find_java,
    require_space,
    run_program,
)
from chassis.testing.processes import HOST, free_ports, is_free, popen_tied, stop

START_TIMEOUT_S: Final = 90.0
QUICK_JVM: Final = ("-XX:TieredStopAtLevel=1",)
"""JVM options for tests: only the quick compiler, which shortens the start. Pass `jvm=()` to benchmark."""

_RUN_MB: Final = 256
_PORT_TRIES: Final = 5

_LOG4J_CONFIG: Final = """\
status=error
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d{ISO8601} %p %c{1}: %m%n
rootLogger.level=warn
rootLogger.appenderRef.out.ref=out
"""

_TELLS_NOTHING: Final = re.compile(
    r"^\s|Exiting Kafka due to|A fatal exception has occurred|Could not create the Java Virtual Machine"
    r"|Error occurred during initialization of VM|^WARNING: .*Unsafe|^Picked up "
)


def _serves(port: int, cluster_id: str) -> bool:
    """Whether the broker of this cluster answers a Metadata request, and itself counts as alive in it."""
    # Metadata, version 2: correlation id 1, no client id, an empty list of topics
    request = struct.pack(">hhihi", 3, 2, 1, -1, 0)
    try:
        with socket.create_connection((HOST, port), timeout=5) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                (size,) = struct.unpack(">i", stream.read(4))
                reply = stream.read(size) if 8 <= size <= 65536 else b""
            return struct.unpack_from(">i", reply, 4)[0] > 0 and cluster_id.encode() in reply
    except (OSError, struct.error):
        return False


class ApacheKafka:
    """A running Apache Kafka node; :meth:`start` makes one.

    As a context manager it is stopped at the end. One that still runs when this process ends is stopped then.

    Attributes:
        bootstrap: "127.0.0.1:<port>", for a client's bootstrap servers.
        port: the client port.
        run_dir: its folder: `data/`, `server.properties`, `log4j2.properties`, `kafka.log`, `kafka.pid`.
    """

    def __init__(self, run_dir: Path, port: int, controller_port: int, command: Sequence[str]) -> None:
        """Only keeps what it is given; use :meth:`start`."""
        self.run_dir = run_dir
        self.port = port
        self.bootstrap = f"{HOST}:{port}"
        self._controller_port = controller_port
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._log_start = 0
        self._timeout = START_TIMEOUT_S
        self._more_ports: Mapping[str, int] = {}

    @classmethod
    def start(
        cls,
        run_dir: Path,
        *,
        lib_dir: Path,
        port: int | None = None,
        auto_create: bool = False,
        heap: str = "512m",
        jvm: Sequence[str] = QUICK_JVM,
        timeout: float = START_TIMEOUT_S,
        listeners: Mapping[str, str] | None = None,
        config: Mapping[str, str] | None = None,
    ) -> Self:
        """Start a node and wait until clients can use it.

        Data that an earlier run left in `run_dir` is carried on with.

        Args:
            run_dir: the folder for all that it writes; made when missing; one node at a time.
            lib_dir: the folder with the jars, from :func:`fetch`.
            port: the client port on 127.0.0.1; None: a free one. (The controller's is always a free one.)
            auto_create: whether a topic comes into being when first used.
            heap: the most heap, in Java's notation.
            jvm: more options for the JVM.
            timeout: seconds until it must be ready, for this start and for each :meth:`restart`.
            listeners: more client listeners, each with its security protocol ("SSL", "SASL_SSL"), on free ports
                (see :meth:`at`); the plaintext one stays, for the node itself.
            config: more lines for `server.properties`, which win over those made here.

        Returns:
            The running node.

        Raises:
            KafkaUnavailable: no Java, no jars, port taken, disk full, `run_dir` in use, or the node did not
                come up (with its last log line). No process is left then.
        """
        run_dir = run_dir.absolute()
        java = find_java()
        if not any(lib_dir.glob("kafka_2.13-*.jar")):
            raise KafkaUnavailable(f"no Kafka jars in {lib_dir}: fetch them first")
        with as_unavailable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            _require_unused(run_dir)
            require_space(run_dir, _RUN_MB)
            base = [str(java), f"-Xmx{heap}", "-Xms64m", *jvm, "-Djava.awt.headless=true",
                    f"-Dlog4j2.configurationFile={(run_dir / 'log4j2.properties').as_uri()}",
                    _run_dir_option(run_dir), "-cp", str(lib_dir.absolute() / "*")]  # fmt: skip
            for tries_left in reversed(range(_PORT_TRIES if port is None else 1)):
                try:
                    return cls._start_on(run_dir, base, port, auto_create, timeout, listeners or {}, config or {})
                except PortTaken:
                    if not tries_left:
                        raise
        raise AssertionError("not reached")

    @classmethod
    def _start_on(
        cls,
        run_dir: Path,
        base: list[str],
        port: int | None,
        auto_create: bool,
        timeout: float,
        listeners: Mapping[str, str],
        config: Mapping[str, str],
    ) -> Self:
        picked = free_ports(2 + len(listeners))
        broker = cls(run_dir, port or picked[0], picked[1], [*base, "kafka.Kafka", "server.properties"])
        broker._timeout = timeout
        broker._more_ports = dict(zip(listeners, picked[2:], strict=True))
        broker._require_ports()
        more = _more_listeners(broker._more_ports, listeners)
        _write_config(run_dir, broker.port, broker._controller_port, auto_create, more, config)
        _format_storage(run_dir, base, timeout)
        broker._launch()
        return broker

    @property
    def pid(self) -> int | None:
        """The process id of the node, None when it isn't running."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def at(self, listener: str) -> str:
        """Give "127.0.0.1:<port>" of one of the additional listeners."""
        return f"{HOST}:{self._more_ports[listener]}"

    @property
    def log_path(self) -> Path:
        """The file with the node's log and what the JVM printed; each start appends to it."""
        return self.run_dir / "kafka.log"

    def stop(self, timeout: float = 20) -> None:
        """Stop the node in order; kill it when it takes too long. Does nothing when it isn't running.

        Args:
            timeout: seconds to wait for its orderly end.
        """
        self._end(signal.SIGTERM, timeout)

    def kill(self) -> None:
        """Kill the node at once (SIGKILL), as in a crash: nothing is closed or flushed."""
        self._end(signal.SIGKILL, 10)

    def restart(self) -> None:
        """Start the node again with the same data and ports; stops it first when it is running.

        Raises:
            KafkaUnavailable: as for :meth:`start`; no process is left then.
        """
        self.stop()
        with as_unavailable(self.run_dir):
            self._require_ports()
            self._launch()

    def __enter__(self) -> Self:
        """Give the node itself, which is running already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the node."""
        self.stop()

    def _require_ports(self) -> None:
        for port in (self.port, self._controller_port, *self._more_ports.values()):
            if not is_free(port):
                raise PortTaken(f"port taken: {HOST}:{port} is in use")

    def _launch(self) -> None:
        try:
            with self.log_path.open("ab") as log:
                self._log_start = log.tell()
                self._process = popen_tied(self._command, cwd=self.run_dir, output=log)
            _running.add(self)
            _pid_file(self.run_dir).write_text(f"{self._process.pid}\n")
            self._await_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        cluster_id = _cluster_id(self.run_dir)
        deadline = time.monotonic() + self._timeout
        while not _serves(self.port, cluster_id):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.05)
                raise self._not_started(f"stopped by itself with code {code}")
            if time.monotonic() > deadline:
                raise self._not_started(f"did not start within {self._timeout:.0f} s")

    def _not_started(self, what: str) -> KafkaUnavailable:
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            text = log.read().decode(errors="replace")
        return _failure(what, text, self.run_dir, f"{self.port} or {self._controller_port}")

    def _end(self, signum: int, timeout: float) -> None:
        process = self._process
        if process is None or self._owner != os.getpid():  # a fork must not end its parent's node
            return
        stop(process, seconds=timeout, first=signum)
        self._process = None
        _running.discard(self)
        with contextlib.suppress(OSError):
            _pid_file(self.run_dir).unlink()


_running: set[ApacheKafka] = set()


@atexit.register
def _stop_running() -> None:
    for broker in list(_running):
        broker.stop(timeout=5)


def _pid_file(run_dir: Path) -> Path:
    return run_dir / "kafka.pid"


def _run_dir_option(run_dir: Path) -> str:
    """The option by which a node's command line tells its folder."""
    return f"-Dchassis.run_dir={run_dir.resolve()}"


def _require_unused(run_dir: Path) -> None:
    """Refuse a folder whose pid file names a live node of that folder; remove a pid file that is stale.

    No process is ever signalled by what a pid file says: its number may be another program's by now.
    """
    try:
        pid = int(_pid_file(run_dir).read_text())
    except FileNotFoundError:
        return
    except ValueError:
        pid = 0
    if pid > 0 and f"{_run_dir_option(run_dir)} -cp " in command_of(pid):
        raise KafkaUnavailable(f"{run_dir} is in use by a running node, process {pid}")
    _pid_file(run_dir).unlink(missing_ok=True)


def _more_listeners(ports: Mapping[str, int], protocols: Mapping[str, str]) -> Mapping[str, str]:
    """The additions to the settings that name listeners; each begins with the comma."""
    where = "".join(f",{name}://{HOST}:{port}" for name, port in ports.items())
    how = "".join(f",{name}:{protocol}" for name, protocol in protocols.items())
    return {"listeners": where, "advertised.listeners": where, "listener.security.protocol.map": how}


def _write_config(
    run_dir: Path,
    port: int,
    controller_port: int,
    auto_create: bool,
    more_listeners: Mapping[str, str],
    more: Mapping[str, str],
) -> None:
    # log.dirs is relative to the node's working folder: so a comma or a blank in the path does no harm
    config = {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{HOST}:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"CLIENT://{HOST}:{port},CONTROLLER://{HOST}:{controller_port}",
        "advertised.listeners": f"CLIENT://{HOST}:{port}",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "CLIENT",
        "log.dirs": "data",
        "num.partitions": "3",
        "auto.create.topics.enable": str(auto_create).lower(),
        "group.initial.rebalance.delay.ms": "0",
        # After a kill the node is let in again only when its former self's session is over (default: 9 s).
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
    }
    for topic in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        config |= {f"{topic}.replication.factor": "1", f"{topic}.num.partitions": "4"}
    for topic in ("transaction.state.log", "share.coordinator.state.topic"):
        config |= {f"{topic}.min.isr": "1"}
    config = {key: value + more_listeners.get(key, "") for key, value in config.items()} | dict(more)
    (run_dir / "server.properties").write_text("".join(f"{key}={value}\n" for key, value in config.items()))
    (run_dir / "log4j2.properties").write_text(_LOG4J_CONFIG)


def _cluster_id(run_dir: Path) -> str:
    """The cluster id of formatted storage; empty when it isn't formatted."""
    try:
        text = (run_dir / "data" / "meta.properties").read_text()
    except FileNotFoundError:
        return ""
    found = re.search(r"^cluster\.id=(\S+)$", text, re.MULTILINE)
    return found[1] if found else ""


def _format_storage(run_dir: Path, base: Sequence[str], timeout: float) -> None:
    """Format the storage with a random cluster id, unless it is formatted."""
    if _cluster_id(run_dir):
        return
    cluster_id = "-"
    while cluster_id.startswith("-"):  # the tool would take it for an option
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
    command = [*base, "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", "server.properties"]
    code, output = run_program(command, timeout=timeout, cwd=run_dir)
    if code is None:
        raise KafkaUnavailable(f"did not format its storage within {timeout:.0f} s")
    if code:
        raise _failure(f"formatting its storage failed with code {code}", output, run_dir)


def _failure(what: str, log: str, run_dir: Path, ports: str = "?") -> KafkaUnavailable:
    """The error for a program that failed, told from what it logged."""
    if "No space left on device" in log:
        return KafkaUnavailable(f"disk full: {run_dir}")
    if "Address already in use" in log:
        return PortTaken(f"port taken: {HOST}:{ports} is in use")
    return KafkaUnavailable(f"{what}; last log line: {_telling_line(log)[:400]}")


def _telling_line(log: str) -> str:
    """The last line that says a cause, else the last error, else the last line of a log."""
    lines = [line for line in log.splitlines() if line.strip() and not _TELLS_NOTHING.search(line)]
    for sign in (r"^Caused by: ", r"^[\w.$]+(Exception|Error): ", r"\b(ERROR|FATAL|Error)\b", ""):
        if found := [line for line in lines if re.search(sign, line)]:
            return found[-1]
    return "none"
