"""Reads the AsyncAPI files: what topics exist, how they are configured, and what may be sent on them.

A part that can't be read is refused with the file and the place; nothing is guessed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from chassis.messaging import TopicSpec

_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where the package brings it: ten times as fast, and a service reads its contract when it starts."""
SUFFIX: Final = ".asyncapi.yaml"


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
            self.document: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), _LOADER)  # noqa: S506 - a safe loader
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ContractInvalid(f"{path.name}: {error}") from error
        channels = self.document.get("channels") if isinstance(self.document, dict) else None
        if not isinstance(channels, dict) or not all(isinstance(channel, dict) for channel in channels.values()):
            raise ContractInvalid(f"{path.name}: no map of channels")
        self.channels: dict[str, dict[str, Any]] = channels

    @property
    def name(self) -> str:
        """The file's name without its ending: the service, or `external`."""
        return self.path.name.removesuffix(SUFFIX)

    @property
    def version(self) -> str:
        """`info.version`, or an empty text."""
        info = self.document.get("info")
        return str(info.get("version", "")) if isinstance(info, dict) else ""

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
    contracts = [Contract(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    if not contracts:
        raise ContractInvalid(f"no *.asyncapi.yaml in {folder}")
    return contracts


def contract_of(package_file: str) -> Path:
    """Return the contract of a service package, in `contracts` beside its `services` in the checkout.

    Args:
        package_file: `__file__` of the service's package.

    Raises:
        FileNotFoundError: it isn't there.
    """
    service = Path(package_file).resolve().parents[2]
    path = service.parents[1] / "contracts" / f"{service.name}{SUFFIX}"
    if not path.is_file():
        raise FileNotFoundError(f"no contract {path}")
    return path


def every_message(contracts: Iterable[Contract]) -> Iterator[tuple[Contract, DeclaredMessage]]:
    """Yield each declared message with its contract."""
    for contract in contracts:
        for message in contract.messages():
            yield contract, message
