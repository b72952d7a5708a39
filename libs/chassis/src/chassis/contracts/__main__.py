"""`python -m chassis.contracts`: what is done with the contract files, at a desk, in CI and at deploy time."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from pydantic import ValidationError

from chassis.contracts import acl, queues
from chassis.contracts.governance import ALONE, topics_declared_twice, unequal_partitions
from chassis.contracts.reader import ContractInvalid, load_contracts
from chassis.contracts.releases import (
    ReleaseRefused,
    bad_examples,
    broken_promises,
    lost_contracts,
    release,
    tampered,
    unreadable_records,
)
from chassis.contracts.topics import broker_findings, ensure_topics
from chassis.contracts.windows import window_gaps
from chassis.kafka_settings import KafkaSettings
from chassis.messaging import BrokerUnavailable, KafkaAddress
from chassis.settings import SettingsInvalid, explain_invalid


def findings(folder: Path, on: date) -> list[str]:
    """Return every breach of the rules for contract files: governance, examples, evolution, old records.

    Args:
        folder: the folder of contracts.
        on: the day of the judgement: a channel may go after its successor's compatibility window.

    Raises:
        ContractInvalid: a file can't be read.
    """
    contracts = load_contracts(folder)
    return [
        *(sentence for contract in contracts for check in (*ALONE, bad_examples) for sentence in check(contract)),
        *topics_declared_twice(contracts),
        *unequal_partitions(contracts),
        *window_gaps(contracts),
        *(sentence for contract in contracts for sentence in broken_promises(contract, folder, on)),
        *lost_contracts(contracts, folder),
        *unreadable_records(contracts, folder),
        *tampered(folder),
        *queues.stale(folder, contracts),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; 0 is good, 1 says that something differs or is refused, 2 that it could not be done."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except (ContractInvalid, BrokerUnavailable, SettingsInvalid) as error:
        print(f"{options.verb}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chassis.contracts", description=main.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    topics = _verb(verbs, "topics", _topics, "create the topics that don't exist and report drift")
    topics.add_argument("--bootstrap", help="host:port of a broker; the rest of how to reach it is PIN_KAFKA_...")
    topics.add_argument("--replicas", type=int, help="replication factor in place of the declared one")
    checked = _verb(verbs, "check", _check, "governance, examples, evolution and golden records of all contracts")
    kept = _verb(verbs, "release", _release, "keep a contract's version for ever; refuses a breaking change")
    kept.add_argument("name", help="the contract: the file's name without .asyncapi.yaml")
    for judged in (checked, kept):
        text = "today, YYYY-MM-DD; without it no compatibility window has passed yet"
        judged.add_argument("--on", type=date.fromisoformat, default=date.min, help=text)
    permissions = _verb(verbs, "acls", _acls, "print the Kafka permissions that the contracts imply")
    permissions.add_argument("--format", choices=["commands", "json"], default="commands")
    permissions.add_argument("--bootstrap", help="for the commands; without it PIN_KAFKA_BOOTSTRAP")
    permissions.add_argument("--command-config", help="client properties (TLS, password) for the commands")
    _verb(verbs, "queues", _queues, f"write {queues.PAGE}")
    return parser


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.add_argument("folder", type=Path, help="folder of *.asyncapi.yaml")
    parser.set_defaults(run=run)
    return parser


def _topics(options: argparse.Namespace) -> int:
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # what it warns of is in the error's text
    created, differences, noticed = asyncio.run(_make(options))
    for name in created:
        print(f"created {name}")
    for sentence in differences:
        print(f"drift   {sentence}")
    for sentence in noticed:
        print(f"notice  {sentence}")
    return 1 if differences else 0


async def _make(options: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    address = _address(options)
    created, differences = await ensure_topics(options.folder, address, replicas=options.replicas)
    return created, differences, await broker_findings(options.folder, address)


def _address(options: argparse.Namespace) -> KafkaAddress:
    """Return where Kafka is as the environment says it; --bootstrap wins over PIN_KAFKA_BOOTSTRAP."""
    given = {"kafka_bootstrap": options.bootstrap} if options.bootstrap else {}
    try:
        return KafkaSettings(**given).kafka
    except ValidationError as error:
        raise explain_invalid(error) from None


def _check(options: argparse.Namespace) -> int:
    found = findings(options.folder, options.on)
    for sentence in found:
        print(sentence)
    print(f"contracts: {len(found)} breaches" if found else "contracts: governance, evolution and old records are good")
    return 1 if found else 0


def _release(options: argparse.Namespace) -> int:
    try:
        written = release(options.folder, options.name, options.on)
    except ReleaseRefused as refused:
        print(refused, file=sys.stderr)
        return 1
    for path in written:
        print(f"released {path.relative_to(options.folder)}")
    return 0


def _acls(options: argparse.Namespace) -> int:
    permissions = acl.acls(load_contracts(options.folder))
    if options.format == "json":
        print(acl.as_json(permissions), end="")
    else:
        bootstrap = options.bootstrap or os.environ.get("PIN_KAFKA_BOOTSTRAP") or "localhost:9092"
        print(acl.as_commands(permissions, bootstrap, options.command_config), end="")
    return 0


def _queues(options: argparse.Namespace) -> int:
    contracts = load_contracts(options.folder)
    (options.folder / queues.PAGE).write_text(queues.page(contracts), encoding="utf-8")
    print(f"{options.folder / queues.PAGE}: {sum(len(contract.channels) for contract in contracts)} topics")
    return 0


if __name__ == "__main__":
    sys.exit(main())
