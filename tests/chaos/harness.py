"""A platform to hurt: writers, relays, a consuming service, a database and a broker of its own, and what must hold.

Writers put numbered notes of a few keys into the outbox of one database; two crm processes relay them through a proxy;
two ledger processes book them into another database and announce each booking. After every fault: nothing lost,
nothing booked twice, every key in order, and work goes on within the limit of that fault, in the same processes.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import asyncpg

from chassis.db import DATABASE_ERRORS, Database, copy_lines
from chassis.messaging import KafkaAddress, TopicSpec, create_topics
from chassis.outbox import Cause, Message, Outbox
from chassis.runtime import Stop
from chassis.testing.apache_kafka import ApacheKafka
from chassis.testing.kafka import RunningBroker
from chassis.testing.plugin import DatabaseTemplates, TestDatabase
from chassis.testing.processes import free_ports, popen_tied, service_variables, stop, without_variables
from chassis.testing.servers import EmbeddedPostgres
from tests.chaos.ledger import SESSION_SECONDS, noted
from tests.libs.chassis.kafka_proxy import PRODUCE, Fate, KafkaProxy, Request

TOPIC: Final = "pin.chaos.note.v1"
OUT: Final = "pin.chaos.booking.v1"
KEYS: Final = 24
WRITERS: Final = 4
DATABASE_LIMIT: Final = 30.0
BROKER_LIMIT: Final = 60.0
MEMBER_LIMIT: Final = SESSION_SECONDS + 25.0
"""Seconds until work goes on: the bars for restarts, and a dead member's session for processes."""

_WRITER_TABLES = """
create table crm.counter (key text primary key, n integer not null);
create table crm.written (key text not null, number integer not null, event_id uuid not null);
insert into crm.counter select 'key ' || n, 0 from generate_series(1, {keys}) n;
grant select, insert, update on crm.counter, crm.written to crm_system
"""
_LEDGER_TABLE = """
create table crm.ledger (
  position bigint generated always as identity, key text not null, number integer not null, event_id uuid not null
);
grant select, insert on crm.ledger to crm_system
"""
_DOUBLED = "select count(*) - count(distinct (key, number)) from crm.ledger"
_DISORDERED = """
select count(*) from (
  select number, lag(number, 1, 0) over (partition by key order by position) as before from crm.ledger
) as l where number <> before + 1
"""


@dataclass(frozen=True)
class Outcome:
    """What one fault did."""

    fault: str
    seconds: float
    limit: float


@dataclass
class Platform:
    """Everything that runs; made by `platform`."""

    root: Path
    folder: Path
    random: random.Random
    postgres: EmbeddedPostgres
    broker: RunningBroker
    proxy: KafkaProxy
    source: TestDatabase
    ledger: TestDatabase
    relays: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ledgers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    restarts: int = 0

    # --- processes -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start two relays and two ledgers; one ledger on the embedded broker, which hangs in some rebalances."""
        self.relays += [self._relay(), self._relay()]
        self.ledgers += [self._ledger() for _ in range(1 if self.broker.kind == "embedded" else 2)]

    def end(self) -> None:
        """End every process that is left."""
        for process in (*self.relays, *self.ledgers):
            process.send_signal(signal.SIGCONT)
            stop(process, seconds=30)

    def check_alive(self) -> None:
        """Every process must have lived through what was done to others."""
        for process in (*self.relays, *self.ledgers):
            assert process.poll() is None, f"a process ended with {process.returncode}; its log is in {self.folder}"

    def _relay(self) -> subprocess.Popen[bytes]:
        variables = {
            **without_variables(),
            **service_variables("crm", lambda role: self.postgres.url(role, self.source.name), self.proxy.bootstrap),
            "PIN_HTTP_PORT": str(free_ports(1)[0]),
        }
        return self._spawn("relay", [sys.executable, "-m", "crm", "serve", "--roles", "relay"], variables)

    def _ledger(self) -> subprocess.Popen[bytes]:
        url = self.postgres.url("crm_system", self.ledger.name)
        command = [sys.executable, "-m", "tests.chaos.ledger", url, self.broker.bootstrap, TOPIC, OUT]
        return self._spawn("ledger", command, without_variables())

    def _spawn(self, name: str, command: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as output:
            return popen_tied(command, cwd=self.root, output=output, env=variables)

    # --- faults ----------------------------------------------------------------------------------------------------

    async def kill_relay(self) -> float:
        """SIGKILL one relay and start another."""
        return await self._replace(self.relays, self._relay)

    async def kill_ledger(self) -> float:
        """SIGKILL one ledger and start another: its partitions wait for the session's end."""
        return await self._replace(self.ledgers, self._ledger)

    async def freeze_relay(self) -> float:
        """SIGSTOP a relay for a few seconds: it holds its lanes' locks meanwhile."""
        return await self._freeze(self.relays, 4.0)

    async def freeze_ledger(self) -> float:
        """SIGSTOP a ledger until its partitions are somebody else's: it wakes up as a zombie."""
        return await self._freeze(self.ledgers, SESSION_SECONDS + 4.0)

    async def terminate_backends(self) -> float:
        """End every connection of every role."""
        async with self._admin(self.source) as admin:
            await admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where backend_type = 'client backend' and pid <> pg_backend_pid()"
            )
        return DATABASE_LIMIT

    async def restart_postgres(self) -> float:
        """Crash the database server (SIGQUIT) and start it again after a moment."""
        await asyncio.to_thread(self.postgres.stop, signal.SIGQUIT)
        await self._pass(self.random.uniform(0.5, 3))
        await asyncio.to_thread(self.postgres.resume)
        return DATABASE_LIMIT

    async def restart_broker(self) -> float:
        """Stop the broker for a few seconds; Apache Kafka is killed, the embedded one saves first."""
        server = self.broker.server
        assert server is not None
        if isinstance(server, ApacheKafka):
            server.kill()
            await self._pass(self.random.uniform(0.5, 3))
            await asyncio.to_thread(server.restart)
        else:
            await asyncio.to_thread(server.stop)
            await self._pass(self.random.uniform(0.5, 3))
            await asyncio.to_thread(server.resume)
        return BROKER_LIMIT

    async def cut_acknowledgements(self) -> float:
        """For some seconds, cut every fourth connection between a produce request and its answer."""

        def judge(request: Request) -> Fate:
            return Fate.SWALLOW_ANSWER if request.api == PRODUCE and self.random.random() < 0.25 else Fate.PASS

        self.proxy.judge = judge
        await self._pass(4)
        self.proxy.judge = lambda _: Fate.PASS
        return BROKER_LIMIT

    async def delay_network(self) -> float:
        """For some seconds, delay every frame between relays and broker by up to 50 ms."""
        self.proxy.delay = 0.05
        await self._pass(4)
        self.proxy.delay = 0.0
        return DATABASE_LIMIT

    def faults(self) -> list[Callable[[], Awaitable[float]]]:
        """Return every kind of fault; those that make a group rebalance only where the broker is up to it."""
        rebalancing = [] if self.broker.kind == "embedded" else [self.kill_ledger, self.freeze_ledger]
        return [
            *rebalancing,
            self.kill_relay,
            self.freeze_relay,
            self.terminate_backends,
            self.restart_postgres,
            self.restart_broker,
            self.cut_acknowledgements,
            self.delay_network,
        ]

    async def _replace(
        self, processes: list[subprocess.Popen[bytes]], another: Callable[[], subprocess.Popen[bytes]]
    ) -> float:
        victim = processes.pop(self.random.randrange(len(processes)))
        victim.kill()
        victim.wait()
        processes.append(another())
        self.restarts += 1
        return MEMBER_LIMIT

    async def _freeze(self, processes: list[subprocess.Popen[bytes]], seconds: float) -> float:
        victim = self.random.choice(processes)
        victim.send_signal(signal.SIGSTOP)
        await self._pass(seconds)
        victim.send_signal(signal.SIGCONT)
        return MEMBER_LIMIT

    @staticmethod
    async def _pass(seconds: float) -> None:
        await Stop().wait(seconds)

    # --- load and figures ------------------------------------------------------------------------------------------

    async def write(self, stopping: Stop, writer: int) -> None:
        """Write notes until stopped; a failed transaction is tried again with the next number."""
        database = Database(self.postgres.url("crm_system", self.source.name), application_name="writer", pool_size=1)
        outbox, chance = Outbox("crm"), random.Random(writer)
        while not stopping.requested:
            try:
                async with asyncio.timeout(10):
                    await self._write_one(database, outbox, f"key {chance.randint(1, KEYS)}")
            except (*DATABASE_ERRORS, TimeoutError):
                await stopping.wait(0.1)
            await stopping.wait(0.005)
        await database.close()

    @staticmethod
    async def _write_one(database: Database, outbox: Outbox, key: str) -> None:
        async with database.write() as session:
            connection = (await (await session.connection()).get_raw_connection()).driver_connection
            number = await connection.fetchval("update crm.counter set n = n + 1 where key = $1 returning n", key)
            message = Message(noted(TOPIC), key, {"key": key, "number": number}, datetime.now(UTC), sequence=number)
            await outbox.emit(session, [message], Cause("chaos"))
            line = f"{key}\t{number}\t{message.event_id}"
            await copy_lines(session, "crm.written", ("key", "number", "event_id"), [line])

    async def written(self) -> int:
        """Return how many notes have been committed."""
        return await self._ask(self.source, "select count(*) from crm.written")

    async def booked(self) -> int:
        """Return how many bookings there are."""
        return await self._ask(self.ledger, "select count(*) from crm.ledger")

    async def hurt(self, fault: Callable[[], Awaitable[float]]) -> None:
        """Do a fault, wait until everything written by then is booked, and check what must hold."""
        limit = await fault()
        started = time.monotonic()
        goal = await self.written()
        while await self.booked() < goal:
            assert time.monotonic() - started < limit, f"{fault.__name__}: no full recovery within {limit:.0f} s"
            await self._pass(0.1)
        self.outcomes.append(Outcome(fault.__name__, time.monotonic() - started, limit))
        self.check_alive()
        await self.check_ledger()

    async def check_ledger(self) -> None:
        """Nothing is booked twice, and every key's numbers come one after the other."""
        assert await self._ask(self.ledger, _DOUBLED) == 0
        assert await self._ask(self.ledger, _DISORDERED) == 0
        assert await self._ask(self.ledger, "select count(*) from crm.dead_letter") == 0

    async def event_ids(self) -> set[str]:
        """Return the ids of all notes that were committed."""
        async with self._admin(self.source) as admin:
            return {str(row["event_id"]) for row in await admin.fetch("select event_id from crm.written")}

    async def left_in_outboxes(self) -> int:
        """Return how many rows wait in both outboxes."""
        sql = "select count(*) from crm.outbox"
        return await self._ask(self.source, sql) + await self._ask(self.ledger, sql)

    def report(self) -> str:
        """Return what was done and how long recovery took."""
        lines = [f"  {o.fault:<22} recovered in {o.seconds:5.1f} s (limit {o.limit:.0f})" for o in self.outcomes]
        return "\n".join(lines)

    async def _ask(self, database: TestDatabase, sql: str) -> int:
        async with self._admin(database) as admin:
            return int(await admin.fetchval(sql))

    def _admin(self, database: TestDatabase) -> "_Admin":
        return _Admin(self.postgres.url("postgres", database.name))


class _Admin:
    """A superuser's connection for the length of a block, waiting for a server that is just starting."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> "asyncpg.Connection[asyncpg.Record]":
        for _ in range(100):
            try:
                self._connection = await asyncpg.connect(self._url, timeout=10)
            except (OSError, asyncpg.PostgresError, TimeoutError):
                await Stop().wait(0.1)
            else:
                return self._connection
        raise AssertionError("the database does not answer")

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()


async def prepare(root: Path, folder: Path, postgres: EmbeddedPostgres, bootstrap: str) -> tuple[TestDatabase, ...]:
    """Make both databases and both topics."""
    templates = DatabaseTemplates(postgres, (root / "deploy/postgres/roles.sql").read_text())
    source = await templates.make("crm", root / "services/crm/migrations")
    ledger = await templates.make("crm", root / "services/crm/migrations")
    for database, sql in ((source, _WRITER_TABLES.format(keys=KEYS)), (ledger, _LEDGER_TABLE)):
        admin = await asyncpg.connect(database.admin_url)
        await admin.execute(sql)
        await admin.close()
    await create_topics(KafkaAddress(bootstrap), [TopicSpec(TOPIC, 6), TopicSpec(OUT, 6)])
    return source, ledger


@contextmanager
def seeded() -> Iterator[random.Random]:
    """Give the run's chance, and say its seed, which CHAOS_SEED repeats."""
    seed = int(os.environ.get("CHAOS_SEED") or time.time_ns() % 100_000)
    print(f"CHAOS_SEED={seed}")
    yield random.Random(seed)
