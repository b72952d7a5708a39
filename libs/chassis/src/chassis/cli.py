"""The verbs of a service's command line, the same for all: serve, migrate, job, relay, dead-letters, outbox, audit.

A mistake in the environment or an argument is one line on standard error and exit status 2; what was refused changed
nothing.
"""

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

import asyncpg
import structlog
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_settings import SettingsError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chassis import migrations
from chassis.audit import BrokenLink, Head, find_head, verify
from chassis.clock import DatabaseClock
from chassis.consumers import admin
from chassis.consumers.dead_letters import DeadLetterNotFound, DeadLetterResolved
from chassis.db import Database, safe_address
from chassis.jobs import JobDriver
from chassis.messaging import BrokerUnavailable
from chassis.problems import Problem
from chassis.relay import NotParked, Relay
from chassis.relay.command import add_outbox_verb, run_outbox_verb
from chassis.runtime import Background
from chassis.settings import ServiceSettings, explain_invalid, explain_unreadable
from chassis.telemetry import configure_logging
from chassis.tracing import configure_tracing, instrument_app

ROLES = ("api", "consumers", "relay", "jobs")
GRACEFUL_SECONDS = 20
Answer = TypeVar("Answer")
SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


class ProblemProtocol(HttpToolsProtocol):
    """The server's protocol, whose answer to what is no HTTP request is a problem document like every other."""

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the library's signature
        """Answer 400 and close the connection."""
        problem = Problem(400, "malformed_request", "the request is not valid HTTP")
        headers = b"".join(b"%s: %s\r\n" % header for header in problem.raw_headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + headers + b"connection: close\r\n\r\n" + problem.body)
        self.transport.close()


class GracefulServer(uvicorn.Server):
    """A server that tells the background loops at once when it is told to stop, not after its last answer.

    Requests in hand and running batches then end side by side, within one grace period. What is emitted in the
    meantime waits in the outbox for the next process.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop the loops, then finish what clients have asked for."""
        background: Background | None = cast("FastAPI", self.config.app).state.background
        if background is not None:
            background.ask_to_stop()
        await super().shutdown(sockets)


class Parts(Protocol):
    """What a service's composition root builds, as far as the command line needs it."""

    @property
    def app(self) -> FastAPI:
        """The HTTP application, whose lifespan runs the background loops."""

    @property
    def drivers(self) -> Sequence[JobDriver]:
        """The declared jobs."""

    @property
    def relays(self) -> Sequence[Relay]:
        """The relay's workers."""

    @property
    def close(self) -> Callable[[], Awaitable[None]]:
        """Closes the connections of a process that never served."""


@dataclass(frozen=True)
class ServiceCommand(Generic[SettingsT]):
    """A service as its command line sees it.

    Attributes:
        name: the service's name.
        settings: its settings class.
        build: its composition root, given the settings and the roles to run.
        package_file: `__file__` of its package, beside which the migrations are found.
        schema: its Postgres schema.
    """

    name: str
    settings: Callable[[], SettingsT]
    build: Callable[[SettingsT, frozenset[str]], Parts]
    package_file: str
    schema: str

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run one verb; return the exit status (0 done, 1 failed, 2 not understood)."""
        given = sys.argv[1:] if arguments is None else arguments
        if any(map(_is_broken, given)):
            return self._refuse("an argument is not text in UTF-8; look at the terminal's encoding")
        options = self._parser().parse_args(given)
        try:
            settings = self.settings()
        except ValidationError as error:
            return self._refuse(str(explain_invalid(error)))
        except SettingsError as error:
            return self._refuse(str(explain_unreadable(error)))
        configure_logging(settings.log_level, self.name)
        tracing = configure_tracing(self.name, settings.otlp_endpoint, settings.trace_ratio)
        try:
            return int(options.verb(settings, options))
        except BrokerUnavailable as error:
            return self._refuse(f"Kafka is not available: {error}", status=1)
        except (SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            migrating = options.verb == self._migrate
            where = safe_address(settings.migrate_database_url if migrating else settings.database_url)
            said = (str(error).splitlines() or [type(error).__name__])[0]  # a connection that timed out says nothing
            return self._refuse(f"database {where}: {said[:300]}", status=1)
        finally:
            if tracing is not None:
                tracing.close()

    def _parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog=self.name)
        verbs = parser.add_subparsers(required=True, metavar="VERB")
        serve = verbs.add_parser("serve", help="run the service until it is told to stop")
        serve.add_argument("--roles", default=",".join(ROLES), help="which of api,consumers,relay,jobs to run")
        serve.set_defaults(verb=self._serve)
        migrate = verbs.add_parser("migrate", help="bring the schema to the newest revision")
        migrate.set_defaults(verb=self._migrate)
        job = verbs.add_parser("job", help="run one cycle of a job")
        job.add_argument("name")
        job.add_argument("--once", action="store_true", required=True, help="one cycle, then exit")
        job.set_defaults(verb=self._job)
        relay = verbs.add_parser("relay", help="publish what the outbox holds")
        relay.add_argument("--once", action="store_true", required=True, help="until nothing is left, then exit")
        relay.set_defaults(verb=self._relay)
        letters = verbs.add_parser("dead-letters", help="list, show, retry or discard what consumers set aside")
        admin.add_arguments(letters)
        letters.set_defaults(verb=self._dead_letters)
        add_outbox_verb(verbs).set_defaults(verb=self._outbox)
        audit = verbs.add_parser("audit", help="print the head of the audit chain (SEQ:HASH), to be remembered")
        audit.set_defaults(verb=self._audit)
        verify = audit.add_subparsers(metavar="verify").add_parser("verify", help="check the audit log's chain")
        verify.add_argument("--head", type=Head.parse, metavar="SEQ:HASH", help="a head that must still be in it")
        verify.set_defaults(verb=self._verify_audit)
        return parser

    def _serve(self, settings: SettingsT, options: argparse.Namespace) -> int:
        roles = frozenset(options.roles.split(","))
        if unknown := roles - set(ROLES):
            return self._refuse(f"unknown roles {', '.join(sorted(unknown))}; known are {', '.join(ROLES)}")
        try:
            listener = socket.create_server((settings.http_host, settings.http_port), backlog=512)
        except OSError as error:
            return self._refuse(f"port {settings.http_port} is not free: {error.strerror} (PIN_HTTP_PORT)", status=1)
        parts = self.build(settings, roles)
        instrument_app(parts.app)
        config = uvicorn.Config(
            parts.app,
            http=ProblemProtocol,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=GRACEFUL_SECONDS,
            server_header=False,
            lifespan="on",
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)
        structlog.get_logger(self.name).info("serving", port=listener.getsockname()[1], roles=sorted(roles))
        with listener:
            GracefulServer(config).run(sockets=[listener])
        return 0

    def _migrate(self, settings: SettingsT, _: argparse.Namespace) -> int:
        migrations.upgrade(migrations.migrations_of(self.package_file), settings.migrate_database_url)
        return 0

    def _job(self, settings: SettingsT, options: argparse.Namespace) -> int:
        async def once() -> int:
            parts = self.build(settings, frozenset({"jobs"}))
            try:
                drivers = {driver.job.name: driver for driver in parts.drivers}
                if options.name not in drivers:
                    return self._refuse(f"no job {options.name}; there are {', '.join(sorted(drivers))}")
                result = await drivers[options.name].run_once()
            finally:
                await parts.close()
            print(" ".join(f"{name}={count}" for name, count in result.counts.items()))
            return 0

        return asyncio.run(once())

    def _relay(self, settings: SettingsT, _: argparse.Namespace) -> int:
        async def once() -> int:
            parts = self.build(settings, frozenset({"relay"}))
            published = 0
            try:
                while (turn := await parts.relays[0].run_once()).published or turn.more:
                    published += turn.published
            finally:
                await parts.close()
            print(f"published={published}")
            return 0

        return asyncio.run(once())

    def _dead_letters(self, settings: SettingsT, options: argparse.Namespace) -> int:
        async def act() -> list[str]:
            async with self._database(settings) as database:
                return await admin.run(database, self.schema, DatabaseClock(), options)

        try:
            lines = asyncio.run(act())
        except (DeadLetterNotFound, DeadLetterResolved, ValueError) as error:
            return self._refuse(str(error), status=1)
        print("\n".join(lines) or "none")
        return 0

    def _outbox(self, settings: SettingsT, options: argparse.Namespace) -> int:
        async def act() -> Sequence[str]:
            async with self._database(settings) as database:
                return await run_outbox_verb(database, self.schema, options)

        try:
            lines = asyncio.run(act())
        except (NotParked, ValueError) as error:
            return self._refuse(str(error))
        print("\n".join(lines))
        return 0

    def _audit(self, settings: SettingsT, _: argparse.Namespace) -> int:
        print(asyncio.run(self._reading(settings, lambda session: find_head(session, self.schema))))
        return 0

    def _verify_audit(self, settings: SettingsT, options: argparse.Namespace) -> int:
        found = asyncio.run(
            self._reading(settings, lambda session: verify(session, self.schema, remembered=options.head))
        )
        if isinstance(found, BrokenLink):
            return self._refuse(f"audit broken at {found}", status=1)
        print(f"whole up to {found}")
        return 0

    async def _reading(self, settings: SettingsT, ask: Callable[[AsyncSession], Awaitable[Answer]]) -> Answer:
        async with self._database(settings) as database, database.read() as session:
            return await ask(session)

    @asynccontextmanager
    async def _database(self, settings: SettingsT) -> AsyncIterator[Database]:
        database = Database(settings.database_url, application_name=f"{self.name}-cli", pool_size=1)
        try:
            yield database
        finally:
            await database.close()

    def _refuse(self, reason: str, status: int = 2) -> int:
        for line in reason.splitlines():
            print(f"{self.name}: {line}", file=sys.stderr)
        return status


def _is_broken(argument: str) -> bool:
    """Tell whether an argument holds bytes that its encoding doesn't know (PEP 383); no record could keep them."""
    return any("\udc80" <= character <= "\udcff" for character in argument)


def _leave(_: int, __: object) -> None:
    """End the process in good order; uvicorn raises the signal that stopped it once more when all is done."""
    sys.exit(0)
