"""Reads the AsyncAPI files: what topics exist, how they are configured, and what may be sent on them.

Topics are created from their contract's Kafka bindings and from nothing else: `python -m chassis.contracts --help`.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from chassis.messaging import BrokerUnavailable, KafkaAddress, TopicSpec, create_topics, read_topics

LOOKS: Final = 200
"""How often a broker is asked, each 0.05 s, to show a topic whose creation it has acknowledged."""


class ContractInvalid(ValueError):
    """A contract file that can't be read; the text names the file and the place."""


@dataclass(frozen=True, slots=True)
class DeclaredMessage:
    """One message of a channel.

    Attributes:
        topic: the channel's address.
        type: `ce_type`.
        name: the AsyncAPI message's name.
        payload: JSON Schema of the record's value.
        headers: JSON Schema of the record's headers.
        examples: declared examples, each `{"name", "headers", "payload"}`.
        governance: the channel's `x-governance`.
    """

    topic: str
    type: str
    name: str
    payload: dict[str, Any]
    headers: dict[str, Any]
    examples: list[dict[str, Any]]
    governance: dict[str, Any]


class Contract:
    """One AsyncAPI 3 document.

    Args:
        path: the file.

    Raises:
        ContractInvalid: not readable as a contract.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ContractInvalid(f"{path.name}: {error}") from error
        channels = self.document.get("channels") if isinstance(self.document, dict) else None
        if not isinstance(channels, dict) or not all(isinstance(channel, dict) for channel in channels.values()):
            raise ContractInvalid(f"{path.name}: no map of channels")
        self.channels: dict[str, dict[str, Any]] = channels

    def topics(self, *, replicas: int | None = None) -> list[TopicSpec]:
        """Return the topics that the channels' Kafka bindings describe.

        Args:
            replicas: replication factor to use in place of the declared one (a single-node development broker).

        Raises:
            ContractInvalid: a channel has no complete Kafka binding.
        """
        return [self._topic(name, channel, replicas) for name, channel in self.channels.items()]

    def messages(self) -> Iterator[DeclaredMessage]:
        """Yield every message of every channel with its references resolved.

        Raises:
            ContractInvalid: a reference leads nowhere, or a part that every message has is missing.
        """
        for name, channel in self.channels.items():
            try:
                for reference in channel["messages"].values():
                    yield self._message(channel, self.resolve(reference))
            except KeyError as error:
                raise ContractInvalid(f"{self.path.name}: channel {name}: a message lacks {error}") from error
            except (TypeError, AttributeError, RecursionError) as error:
                raise ContractInvalid(f"{self.path.name}: channel {name}: a message is malformed: {error}") from error

    def resolve(self, node: Any) -> Any:
        """Follow a `$ref` within the document (or return the node itself)."""
        passed: set[str] = set()
        while isinstance(node, dict) and "$ref" in node:
            if node["$ref"] in passed:
                raise ContractInvalid(f"{self.path.name}: {node['$ref']} leads to itself")
            passed.add(node["$ref"])
            target: Any = self.document
            for part in node["$ref"].removeprefix("#/").split("/"):
                try:
                    target = target[part]
                except (KeyError, TypeError) as error:
                    raise ContractInvalid(f"{self.path.name}: {node['$ref']} leads nowhere") from error
            node = target
        return node

    def inlined(self, node: Any) -> Any:
        """Return a schema with all references of the document replaced by what they name."""
        node = self.resolve(node)
        if isinstance(node, dict):
            return {key: self.inlined(value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.inlined(value) for value in node]
        return node

    def _message(self, channel: dict[str, Any], message: dict[str, Any]) -> DeclaredMessage:
        headers = self._merged(self.resolve(message["headers"]))
        return DeclaredMessage(
            topic=channel["address"],
            type=str(headers["properties"]["ce_type"]["const"]),
            name=message["name"],
            payload=self.inlined(message["payload"]),
            headers=headers,
            examples=message.get("examples", []),
            governance=channel.get("x-governance", {}),
        )

    def _topic(self, name: str, channel: dict[str, Any], replicas: int | None) -> TopicSpec:
        try:
            binding = channel["bindings"]["kafka"]
            config = {key: str(value).lower() if isinstance(value, bool) else str(value)
                      for key, value in binding.get("topicConfiguration", {}).items()}  # fmt: skip
            if isinstance(policy := binding.get("topicConfiguration", {}).get("cleanup.policy"), list):
                config["cleanup.policy"] = ",".join(policy)
            if replicas is not None:
                config.pop("min.insync.replicas", None)
            return TopicSpec(
                str(channel["address"]), int(binding["partitions"]), replicas or int(binding["replicas"]), config
            )
        except KeyError as error:
            raise ContractInvalid(f"{self.path.name}: channel {name} lacks {error}") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise ContractInvalid(
                f"{self.path.name}: channel {name}: its Kafka binding is malformed: {error}"
            ) from error

    def _merged(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return an object schema with the parts of its `allOf` written into one."""
        merged: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
        for part in [*(self._merged(self.resolve(part)) for part in schema.get("allOf", [])), self.inlined(schema)]:
            merged["properties"] |= part.get("properties", {})
            merged["required"] += [name for name in part.get("required", []) if name not in merged["required"]]
        return merged


def load_contracts(folder: Path) -> list[Contract]:
    """Return the contracts of a folder, by file name.

    Raises:
        ContractInvalid: there is none, or one can't be read.
    """
    contracts = [Contract(path) for path in sorted(folder.glob("*.asyncapi.yaml"))]
    if not contracts:
        raise ContractInvalid(f"no *.asyncapi.yaml in {folder}")
    return contracts


def drift(declared: Sequence[TopicSpec], existing: dict[str, int]) -> list[str]:
    """Return one sentence per declared topic that the broker lacks or has with another partition count."""
    sentences = []
    for spec in declared:
        have = existing.get(spec.name)
        if have is None:
            sentences.append(f"{spec.name}: missing")
        elif have != spec.partitions:
            sentences.append(f"{spec.name}: {have} partitions, the contract says {spec.partitions}")
    return sentences


async def ensure_topics(contracts: Path, address: KafkaAddress, *, replicas: int | None) -> tuple[list[str], list[str]]:
    """Create the declared topics that don't exist.

    Returns:
        The names created, and sentences about topics that differ from their contract.

    Raises:
        ContractInvalid: a contract can't be read.
        BrokerUnavailable: no broker answers.
    """
    declared = [spec for contract in load_contracts(contracts) for spec in contract.topics(replicas=replicas)]
    created = await create_topics(address, declared)
    return created, drift(declared, await _topics_with(created, address))


async def _topics_with(created: Sequence[str], address: KafkaAddress) -> dict[str, int]:
    """Return the broker's topics once the created ones are among them: its metadata follows a creation with a delay."""
    existing = await read_topics(address)
    for _ in range(LOOKS):
        if existing.keys() >= set(created):
            break
        await asyncio.sleep(0.05)
        existing = await read_topics(address)
    return existing


def main(arguments: Sequence[str] | None = None) -> int:
    """Create topics from contracts and report drift; the exit status is 1 when something differs."""
    parser = argparse.ArgumentParser(prog="python -m chassis.contracts", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="folder of *.asyncapi.yaml")
    parser.add_argument("--bootstrap", required=True, help="host:port of a broker")
    parser.add_argument("--security", choices=["plaintext", "ssl"], default="plaintext")
    parser.add_argument("--replicas", type=int, help="replication factor in place of the declared one")
    options = parser.parse_args(arguments)
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # what it warns of is in the error below
    try:
        created, differences = asyncio.run(
            ensure_topics(options.folder, KafkaAddress(options.bootstrap, options.security), replicas=options.replicas)
        )
    except (ContractInvalid, BrokerUnavailable) as error:
        print(f"topics: {error}", file=sys.stderr)
        return 2
    for name in created:
        print(f"created {name}")
    for sentence in differences:
        print(f"drift   {sentence}")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
