"""Topics are created from their contract's Kafka bindings and from nothing else, and whatever differs is told.

Nothing is changed on a topic that exists: partition counts are fixed at birth, and a shorter retention deletes records.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from chassis.contracts.reader import Contract, load_contracts
from chassis.messaging import KafkaAddress, TopicSpec, auto_creates_topics, create_topics, describe_topics

LOOKS: Final = 200
"""How often a broker is asked, each 0.05 s, to show a topic whose creation it has acknowledged."""

PREFIX: Final = "pin."
COMPARED: Final = ("retention.ms", "cleanup.policy", "min.insync.replicas", "max.message.bytes")
"""The settings on which a topic's guarantees rest: asked of the broker and compared."""


def drift(declared: Sequence[TopicSpec], existing: Mapping[str, TopicSpec]) -> list[str]:
    """Return one sentence per declared topic that the broker lacks, and per partition count, replication factor or
    setting in which it differs from its contract."""
    return [sentence for spec in declared for sentence in _differences(spec, existing.get(spec.name))]


def undeclared(declared: Sequence[TopicSpec], existing: Iterable[str]) -> list[str]:
    """Return the broker's topics of the platform that no contract declares: a queue that nobody answers for."""
    known = {spec.name for spec in declared}
    return sorted(name for name in existing if name.startswith(PREFIX) and name not in known)


def declared_topics(contracts: Iterable[Contract], *, replicas: int | None) -> list[TopicSpec]:
    """Return the topics of several contracts."""
    return [spec for contract in contracts for spec in contract.topics(replicas=replicas)]


async def ensure_topics(contracts: Path, address: KafkaAddress, *, replicas: int | None) -> tuple[list[str], list[str]]:
    """Create the declared topics that don't exist.

    Returns:
        The names created, and sentences about topics that differ from their contract.

    Raises:
        ContractInvalid: a contract can't be read.
        BrokerUnavailable: no broker answers.
    """
    declared = declared_topics(load_contracts(contracts), replicas=replicas)
    created = await create_topics(address, declared)
    return created, drift(declared, await _topics_with(created, address))


async def broker_findings(contracts: Path, address: KafkaAddress) -> list[str]:
    """Return sentences about a broker that no contract covers: undeclared topics, and auto-creation left on.

    Raises:
        ContractInvalid: a contract can't be read.
        BrokerUnavailable: no broker answers.
    """
    declared = declared_topics(load_contracts(contracts), replicas=None)
    found = [f"{name}: no contract declares it" for name in undeclared(declared, await describe_topics(address, ()))]
    if await auto_creates_topics(address):
        found.append("auto.create.topics.enable is true: a misspelt name makes a topic")
    return found


def _differences(spec: TopicSpec, have: TopicSpec | None) -> list[str]:
    if have is None:
        return [f"{spec.name}: missing"]
    sentences = []
    if have.partitions != spec.partitions:
        sentences.append(f"{spec.name}: {have.partitions} partitions, the contract says {spec.partitions}")
    if have.replicas != spec.replicas:
        sentences.append(f"{spec.name}: {have.replicas} replicas, the contract says {spec.replicas}")
    return sentences + [
        f"{spec.name}: {name} {found}, the contract says {wanted}"
        for name, wanted in spec.config.items()
        if name in COMPARED and (found := have.config.get(name)) is not None and _parts(found) != _parts(wanted)
    ]


def _parts(value: str) -> list[str]:
    return sorted(part.strip() for part in value.split(","))


async def _topics_with(created: Sequence[str], address: KafkaAddress) -> dict[str, TopicSpec]:
    """Return the broker's topics once the created ones are among them: its metadata follows a creation with a delay."""
    existing = await describe_topics(address, COMPARED)
    for _ in range(LOOKS):
        if existing.keys() >= set(created):
            break
        await asyncio.sleep(0.05)
        existing = await describe_topics(address, COMPARED)
    return existing
