"""What every contract, and the code that publishes under it, must satisfy.

Each check takes what it judges as arguments and returns one sentence per breach, which names the file and the place:
the tests run it over the repository, and once over an input that breaks its rule.
"""

import importlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, is_typeddict

import jsonschema_rs

from chassis.contracts import Contract, DeclaredMessage
from chassis.outbox import EventType

ROOT: Final = Path(__file__).resolve().parents[2]

GOVERNANCE: Final = (
    "producer", "consumers", "queue_class", "event_class", "contour", "idempotency_key", "retention", "retry_policy",
    "poison_rule", "operator_action",
)  # fmt: skip
QUEUE_CLASSES: Final = {"durable-work", "event-stream", "delay", "dead-letter"}
EVENT_CLASSES: Final = {"domain", "analytical", "saga", "audit", "security", "operational", "compliance"}
LOSSLESS: Final = EVENT_CLASSES - {"analytical"}
PER_ENTITY_ORDER: Final = {"domain", "saga"}
SEVEN_YEARS: Final = {"audit", "security", "compliance"}
ORIGINS: Final = {"source", "assumed"}
CONTEXTS: Final = {"ops-queue": "ops"}
"""Services whose context token is not their name."""

TOPIC: Final = re.compile(r"pin\.(?P<context>[a-z][a-z0-9-]*)\.[a-z][a-z0-9-]*\.v[1-9][0-9]*")
TOPIC_LITERAL: Final = re.compile(r"pin\.[a-z.-]+\.v\d+")
DURATION: Final = re.compile(r"P(?=\d)(?:(?P<years>\d+)Y)?(?:(?P<months>\d+)M)?(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?")
WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
PERSONAL_OR_MONEY: Final = {
    "account", "address", "amount", "birth", "birthday", "card", "cost", "email", "escrow", "fee", "fio", "firstname",
    "fullname", "iban", "inn", "lastname", "mail", "mobile", "money", "name", "names", "passport", "patronymic",
    "person", "phone", "price", "salary", "snils", "sum", "sums", "surname", "total", "username",
}  # fmt: skip

Check = Callable[[Contract], list[str]]


@dataclass(frozen=True)
class Publisher:
    """What one service's code publishes.

    Attributes:
        service: its folder under `services`.
        module: dotted name of its `messages` module.
        constants: its EventType constants by name.
        listed: those in its `PUBLISHED`.
        payloads: its TypedDict classes by name.
    """

    service: str
    module: str
    constants: Mapping[str, EventType]
    listed: Sequence[EventType]
    payloads: Mapping[str, Any]


def published_by(service: str, package: str) -> Publisher:
    """Return what the `messages` module of a package publishes."""
    module = importlib.import_module(f"{package}.messages")
    mine = vars(module).items()
    return Publisher(
        service,
        module.__name__,
        {name: value for name, value in mine if isinstance(value, EventType)},
        module.PUBLISHED,
        {name: value for name, value in mine if is_typeddict(value)},
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
    for name, event in publisher.constants.items():
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
                sentences.append(f"{where}: {header} is {value}, {_place(contract, message)} says {const}")
    return sentences


def unpublished(publishers: Iterable[Publisher], contracts: Iterable[Contract]) -> list[str]:
    """Declared messages of our own services that no code publishes."""
    known = {publisher.service: {(e.topic, e.type) for e in publisher.constants.values()} for publisher in publishers}
    return [
        f"{_place(contract, message)}: {producer} publishes no {message.type} on {message.topic}"
        for contract, message in every_message(contracts)
        if (producer := message.governance.get("producer")) in known
        and (message.topic, message.type) not in known[producer]
    ]


def payload_drift(payload: Any, contract: Contract, message: DeclaredMessage) -> list[str]:
    """Fields that only one of a producer's TypedDict and the declared payload has, or requires."""
    declared, required = set(message.payload.get("properties", {})), set(message.payload.get("required", []))
    have, always = set(payload.__annotations__), set(payload.__required_keys__)
    where, class_name = _place(contract, message), payload.__name__
    return [
        *(f"{where}: {field} is not in {class_name}" for field in sorted(declared - have)),
        *(f"{where}: {field} of {class_name} is not declared" for field in sorted(have - declared)),
        *(
            f"{where}: {field} is required on one side only ({class_name})"
            for field in sorted((required ^ always) & declared & have)
        ),
    ]


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


# Records and examples.


def breaches(message: DeclaredMessage, headers: Mapping[str, Any], payload: Any) -> list[str]:
    """Where a record leaves its schemas; a field or header that is not declared is a breach too."""
    return [
        f"{part}{''.join(f'.{step}' for step in error.instance_path)}: {error.message}"
        for part, schema, value in (("headers", message.headers, dict(headers)), ("payload", message.payload, payload))
        for error in jsonschema_rs.Draft202012Validator(closed(schema), validate_formats=True).iter_errors(value)
    ]


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other properties than the declared ones."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {**inner, "additionalProperties": False} if isinstance(schema.get("properties"), dict) else inner


def bad_examples(contract: Contract) -> list[str]:
    """Messages without an example, and examples that their own schemas refuse."""
    sentences = []
    for message in contract.messages():
        where = _place(contract, message)
        if not message.examples:
            sentences.append(f"{where}: no example")
        for example in message.examples:
            found = breaches(message, example.get("headers", {}), example.get("payload"))
            sentences += [f"{where}: example {example.get('name')}: {breach}" for breach in found]
    return sentences


# One contract by itself.


def governance_gaps(contract: Contract) -> list[str]:
    """Channels whose `x-governance` is not complete or not in the words of the registry."""
    sentences = []
    for where, channel in _channels(contract):
        governance = channel.get("x-governance") or {}
        sentences += [f"{where}: x-governance lacks {name}" for name in GOVERNANCE if not governance.get(name)]
        for name, allowed in (("queue_class", QUEUE_CLASSES), ("event_class", EVENT_CLASSES)):
            if governance.get(name) and governance[name] not in allowed:
                sentences.append(f"{where}: {name} {governance[name]} is none of {', '.join(sorted(allowed))}")
        consumers = governance.get("consumers")
        if consumers and (not isinstance(consumers, list) or len(set(consumers)) < len(consumers)):
            sentences.append(f"{where}: consumers must be a list of different names")
        sentences += [
            f"{where}: retention.{part} {value} is no ISO 8601 duration"
            for part in ("topic", "log")
            if days(value := _retention(channel, part)) is None
        ]
    return sentences


def binding_gaps(contract: Contract) -> list[str]:
    """Channels from whose Kafka bindings no topic, or a topic of another life than promised, would be made."""
    sentences = []
    for where, channel in _channels(contract):
        binding = (channel.get("bindings") or {}).get("kafka") or {}
        config = binding.get("topicConfiguration") or {}
        policy = config.get("cleanup.policy")
        promised = days(_retention(channel, "topic"))
        if binding.get("topic") != channel.get("address"):
            sentences.append(f"{where}: bindings.kafka.topic {binding.get('topic')} is not the address")
        sentences += [
            f"{where}: bindings.kafka.{name} must be a whole number of 1 or more"
            for name in ("partitions", "replicas")
            if type(binding.get(name)) is not int or binding[name] < 1
        ]
        if not isinstance(policy, list) or not policy or set(policy) - {"delete", "compact"}:
            sentences.append(f"{where}: cleanup.policy must list delete or compact")
        elif "delete" in policy and (promised is None or config.get("retention.ms") != promised * 86_400_000):
            sentences.append(f"{where}: retention.ms {config.get('retention.ms')} is not retention.topic")
    return sentences


def broken_guarantees(contract: Contract) -> list[str]:
    """Channels whose settings break what their event class promises."""
    sentences = []
    for where, channel in _channels(contract):
        governance = channel.get("x-governance") or {}
        binding = (channel.get("bindings") or {}).get("kafka") or {}
        config = binding.get("topicConfiguration") or {}
        kind = governance.get("event_class")
        acknowledging = config.get("min.insync.replicas", 1)
        if kind in LOSSLESS and not 2 <= acknowledging < binding.get("replicas", 1):
            sentences.append(
                f"{where}: {kind} events need min.insync.replicas of 2 or more and more replicas than that"
            )
        if kind in PER_ENTITY_ORDER and not channel.get("x-message-key"):
            sentences.append(f"{where}: {kind} events are ordered per entity, but x-message-key names no field")
        if kind in SEVEN_YEARS and (days(_retention(channel, "log")) or 0) < 7 * 365:
            sentences.append(f"{where}: {kind} events stay in the log for 7 years")
        if kind in SEVEN_YEARS and "compact" in (config.get("cleanup.policy") or []):
            sentences.append(f"{where}: {kind} events are never compacted")
    return sentences


def misnamed(contract: Contract) -> list[str]:
    """Topics, sources and origins that are not in the project's grammar."""
    sentences = []
    for where, channel in _channels(contract):
        address = str(channel.get("address"))
        parts = TOPIC.fullmatch(address)
        if parts is None:
            sentences.append(f"{where}: {address} is not pin.<context>.<event>.v<major>")
            continue
        producer = str((channel.get("x-governance") or {}).get("producer"))
        if CONTEXTS.get(producer, producer) != parts["context"]:
            sentences.append(f"{where}: {address} is not in the context of its producer {producer}")
        if channel.get("x-origin") not in ORIGINS:
            sentences.append(f"{where}: x-origin must be source or assumed")
        sentences += [
            f"{where}: message {message.get('name')}: x-origin must be source or assumed"
            for message in map(contract.resolve, channel.get("messages", {}).values())
            if message.get("x-origin") not in ORIGINS
        ]
    return sentences


def envelope_gaps(contract: Contract) -> list[str]:
    """Messages whose headers don't follow from their channel, or whose key is not a field that every payload has."""
    sentences = []
    for where, channel in _channels(contract):
        parts = TOPIC.fullmatch(str(channel.get("address")))
        context = parts["context"] if parts else ""
        key = channel.get("x-message-key")
        for message in map(contract.resolve, channel.get("messages", {}).values()):
            name = f"{where}: message {message.get('name')}"
            if "traits" in message:
                sentences.append(f"{name}: traits replace one another's `required`; join headers by allOf")
            if key is not None and key not in contract.inlined(message["payload"]).get("required", []):
                sentences.append(f"{name}: the key {key} is not a required field of the payload")
            if "key" not in (message.get("bindings") or {}).get("kafka", {}):
                sentences.append(f"{name}: bindings.kafka declares no key")
        for declared in _messages_of(contract, channel):
            said = {name: part.get("const") for name, part in declared.headers["properties"].items()}
            expected = {
                "ce_specversion": "1.0",
                "ce_source": f"/pin/{context}",
                "ce_eventclass": (channel.get("x-governance") or {}).get("event_class"),
                "content-type": "application/json",
            }
            sentences += [
                f"{where}: message {declared.name}: {header} is {said.get(header)}, not {value}"
                for header, value in expected.items()
                if said.get(header) != value
            ]
    return sentences


def sensitive_fields(contract: Contract) -> list[str]:
    """Payload fields named like personal data or money."""
    return [
        f"{_place(contract, message)}: {'.'.join(path)} is named like personal data or money"
        for message in contract.messages()
        for path in _fields(message.payload)
        if _is_sensitive(path[-1])
    ]


def free_text_fields(message: DeclaredMessage) -> list[str]:
    """Payload fields that could hold more than ids, enumerations, instants, numbers and flags."""

    def bound(schema: Mapping[str, Any]) -> bool:
        if "oneOf" in schema:
            return all(bound(part) for part in schema["oneOf"])
        return "enum" in schema or schema.get("format") in {"uuid", "date-time"} or schema.get("type") != "string"

    return [name for name, schema in message.payload["properties"].items() if not bound(schema)]


ALONE: Final[tuple[Check, ...]] = (
    governance_gaps, binding_gaps, broken_guarantees, misnamed, envelope_gaps, sensitive_fields, bad_examples,
)  # fmt: skip
"""The checks of a contract by itself."""


# All contracts together.


def topics_declared_twice(contracts: Iterable[Contract]) -> list[str]:
    """Topics that two channels describe: their settings and consumers would contradict each other one day."""
    seen: dict[str, str] = {}
    sentences = []
    for contract in contracts:
        for where, channel in _channels(contract):
            first = seen.setdefault(str(channel.get("address")), where)
            if first != where:
                sentences.append(f"{where}: {channel.get('address')} is declared by {first} already")
    return sentences


def unequal_partitions(contracts: Iterable[Contract]) -> list[str]:
    """Topics that share a key and not their partition count: one entity's events would reach different readers."""
    counts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for contract in contracts:
        for where, channel in _channels(contract):
            if key := channel.get("x-message-key"):
                counts[key][channel["bindings"]["kafka"].get("partitions", 0)].append(where)
    return [
        f"key {key}: " + "; ".join(f"{number} partitions in {', '.join(places)}" for number, places in found.items())
        for key, found in counts.items()
        if len(found) > 1
    ]


def every_message(contracts: Iterable[Contract]) -> Iterator[tuple[Contract, DeclaredMessage]]:
    """Yield each declared message with its contract."""
    for contract in contracts:
        for message in contract.messages():
            yield contract, message


def days(duration: object) -> int | None:
    """Return the days of an ISO 8601 duration of years, months, weeks and days; None if it isn't one."""
    parts = DURATION.fullmatch(duration) if isinstance(duration, str) else None
    if parts is None:
        return None
    lengths = {"years": 365, "months": 30, "weeks": 7, "days": 1}
    return sum(int(parts[unit] or 0) * length for unit, length in lengths.items())


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


def _channels(contract: Contract) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, channel in contract.channels.items():
        yield f"{contract.path.name}: channel {name}", channel


def _messages_of(contract: Contract, channel: Mapping[str, Any]) -> list[DeclaredMessage]:
    return [message for message in contract.messages() if message.topic == channel.get("address")]


def _retention(channel: Mapping[str, Any], part: str) -> Any:
    retention = (channel.get("x-governance") or {}).get("retention")
    return retention.get(part) if isinstance(retention, dict) else None


def _is_sensitive(field: str) -> bool:
    words = [word.lower() for word in WORDS.findall(field)]
    is_id = words[-1:] in (["id"], ["ids"])
    return not is_id and bool({field.lower(), *words} & PERSONAL_OR_MONEY)


def _fields(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(schema, list):
        for part in schema:
            yield from _fields(part, path)
    elif isinstance(schema, dict):
        for name, part in schema.get("properties", {}).items():
            yield (*path, name)
            yield from _fields(part, (*path, name))
        for key in ("items", "oneOf", "anyOf", "allOf"):
            yield from _fields(schema.get(key), path)


def _place(contract: Contract, message: DeclaredMessage) -> str:
    return f"{contract.path.name}: message {message.name}"
