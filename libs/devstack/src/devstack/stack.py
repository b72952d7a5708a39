"""Starts and stops the platform: embedded Postgres, a broker, the topics, the migrations and the services.

Everything lives in `.pin/` of the checkout; nothing runs after the process that started it has ended.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import asyncpg
import httpx
import orjson

from chassis import contracts
from chassis.messaging import KafkaAddress
from chassis.testing.kafka import RunningBroker, cache_folder
from chassis.testing.processes import (
    HOST,
    CannotStart,
    popen_tied,
    require_free,
    service_variables,
    stop,
    without_variables,
)
from chassis.testing.servers import EmbeddedPostgres
from devstack.identity import DevelopmentIssuer

ROOT: Final = Path(__file__).resolve().parents[4]
HOME: Final = ROOT / ".pin"
DATABASE: Final = "pin"
PORTS: Final = {"crm": 8101, "chessboard": 8102}
POSTGRES_PORT: Final = 8132
KAFKA_PORT: Final = 8192
SERVER: Final = {"track_commit_timestamp": "on"}
Say = Callable[[str], None]


@dataclass
class Stack:
    """A running platform.

    Attributes:
        home: folder of its data and logs.
        postgres: the database server.
        broker: the broker.
        issuer: signs access tokens that the services accept.
        ports: HTTP port by service.
        overrides: environment variables on top of the usual ones.
    """

    home: Path
    postgres: EmbeddedPostgres
    broker: RunningBroker
    issuer: DevelopmentIssuer
    ports: Mapping[str, int]
    overrides: Mapping[str, str] = field(default_factory=dict)
    services: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        home: Path = HOME,
        *,
        ports: Mapping[str, int] | None = None,
        fixed_ports: bool = True,
        serve: bool = True,
        say: Say = print,
    ) -> Self:
        """Start everything up to and, if `serve`, including the services.

        Args:
            home: folder of its data and logs.
            ports: HTTP port by service.
            fixed_ports: use the documented ports of Postgres and Kafka, else free ones.
            serve: start the services, too; else `serve_all` does.
            say: told of each step.

        Raises:
            CannotStart: something can't run here (one line that says why); nothing is left running.
        """
        ports = ports or PORTS
        for service, port in ports.items():
            require_free(port, service)
        home.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with contextlib.ExitStack() as undo:
            postgres = EmbeddedPostgres.start(
                home / "postgres", port=POSTGRES_PORT if fixed_ports else None, settings=SERVER
            )
            undo.callback(postgres.stop)
            say(f"Postgres on {HOST}:{postgres.port}")
            broker = RunningBroker.start(home / "kafka", cache_folder(ROOT), port=KAFKA_PORT if fixed_ports else None)
            undo.callback(broker.stop)
            say(f"Kafka ({broker.kind}) on {broker.bootstrap}")
            stack = cls(home, postgres, broker, DevelopmentIssuer.load(HOME), ports)
            undo.callback(stack.stop_services)
            asyncio.run(stack.prepare())
            for service in ports:
                stack.migrate(service)
            if serve:
                stack.serve_all({}, say)
            undo.pop_all()
        say(f"ready after {time.monotonic() - started:.1f} s")
        return stack

    def serve_all(self, overrides: Mapping[str, str], say: Say = print) -> None:
        """Start all services with additional environment variables and wait until they are ready.

        Raises:
            CannotStart: one ended or wasn't ready in time.
        """
        self.overrides = overrides
        for service in self.ports:
            self.serve(service)
        for service in self.ports:
            self.wait_ready(service)
            say(f"{service} on {self.address(service)}")

    async def prepare(self) -> None:
        """Create the database, its roles and schemas, and the topics."""
        admin = await asyncpg.connect(self.postgres.url())
        try:
            if not await admin.fetchval("select 1 from pg_database where datname = $1", DATABASE):
                await admin.execute(f"create database {DATABASE}")
        finally:
            await admin.close()
        connection = await asyncpg.connect(self.postgres.url(database=DATABASE))
        try:
            await connection.execute((ROOT / "deploy/postgres/roles.sql").read_text())
        finally:
            await connection.close()
        await contracts.ensure_topics(ROOT / "contracts", KafkaAddress(self.broker.bootstrap), replicas=1)

    def url(self, role: str) -> str:
        """Return the database's address for a role."""
        return self.postgres.url(role, DATABASE)

    def address(self, service: str) -> str:
        """Return a service's HTTP address."""
        return f"http://{HOST}:{self.ports[service]}"

    def variables(self, service: str) -> dict[str, str]:
        """Return the settings of a service as environment variables."""
        return {
            **service_variables(service.replace("-", "_"), self.url, self.broker.bootstrap),
            "PIN_JWT_ISSUERS": orjson.dumps([self.issuer.trusted()]).decode(),
            "PIN_HTTP_PORT": str(self.ports[service]),
            **self.overrides,
        }

    def environment(self, service: str) -> dict[str, str]:
        """Return the whole environment of a service's process."""
        return without_variables() | self.variables(service)

    def migrate(self, service: str) -> None:
        """Bring a service's schema to the newest revision.

        Raises:
            CannotStart: it could not be migrated.
        """
        done = subprocess.run(
            self._command(service, "migrate"),
            env=self.environment(service),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            raise CannotStart(f"{service}: migration failed: {lines[-1] if lines else 'it said nothing'}")

    def serve(self, service: str) -> None:
        """Start a service's process; its log lines go to a file of the stack's folder."""
        with self.log_of(service).open("wb") as output:
            self.services[service] = popen_tied(
                self._command(service, "serve"),
                cwd=ROOT,
                output=output,
                env=self.environment(service),
                death_signal=signal.SIGTERM,
            )

    def wait_ready(self, service: str, seconds: float = 60.0) -> None:
        """Wait until a service says that it is ready.

        Raises:
            CannotStart: it ended or wasn't ready in time (with what it said).
        """
        deadline = time.monotonic() + seconds
        answer = "no answer"
        while time.monotonic() < deadline:
            if self.services[service].poll() is not None:
                lines = self.log_of(service).read_text().strip().splitlines()
                raise CannotStart(f"{service} ended at once: {lines[-1] if lines else 'it said nothing'}")
            with contextlib.suppress(httpx.HTTPError):
                response = httpx.get(f"{self.address(service)}/health/ready", timeout=5)
                if response.status_code == httpx.codes.OK:
                    return
                answer = response.text
            time.sleep(0.05)
        raise CannotStart(f"{service} is not ready after {seconds:.0f} s: {answer}")

    def log_of(self, service: str) -> Path:
        """Return the file of a service's log lines."""
        return self.home / f"{service}.log"

    def client(self, service: str, token: str) -> httpx.Client:
        """Return an HTTP client of a service with an access token."""
        return httpx.Client(base_url=self.address(service), headers={"authorization": f"Bearer {token}"}, timeout=10)

    def stop_services(self) -> None:
        """Stop the services: all are asked at once, each gets time to finish its work."""
        for process in self.services.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.services.values():
            stop(process, seconds=30)
        self.services.clear()

    def stop(self) -> None:
        """Stop everything."""
        self.stop_services()
        self.broker.stop()
        self.postgres.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @staticmethod
    def _command(service: str, verb: str) -> list[str]:
        return [sys.executable, "-m", service.replace("-", "_"), verb]
