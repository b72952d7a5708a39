"""Who may do what on Kafka, from the same files as the topics: a service writes its own topics and reads what it is
named a consumer of, within its own consumer groups, and nothing else.

Principals are `User:<service>`; a cluster that names them otherwise (a certificate's subject) maps them itself.
"""

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from chassis.contracts.governance import context_of
from chassis.contracts.reader import Contract

DEPLOYER: Final = "topics"
"""The principal of the deploy step that creates topics and reports drift."""


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission.

    Attributes:
        principal: `User:<name>`.
        operation: Kafka's word: Write, Read, Describe, ...
        resource: topic, group or cluster.
        name: the resource's name.
        prefixed: whether `name` is the beginning of names.
    """

    principal: str
    operation: str
    resource: str
    name: str
    prefixed: bool = False

    def command(self) -> str:
        """Return the arguments for `kafka-acls.sh` that grant it."""
        words = ["--add", "--allow-principal", self.principal, "--operation", self.operation]
        words += ["--cluster"] if self.resource == "cluster" else [f"--{self.resource}", self.name]
        if self.prefixed:
            words += ["--resource-pattern-type", "prefixed"]
        return shlex.join(words)


def acls(contracts: Iterable[Contract]) -> list[Acl]:
    """Return the permissions that the contracts imply, sorted and each once."""
    found = set(_deployer())
    for contract in contracts:
        for channel in contract.channels.values():
            found |= _of_channel(channel)
    return sorted(found)


def as_commands(permissions: Sequence[Acl], bootstrap: str, client_file: str | None = None) -> str:
    """Return a shell script of `kafka-acls.sh` commands (idempotent: a permission that exists stays one).

    Args:
        permissions: what to grant.
        bootstrap: `host:port` of the cluster.
        client_file: properties with which the tool reaches it (TLS, user and password: never on a command line).
    """
    tool = ["kafka-acls.sh", "--bootstrap-server", bootstrap]
    tool += ["--command-config", client_file] if client_file else []
    return "".join(f"{shlex.join(tool)} {one.command()}\n" for one in permissions)


def as_json(permissions: Sequence[Acl]) -> str:
    """Return the permissions as a JSON list."""
    return json.dumps([asdict(one) for one in permissions], indent=2) + "\n"


def _of_channel(channel: dict[str, Any]) -> set[Acl]:
    topic, governance = str(channel["address"]), channel.get("x-governance") or {}
    producer = f"User:{governance['producer']}"
    found = {
        Acl(producer, "Write", "topic", topic),
        Acl(producer, "Describe", "topic", topic),
        Acl(producer, "IdempotentWrite", "cluster", "kafka-cluster"),
    }
    for consumer in governance.get("consumers", []):
        found |= {
            Acl(f"User:{consumer}", "Read", "topic", topic),
            Acl(f"User:{consumer}", "Describe", "topic", topic),
            Acl(f"User:{consumer}", "Read", "group", f"pin.{context_of(consumer)}.", prefixed=True),
        }
    return found


def _deployer() -> Iterable[Acl]:
    for operation in ("Create", "Describe", "DescribeConfigs"):
        yield Acl(f"User:{DEPLOYER}", operation, "topic", "pin.", prefixed=True)
    for operation in ("Describe", "DescribeConfigs"):
        yield Acl(f"User:{DEPLOYER}", operation, "cluster", "kafka-cluster")
