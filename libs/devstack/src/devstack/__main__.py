"""Command line of the development stack: `python -m devstack VERB` (the Makefile has a target for each)."""

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import UUID

import orjson
import psutil

from chassis.messaging import BrokerUnavailable
from chassis.testing.processes import CannotStart
from devstack import apache, demo, judge
from devstack.identity import EVERYTHING, DevelopmentIssuer
from devstack.seed import tenant
from devstack.stack import HOME, PORTS, Stack

PID_FILE = HOME / "up.pid"
FIRST_PAGES = {"crm": "/v1/deals", "chessboard": "/v1/projects"}
NEEDED_MB = 300


def main() -> int:
    """Run one verb; every foreseeable failure is one line and status 1."""
    parser = argparse.ArgumentParser(prog="devstack", description=__doc__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("demo", help="run the main job and show what happens").set_defaults(verb=_demo)
    verbs.add_parser("up", help="start the platform and stay").set_defaults(verb=_up)
    verbs.add_parser("down", help="stop a platform that another terminal runs").set_defaults(verb=_down)
    verbs.add_parser("kafka", help="fetch Apache Kafka and try it").set_defaults(verb=_kafka)
    verbs.add_parser("token", help="print an access token").set_defaults(verb=_token)
    job = verbs.add_parser("job", help="run one cycle of a job of the running platform")
    job.add_argument("name")
    job.add_argument("--service", default="crm", choices=PORTS)
    job.set_defaults(verb=_job)
    for service in PORTS:
        verb = verbs.add_parser(service, help=f"run any verb of {service} on the running platform")
        verb.add_argument("words", nargs=argparse.REMAINDER)
        verb.set_defaults(verb=_verb, service=service)
    verbs.add_parser("judge-contracts", help="let the foreign parser judge the contracts").set_defaults(verb=_judge)
    options = parser.parse_args()
    try:
        return int(options.verb(options))
    except CannotStart as error:
        return _refuse(str(error))
    except BrokerUnavailable as error:
        return _refuse(f"Kafka: {error}")
    except KeyboardInterrupt:
        return _refuse("interrupted; everything is stopped", status=130)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _refuse("the disk is full")
        raise


def _refuse(reason: str, status: int = 1) -> int:
    print(f"devstack: {reason}", file=sys.stderr)
    return status


def _require_space() -> None:
    HOME.mkdir(exist_ok=True)
    free_mb = shutil.disk_usage(HOME).free // 2**20
    if free_mb < NEEDED_MB:
        raise CannotStart(f"{free_mb} MB are free on the disk, {NEEDED_MB} MB are needed")


def _demo(_: argparse.Namespace) -> int:
    _require_space()
    return demo.run()


def _up(_: argparse.Namespace) -> int:
    _require_space()
    if (running := _running()) is not None:
        raise CannotStart(f"a platform is up already (process {running}); `make down` stops it")
    _stop_on_sigterm()
    with Stack.start() as stack:
        PID_FILE.write_text(str(os.getpid()))
        print()
        for service in stack.ports:
            _environment_file(service).write_bytes(orjson.dumps(stack.variables(service)))
            address = stack.address(service)
            print(f"  {service:<10} {address}{FIRST_PAGES[service]}   {address}/health/ready   {address}/openapi.json")
        print(f"  Postgres   {stack.url('postgres')}")
        print(f"  Kafka      {stack.broker.bootstrap} ({stack.broker.kind})")
        print(f"  logs       {', '.join(str(stack.log_of(service)) for service in stack.ports)}")
        print(f'\n  curl -H "Authorization: Bearer $(make -s token)" {stack.address("crm")}{FIRST_PAGES["crm"]}')
        print("\nCtrl-C stops everything.", flush=True)
        try:
            return _watch(stack)
        except KeyboardInterrupt:
            return 0
        finally:
            PID_FILE.unlink(missing_ok=True)
            for service in stack.ports:
                _environment_file(service).unlink(missing_ok=True)
            print("stopping", flush=True)


def _watch(stack: Stack) -> int:
    while True:
        for service, process in stack.services.items():
            if process.poll() is not None:
                return _refuse(f"{service} ended with status {process.returncode}; see {stack.log_of(service)}")
        time.sleep(0.3)


def _stop_on_sigterm() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _running() -> int | None:
    with contextlib.suppress(FileNotFoundError, ValueError):
        pid = int(PID_FILE.read_text())
        with contextlib.suppress(psutil.Error):
            if "devstack" in " ".join(psutil.Process(pid).cmdline()):
                return pid
    return None


def _down(_: argparse.Namespace) -> int:
    pid = _running()
    if pid is None:
        print("nothing is up")
        return 0
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 60
    while _running() is not None:
        if time.monotonic() > deadline:
            return _refuse(f"process {pid} is still stopping after 60 s")
        time.sleep(0.1)
    print("stopped")
    return 0


def _kafka(_: argparse.Namespace) -> int:
    return apache.try_apache_kafka()


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise CannotStart(f"TENANT must be a UUID, not {text!r}") from None


def _token(_: argparse.Namespace) -> int:
    wanted = os.environ.get("TENANT")
    token = DevelopmentIssuer.load(HOME).token(
        _uuid(wanted) if wanted else tenant(0),
        subject=os.environ.get("SUB") or "developer",
        roles=[role.strip() for role in (os.environ.get("ROLES") or "MANAGER").split(",")],
        scope=os.environ.get("SCOPE") or EVERYTHING,
    )
    print(token)
    return 0


def _job(options: argparse.Namespace) -> int:
    """Run one cycle of a job of the running platform."""
    return _in_stack(options.service, ["job", options.name, "--once"])


def _verb(options: argparse.Namespace) -> int:
    """Run any verb of a service on the running platform."""
    return _in_stack(options.service, options.words)


def _environment_file(service: str) -> Path:
    """Return where the variables of a running platform's service are kept."""
    return HOME / f"up-{service}.json"


def _in_stack(service: str, words: list[str]) -> int:
    """Run `SERVICE WORDS` with the environment that the running platform's services have."""
    kept = _environment_file(service)
    if not kept.exists() or _running() is None:
        raise CannotStart("no platform is up; start one with `make up`")
    environment = {**os.environ, **orjson.loads(kept.read_bytes()), "PIN_LOG_LEVEL": "WARNING"}
    command = [sys.executable, "-m", service.replace("-", "_"), *words]
    return subprocess.run(command, env=environment, check=False).returncode


def _judge(_: argparse.Namespace) -> int:
    return judge.judge_contracts()


if __name__ == "__main__":
    sys.exit(main())
