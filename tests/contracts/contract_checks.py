"""What the code that publishes and consumes under the contracts must satisfy; what a contract must say by itself is
judged by `chassis.contracts`.

Each check takes what it judges as arguments and returns one sentence per breach, which names the file and the place:
the tests run it over the repository, and once over an input that breaks its rule.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, is_typeddict

from chassis import platform_events
from chassis.contracts import Contract, DeclaredMessage, every_message
from chassis.contracts.governance import context_of, place
from chassis.outbox import EventType

ROOT: Final = Path(__file__).resolve().parents[2]

TOPIC_LITERAL: Final = re.compile(r"pin\.[a-z.-]+\.v\d+")
Reader = Callable[[Mapping[str, Any]], object]


@dataclass(frozen=True)
class Publisher:
    """What one service's code publishes and reads.

    Attributes:
        service: its folder under `services`.
        module: dotted name of its `messages` module.
        constants: its EventType constants by name.
        listed: those in its `PUBLISHED`.
        payloads: its TypedDict classes by name.
        platform: the events that chassis emits in its name.
        readers: what parses each consumed message: its `CONSUMED`, by topic and type.
    """

    service: str
    module: str
    constants: Mapping[str, EventType]
    listed: Sequence[EventType]
    payloads: Mapping[str, Any]
    platform: Mapping[str, EventType]
    readers: Mapping[tuple[str, str], Reader]

    @property
    def events(self) -> dict[str, EventType]:
        """All that is sent in its name."""
        return {**self.constants, **self.platform}


def published_by(service: str, package: str) -> Publisher:
    """Return what the `messages` module of a package publishes."""
    module = importlib.import_module(f"{package}.messages")
    mine = vars(module).items()
    context = context_of(service)
    return Publisher(
        service,
        module.__name__,
        {name: value for name, value in mine if isinstance(value, EventType)},
        module.PUBLISHED,
        {name: value for name, value in mine if is_typeddict(value)},
        {make.__name__: make(context) for make in (platform_events.quarantined, platform_events.audit_recorded)},
        getattr(module, "CONSUMED", {}),
    )


# Code against contracts, both ways.


def unlisted(publisher: Publisher) -> list[str]:
    """Constants that `PUBLISHED` forgets: readiness would not ask for their topic."""
    return [
        f"{publisher.module}.{name}: not in PUBLISHED"
        for name, event in publisher.constants.items()
        if event not in publisher.listed
    ]


def undeclared(publisher: Publisher, contracts: Iterable[Contract]) -> list[str]:
    """Event types in code that no contract declares, or declares otherwise."""
    declared = {(message.topic, message.type): (contract, message) for contract, message in every_message(contracts)}
    sentences = []
    for name, event in publisher.events.items():
        where = f"{publisher.module}.{name}"
        if (event.topic, event.type) not in declared:
            sentences.append(f"{where}: no contract declares {event.type} on {event.topic}")
            continue
        contract, message = declared[event.topic, event.type]
        said = {
            "ce_source": event.source,
            "ce_aggregatetype": event.aggregate_type,
            "ce_eventclass": event.event_class,
            "ce_contractversion": str(event.contract_version),
        }
        for header, value in said.items():
            const = message.headers["properties"].get(header, {}).get("const")
            if const != value:
                sentences.append(f"{where}: {header} is {value}, {place(contract, message)} says {const}")
    return sentences


def unpublished(publishers: Iterable[Publisher], contracts: Iterable[Contract]) -> list[str]:
    """Declared messages of our own services that no code publishes."""
    known = {publisher.service: {(e.topic, e.type) for e in publisher.events.values()} for publisher in publishers}
    return [
        f"{place(contract, message)}: {producer} publishes no {message.type} on {message.topic}"
        for contract, message in every_message(contracts)
        if (producer := message.governance.get("producer")) in known
        and (message.topic, message.type) not in known[producer]
    ]


def unproduced(service: str, produced: Iterable[tuple[str, str]], contracts: Iterable[Contract]) -> list[str]:
    """Declared messages of a service that its story didn't produce, and produced ones that no contract declares."""
    made, wanted = set(produced), {}
    for contract, message in every_message(contracts):
        if message.governance.get("producer") == service:
            wanted[message.topic, message.type] = place(contract, message)
    return [
        *(f"{wanted[one]}: no test produces it" for one in wanted if one not in made),
        *(f"{kind} on {topic}: produced, and no contract declares it" for topic, kind in sorted(made - wanted.keys())),
    ]


def unread(services: Iterable[Publisher], contracts: Iterable[Contract]) -> list[str]:
    """Messages of a channel that names a service of ours as consumer, and examples that its code doesn't parse."""
    known = {publisher.service: publisher.readers for publisher in services}
    sentences = []
    for contract, message in every_message(contracts):
        for consumer in known.keys() & set(message.governance.get("consumers", [])):
            reader = known[consumer].get((message.topic, message.type))
            if reader is None:
                sentences.append(f"{place(contract, message)}: {consumer} reads no {message.type}")
                continue
            sentences += [
                f"{place(contract, message)}: {consumer} can't parse the example {example['name']}: {error}"
                for example in message.examples
                if (error := _refusal(reader, example["payload"])) is not None
            ]
    return sentences


def _refusal(reader: Reader, payload: Mapping[str, Any]) -> str | None:
    try:
        reader(payload)
    except (ValueError, TypeError, LookupError) as error:
        return f"{type(error).__name__} {error}"
    return None


def payload_drift(payload: Any, contract: Contract, message: DeclaredMessage) -> list[str]:
    """Fields that only one of a producer's TypedDict and the declared payload has, or requires."""
    declared, required = set(message.payload.get("properties", {})), set(message.payload.get("required", []))
    have, always = set(payload.__annotations__), set(payload.__required_keys__)
    where, class_name = place(contract, message), payload.__name__
    return [
        *(f"{where}: {field} is not in {class_name}" for field in sorted(declared - have)),
        *(f"{where}: {field} of {class_name} is not declared" for field in sorted(have - declared)),
        *(
            f"{where}: {field} is required on one side only ({class_name})"
            for field in sorted((required ^ always) & declared & have)
        ),
    ]


def contract_named(contracts: Iterable[Contract], name: str) -> Contract:
    """Return the contract of one service."""
    return next(contract for contract in contracts if contract.name == name)


def undeclared_topics(sources: Mapping[str, str], contracts: Iterable[Contract]) -> list[str]:
    """Topic names in source text (file name -> text) that no contract declares."""
    declared = {channel.get("address") for contract in contracts for channel in contract.channels.values()}
    return [
        f"{name}:{number}: no contract declares {topic}"
        for name, text in sources.items()
        for number, line in enumerate(text.splitlines(), 1)
        for topic in TOPIC_LITERAL.findall(line)
        if topic not in declared
    ]


def free_text_fields(message: DeclaredMessage) -> list[str]:
    """Payload fields that could hold more than ids, enumerations, instants, numbers and flags."""

    def bound(schema: Mapping[str, Any]) -> bool:
        if "oneOf" in schema:
            return all(bound(part) for part in schema["oneOf"])
        return "enum" in schema or schema.get("format") in {"uuid", "date-time"} or schema.get("type") != "string"

    return [name for name, schema in message.payload["properties"].items() if not bound(schema)]


def edited(contract: Contract, path: Sequence[str], value: Any) -> Contract:
    """Return a copy of a contract with one place set to `value`, or removed where `value` is `...`."""
    changed = copy(contract)
    changed.document = json.loads(json.dumps(contract.document))
    changed.channels = changed.document["channels"]
    place: Any = changed.document
    for step in path[:-1]:
        place = place[int(step) if isinstance(place, list) else step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = deepcopy(value)
    return changed
