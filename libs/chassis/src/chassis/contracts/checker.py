"""What is emitted keeps to its contract: judged in the transaction that emits, before anything is written.

Validators are compiled once per message type. Objects are closed: a field that the contract doesn't declare is a
breach, so that nothing leaves a service by accident. The text of a breach names places and rules, never values.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import jsonschema_rs
import orjson

from chassis.contracts.reader import Contract, DeclaredMessage, every_message

MOST_TOLD: Final = 5


class ContractBreach(ValueError):
    """A message that its contract doesn't allow; the text names type and place, never a value."""


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than the declared ones."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else inner


class ContractChecker:
    """Judges messages by the schemas of their contracts.

    Args:
        contracts: the contracts under which a service publishes.

    Raises:
        ContractInvalid: a contract can't be read.
    """

    def __init__(self, contracts: Iterable[Contract]) -> None:
        self._judges = {(message.topic, message.type): _Judge(message) for _, message in every_message(contracts)}

    @classmethod
    def of(cls, path: Path) -> Self:
        """Return the checker of one contract file (see `contract_of`)."""
        return cls([Contract(path)])

    def check(self, topic: str, type: str, headers: Mapping[str, str], payload: bytes | Mapping[str, Any]) -> None:  # noqa: A002 - the word of CloudEvents
        """Judge one message.

        Args:
            topic: where it goes.
            type: `ce_type`.
            headers: all headers, as text.
            payload: the encoded record value, or its parsed form (JSON types only).

        Raises:
            ContractBreach: no contract declares the type on that topic, or headers or payload break its schemas.
        """
        judge = self._judges.get((topic, type))
        if judge is None:
            raise ContractBreach(f"{type}: no contract declares it on {topic}")
        try:
            value = orjson.loads(payload) if isinstance(payload, bytes) else payload
        except orjson.JSONDecodeError:
            raise ContractBreach(
                f"{type} on {topic} breaks its contract: payload: not JSON"
            ) from None  # it has the text
        if found := judge.breaches(headers, value):
            raise ContractBreach(f"{type} on {topic} breaks its contract: {'; '.join(found[:MOST_TOLD])}")


class _Judge:
    """The compiled validators of one message type."""

    def __init__(self, message: DeclaredMessage) -> None:
        self._headers = jsonschema_rs.Draft202012Validator(closed(message.headers), validate_formats=True)
        self._payload = jsonschema_rs.Draft202012Validator(closed(message.payload), validate_formats=True)

    def breaches(self, headers: Mapping[str, str], payload: Any) -> list[str]:
        """Return `part.place: rule` per breach."""
        parts = (("headers", self._headers, headers), ("payload", self._payload, payload))
        return [
            _told(part, error)
            for part, validator, value in parts
            if not validator.is_valid(value)
            for error in validator.iter_errors(value)
        ]


def _told(part: str, error: jsonschema_rs.ValidationError) -> str:
    place = "".join(f".{step}" for step in (part, *error.instance_path)).removeprefix(".")
    rule = str(error.schema_path[-1]) if error.schema_path else "schema"
    missing = getattr(error.kind, "property", None) if rule == "required" else None
    return f"{place}: {rule}" if missing is None else f"{place}: {missing} is missing"
