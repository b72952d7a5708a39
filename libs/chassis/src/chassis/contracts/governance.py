"""No queue is invisible: a channel or a declared queue without owner, promises and settings that keep them is refused.

Each check takes a contract and returns one sentence per breach, which names the file and the place.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from chassis.contracts.classes import EVENT_CLASSES, QUEUE_CLASSES
from chassis.contracts.reader import Contract, DeclaredMessage

GOVERNANCE: Final = (
    "producer", "consumers", "queue_class", "event_class", "contour", "idempotency_key", "retention", "retry_policy",
    "poison_rule", "operator_action", "alert",
)  # fmt: skip
"""What `x-governance` of a channel must say."""
QUEUE: Final = ("where", *(name for name in GOVERNANCE if name not in {"event_class", "retention"}), "retention")
"""What an entry of `x-queues`, a queue that is no topic, must say."""
TOPIC_SETTINGS: Final = {
    "cleanup.policy", "retention.ms", "retention.bytes", "delete.retention.ms", "max.message.bytes",
    "min.insync.replicas",
}  # fmt: skip
ORIGINS: Final = {"source", "assumed"}
CONTEXTS: Final = {"ops-queue": "ops"}
"""Services whose context token is not their name."""
LARGEST_RECORD: Final = 1_000_000
"""What a topic must take: the outbox's limit of a record and the batch's framing."""

TOPIC: Final = re.compile(r"pin\.(?P<context>[a-z][a-z0-9-]*)\.[a-z][a-z0-9-]*\.v(?P<major>[1-9][0-9]*)")
DURATION: Final = re.compile(r"P(?=\d)(?:(?P<years>\d+)Y)?(?:(?P<months>\d+)M)?(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?")
WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
PERSONAL_OR_MONEY: Final = {
    "account", "address", "amount", "birth", "birthday", "card", "cost", "email", "escrow", "fee", "fio", "firstname",
    "fullname", "iban", "inn", "lastname", "mail", "mobile", "money", "name", "names", "passport", "patronymic",
    "person", "phone", "price", "salary", "snils", "sum", "sums", "surname", "total", "username",
}  # fmt: skip

Check = Callable[[Contract], list[str]]


def context_of(service: str) -> str:
    """Return a service's token in topic names, `ce_source` and consumer groups."""
    return CONTEXTS.get(service, service)


def governance_gaps(contract: Contract) -> list[str]:
    """Channels whose `x-governance` is not complete or not in the words of the registry."""
    sentences = []
    for where, channel in channels_of(contract):
        governance = channel.get("x-governance") or {}
        sentences += [*_unsaid(where, governance, GOVERNANCE, "x-governance lacks"), *_odd_words(where, governance)]
        sentences += [
            f"{where}: retention.{part} {value} is no ISO 8601 duration"
            for part in ("topic", "log")
            if days(value := _retention(channel, part)) is None
        ]
    return sentences


def queue_gaps(contract: Contract) -> list[str]:
    """Queues that are no topics (`x-queues`: rows of a table) and don't say what a topic must say."""
    sentences = []
    for name, queue in queues_of(contract):
        where = f"{contract.path.name}: queue {name}"
        sentences += [*_unsaid(where, queue, QUEUE, "lacks"), *_odd_words(where, queue)]
        if queue.get("queue_class") == "event-stream":
            sentences.append(f"{where}: an event stream is a topic, not a table")
    return sentences


def class_gaps(contract: Contract) -> list[str]:
    """Event classes that a contract uses and for which `x-event-classes` declares no, or another, encryption."""
    declared = contract.document.get("x-event-classes")
    declared = declared if isinstance(declared, dict) else {}
    used = {str((channel.get("x-governance") or {}).get("event_class")) for _, channel in channels_of(contract)}
    return [
        f"{contract.path.name}: x-event-classes: {name} is declared {have}, the class needs {needed.encryption}"
        for name, needed in EVENT_CLASSES.items()
        if name in used and (have := (declared.get(name) or {}).get("encryption")) != needed.encryption
    ]


def binding_gaps(contract: Contract) -> list[str]:
    """Channels from whose Kafka bindings no topic, or a topic of another life than promised, would be made."""
    sentences = []
    for where, channel in channels_of(contract):
        binding, config = _binding(channel), _config(channel)
        policy = config.get("cleanup.policy")
        promised = days(_retention(channel, "topic"))
        if binding.get("topic") != channel.get("address"):
            sentences.append(f"{where}: bindings.kafka.topic {binding.get('topic')} is not the address")
        sentences += [
            f"{where}: bindings.kafka.{name} must be a whole number of 1 or more"
            for name in ("partitions", "replicas")
            if type(binding.get(name)) is not int or binding[name] < 1
        ]
        sentences += [f"{where}: {name} is no setting of a topic" for name in config if name not in TOPIC_SETTINGS]
        if not isinstance(policy, list) or not policy or set(policy) - {"delete", "compact"}:
            sentences.append(f"{where}: cleanup.policy must list delete or compact")
        elif "delete" in policy and (promised is None or config.get("retention.ms") != promised * 86_400_000):
            sentences.append(f"{where}: retention.ms {config.get('retention.ms')} is not retention.topic")
    return sentences


def broken_guarantees(contract: Contract) -> list[str]:
    """Channels whose settings break what their event class promises."""
    return [
        f"{where}: {sentence}"
        for where, channel in channels_of(contract)
        for sentence in _broken(str((channel.get("x-governance") or {}).get("event_class")), channel)
    ]


def misnamed(contract: Contract) -> list[str]:
    """Topics, sources and origins that are not in the project's grammar."""
    sentences = []
    for where, channel in channels_of(contract):
        address = str(channel.get("address"))
        parts = TOPIC.fullmatch(address)
        if parts is None:
            sentences.append(f"{where}: {address} is not pin.<context>.<event>.v<major>")
            continue
        producer = str((channel.get("x-governance") or {}).get("producer"))
        if context_of(producer) != parts["context"]:
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
    for where, channel in channels_of(contract):
        key = channel.get("x-message-key")
        for message in map(contract.resolve, channel.get("messages", {}).values()):
            name = f"{where}: message {message.get('name')}"
            if "traits" in message:
                sentences.append(f"{name}: traits replace one another's `required`; join headers by allOf")
            if key is not None and key not in contract.inlined(message["payload"]).get("required", []):
                sentences.append(f"{name}: the key {key} is not a required field of the payload")
            if "key" not in (message.get("bindings") or {}).get("kafka", {}):
                sentences.append(f"{name}: bindings.kafka declares no key")
        sentences += [
            f"{where}: {sentence}"
            for declared in contract.messages()
            if declared.topic == channel.get("address")
            for sentence in _wrong_constants(declared, channel)
        ]
    return sentences


def sensitive_fields(contract: Contract) -> list[str]:
    """Payload fields named like personal data or money."""
    return [
        f"{place(contract, message)}: {'.'.join(path)} is named like personal data or money"
        for message in contract.messages()
        for path in _fields(message.payload)
        if _is_sensitive(path[-1])
    ]


ALONE: Final[tuple[Check, ...]] = (
    governance_gaps, queue_gaps, class_gaps, binding_gaps, broken_guarantees, misnamed, envelope_gaps,
    sensitive_fields,
)  # fmt: skip
"""The checks of a contract by itself."""


def topics_declared_twice(contracts: Iterable[Contract]) -> list[str]:
    """Topics that two channels describe: their settings and consumers would contradict each other one day."""
    seen: dict[str, str] = {}
    sentences = []
    for contract in contracts:
        for where, channel in channels_of(contract):
            first = seen.setdefault(str(channel.get("address")), where)
            if first != where:
                sentences.append(f"{where}: {channel.get('address')} is declared by {first} already")
    return sentences


def unequal_partitions(contracts: Iterable[Contract]) -> list[str]:
    """Topics that share a key and not their partition count: one entity's events would reach different readers."""
    counts: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for contract in contracts:
        for where, channel in channels_of(contract):
            if key := channel.get("x-message-key"):
                counts[key][_binding(channel).get("partitions", 0)].append(where)
    return [
        f"key {key}: " + "; ".join(f"{number} partitions in {', '.join(places)}" for number, places in found.items())
        for key, found in counts.items()
        if len(found) > 1
    ]


def days(duration: object) -> int | None:
    """Return the days of an ISO 8601 duration of years, months, weeks and days; None if it isn't one."""
    parts = DURATION.fullmatch(duration) if isinstance(duration, str) else None
    if parts is None:
        return None
    lengths = {"years": 365, "months": 30, "weeks": 7, "days": 1}
    return sum(int(parts[unit] or 0) * length for unit, length in lengths.items())


def channels_of(contract: Contract) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each channel with its place, as a sentence names it."""
    for name, channel in contract.channels.items():
        yield f"{contract.path.name}: channel {name}", channel


def queues_of(contract: Contract) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each queue of `x-queues` by name."""
    declared = contract.document.get("x-queues")
    for name, queue in (declared if isinstance(declared, dict) else {}).items():
        yield name, queue if isinstance(queue, dict) else {}


def place(contract: Contract, message: DeclaredMessage) -> str:
    """Return a message's place, as a sentence names it."""
    return f"{contract.path.name}: message {message.name}"


def _unsaid(where: str, said: Mapping[str, Any], names: Iterable[str], lacks: str) -> list[str]:
    return [f"{where}: {lacks} {name}" for name in names if not said.get(name)]


def _odd_words(where: str, said: Mapping[str, Any]) -> list[str]:
    sentences = [
        f"{where}: {name} {said[name]} is none of {', '.join(sorted(allowed))}"
        for name, allowed in (("queue_class", QUEUE_CLASSES), ("event_class", EVENT_CLASSES))
        if said.get(name) and said[name] not in allowed
    ]
    consumers = said.get("consumers")
    if consumers and (not isinstance(consumers, list) or len(set(consumers)) < len(consumers)):
        sentences.append(f"{where}: consumers must be a list of different names")
    return sentences


def _broken(kind: str, channel: Mapping[str, Any]) -> Iterator[str]:
    promised = EVENT_CLASSES.get(kind)
    if promised is None:
        return
    config, replicas = _config(channel), _binding(channel).get("replicas", 1)
    if promised.lossless and not 2 <= config.get("min.insync.replicas", 1) < replicas:
        yield f"{kind} events need min.insync.replicas of 2 or more and more replicas than that"
    if promised.lossless and "compact" in (config.get("cleanup.policy") or []):
        yield f"{kind} events are never compacted: their history is replayed"
    if config.get("max.message.bytes", LARGEST_RECORD) < LARGEST_RECORD:
        yield f"max.message.bytes below {LARGEST_RECORD}: a record that the outbox takes would stop the relay"
    if promised.per_entity and not channel.get("x-message-key"):
        yield f"{kind} events are ordered per entity, but x-message-key names no field"
    kept, topic = days(_retention(channel, "log")) or 0, days(_retention(channel, "topic")) or 0
    if kept < promised.log_years * 365:
        yield f"{kind} events stay in the log for {promised.log_years} years"
    if kept < topic:
        yield "retention.log is shorter than retention.topic"


def _wrong_constants(message: DeclaredMessage, channel: Mapping[str, Any]) -> Iterator[str]:
    parts = TOPIC.fullmatch(str(channel.get("address")))
    said = {name: part.get("const") for name, part in message.headers["properties"].items()}
    expected = {
        "ce_specversion": "1.0",
        "ce_source": f"/pin/{parts['context'] if parts else ''}",
        "ce_contractversion": parts["major"] if parts else "",
        "ce_eventclass": (channel.get("x-governance") or {}).get("event_class"),
        "content-type": "application/json",
    }
    for header, value in expected.items():
        if said.get(header) != value:
            yield f"message {message.name}: {header} is {said.get(header)}, not {value}"


def _binding(channel: Mapping[str, Any]) -> dict[str, Any]:
    return (channel.get("bindings") or {}).get("kafka") or {}


def _config(channel: Mapping[str, Any]) -> dict[str, Any]:
    return _binding(channel).get("topicConfiguration") or {}


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
