"""Inside a major version nothing that was ever published becomes unreadable: what changed, and whether it may.

A change breaks old records (`BACKWARD`: today's reader can't read them), old readers (`FORWARD`: yesterday's reader
can't read today's records), both, or neither. A class that is FULL refuses both, one that is BACKWARD only the first.
What is not understood counts as both. Readers ignore unknown fields, so an optional field may come at any time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from enum import Flag, auto
from typing import Any, Final

from chassis.contracts.classes import EVENT_CLASSES
from chassis.contracts.reader import Contract, DeclaredMessage

ANNOTATIONS: Final = {"title", "description", "default", "examples", "deprecated", "$comment", "readOnly", "writeOnly"}
LOWER: Final = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
UPPER: Final = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
SET_OR_NOT: Final = {"pattern", "format", "const", "multipleOf", "uniqueItems"}
SHAPES: Final = {"object", "array", "string", "number", "integer", "boolean", "null"}


class Breaks(Flag):
    """Whom a change breaks."""

    NOTHING = 0
    BACKWARD = auto()
    FORWARD = auto()
    BOTH = BACKWARD | FORWARD


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between a released contract and today's.

    Attributes:
        place: channel, message and field.
        kind: what happened, in words.
        breaks: whom it breaks.
        always: refused whatever the class.
    """

    place: str
    kind: str
    breaks: Breaks
    always: bool = False

    def refused_for(self, event_class: str) -> bool:
        """Return whether a class's rule of evolution refuses the change."""
        known = EVENT_CLASSES.get(event_class)
        refusing = Breaks.BOTH if known is None or known.full else Breaks.BACKWARD
        return self.always or bool(self.breaks & refusing)


def refusals(released: Contract, today: Contract, on: date) -> list[str]:
    """Return one sentence per change since a released version that the class of its channel refuses.

    Args:
        released: a released version.
        today: the contract as it is.
        on: the day of the judgement; a channel may go when the compatibility window of its successor has passed.
    """
    return [
        f"{today.path.name}: {change.place}: {change.kind} (since {released.version}; {event_class} is {rule})"
        for change, event_class, rule in _judged(released, today, on)
        if change.refused_for(event_class)
    ]


def changes(released: Contract, today: Contract, on: date) -> list[Change]:
    """Return every difference that a reader or writer could notice, allowed ones too."""
    return [change for change, _, _ in _judged(released, today, on)]


def _judged(released: Contract, today: Contract, on: date) -> Iterator[tuple[Change, str, str]]:
    before, after = _channels(released), _channels(today)
    for address, channel in before.items():
        event_class = _class(channel)
        rule = EVENT_CLASSES[event_class].evolution if event_class in EVENT_CLASSES else "unknown"
        if address in after:
            found = [*_settings(address, channel, after[address]), *_messages(released, today, address)]
        elif _retired(address, today, on):
            found = []
        else:
            found = [Change(address, "the channel was removed", Breaks.BOTH, always=True)]
        yield from ((change, event_class, rule) for change in found)
    for address in after.keys() - before.keys():
        yield Change(address, "a channel was added", Breaks.NOTHING), _class(after[address]), ""


def _settings(address: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    parts = {
        "the key": (before.get("x-message-key"), after.get("x-message-key")),
        "the class": (_class(before), _class(after)),
        "the partition count": (_partitions(before), _partitions(after)),
    }
    for name, (was, now) in parts.items():
        if was != now:
            yield Change(address, f"{name} was changed from {was} to {now}", Breaks.BOTH, always=True)


def _messages(released: Contract, today: Contract, address: str) -> Iterator[Change]:
    before, after = _of(released, address), _of(today, address)
    for kind, message in before.items():
        where = f"{address}: {kind}"
        if kind not in after:
            yield Change(where, "the message was removed", Breaks.BOTH, always=True)
            continue
        for part in ("headers", "payload"):
            yield from compare(getattr(message, part), getattr(after[kind], part), f"{where}: {part}")
    for kind in after.keys() - before.keys():
        yield Change(f"{address}: {kind}", "a message was added", Breaks.NOTHING)


def compare(before: Any, after: Any, place: str) -> Iterator[Change]:
    """Yield the differences of two schemas with their references written out."""
    was, now = _variants(before), _variants(after)
    if was is None or now is None:
        if _meaning(before) != _meaning(after):
            yield Change(place, "the schema was changed in a way that is not understood", Breaks.BOTH)
        return
    if was.keys() != now.keys():
        yield from _other_types(set(was), set(now), place)
    for shape in was.keys() & now.keys():
        yield from _compare_shape(was[shape], now[shape], place)


def _variants(schema: Any) -> dict[str, dict[str, Any]] | None:
    """Return a schema as one schema per JSON type, or None if it can't be seen so."""
    schema = _meaning(schema)
    if not isinstance(schema, dict):
        return None
    for word in ("oneOf", "anyOf"):
        if word in schema:
            return _joined(schema[word]) if schema.keys() == {word} else None
    types = schema.get("type", _guessed(schema))
    rest = {key: value for key, value in schema.items() if key != "type"}
    return dict.fromkeys(types if isinstance(types, list) else [types], rest)


def _joined(parts: list[Any]) -> dict[str, dict[str, Any]] | None:
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        variants = _variants(part)
        if variants is None or found.keys() & variants.keys():
            return None
        found |= variants
    return found


def _guessed(schema: Mapping[str, Any]) -> str:
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if values and all(isinstance(value, str) for value in values):
        return "string"
    return "object" if "properties" in schema else "any"


def _other_types(was: set[str], now: set[str], place: str) -> Iterator[Change]:
    def accepts(shapes: set[str], shape: str) -> bool:
        return shape in shapes or "any" in shapes or (shape == "integer" and "number" in shapes)

    breaks = Breaks.NOTHING
    if not all(accepts(now, shape) for shape in was):
        breaks |= Breaks.BACKWARD
    if not all(accepts(was, shape) for shape in now):
        breaks |= Breaks.FORWARD
    kind = {Breaks.BACKWARD: "narrowed", Breaks.FORWARD: "widened"}.get(breaks, "replaced")
    said = f"from {', '.join(sorted(was))} to {', '.join(sorted(now))}"
    yield Change(place, f"the type was {kind} {said}", breaks)


def _compare_shape(before: Mapping[str, Any], after: Mapping[str, Any], place: str) -> Iterator[Change]:
    yield from _fields(before, after, place)
    for word in sorted((before.keys() | after.keys()) - {"properties", "required"}):
        was, now = before.get(word), after.get(word)
        if was != now:
            yield from _word(word, was, now, place)


def _fields(before: Mapping[str, Any], after: Mapping[str, Any], place: str) -> Iterator[Change]:
    must, needs = set(before.get("required", [])), set(after.get("required", []))
    had = {name: {} for name in must} | before.get("properties", {})
    has = {name: {} for name in needs} | after.get("properties", {})
    closed = before.get("additionalProperties") is False
    for name in sorted(had.keys() | has.keys()):
        where = f"{place}.{name}"
        if name in had and name in has:
            if name in needs - must:
                yield Change(where, "an optional field became required", Breaks.BACKWARD)
            elif name in must - needs:
                yield Change(where, "a required field became optional", Breaks.FORWARD)
            yield from compare(had[name], has[name], where)
        elif name in has:
            required = name in needs
            kind = f"{'a required' if required else 'an optional'} field was added"
            breaks = Breaks.BACKWARD if required else Breaks.NOTHING
            yield Change(where, kind, breaks | Breaks.FORWARD if closed else breaks)
        else:
            yield Change(where, f"{'a required' if name in must else 'an optional'} field was removed", Breaks.FORWARD)


def _word(word: str, was: Any, now: Any, place: str) -> Iterator[Change]:
    if word == "enum":
        yield from _enumeration(was, now, place)
    elif word in LOWER | UPPER:
        tighter = was is None or (now is not None and ((now > was) if word in LOWER else (now < was)))
        yield _one_way(place, f"{word} {was} became {now}", "tightened", "loosened", tighter)
    elif word == "items":
        yield from compare(was if was is not None else {}, now if now is not None else {}, f"{place}[]")
    elif word in SET_OR_NOT and (was is None or now is None):
        yield _one_way(place, word, "added", "removed", was is None)
    elif word == "additionalProperties" and all(value is None or isinstance(value, bool) for value in (was, now)):
        if (was is False) != (now is False):
            yield _one_way(place, "the object", "closed", "opened", now is False)
    else:
        yield Change(place, f"{word} was changed", Breaks.BOTH)


def _enumeration(was: list[Any] | None, now: list[Any] | None, place: str) -> Iterator[Change]:
    if was is None or now is None:
        yield _one_way(place, "an enumeration", "added", "removed", was is None)
        return
    for value in (value for value in was if value not in now):
        yield Change(place, f"the enumeration's value {value} was removed", Breaks.BACKWARD)
    for value in (value for value in now if value not in was):
        yield Change(place, f"the enumeration's value {value} was added", Breaks.FORWARD)


def _one_way(place: str, what: str, narrower: str, wider: str, narrows: bool) -> Change:
    return Change(place, f"{what} was {narrower if narrows else wider}", Breaks.BACKWARD if narrows else Breaks.FORWARD)


def _meaning(schema: Any) -> Any:
    """Return a schema without what only people read."""
    if isinstance(schema, dict):
        return {key: value for key, value in schema.items() if key not in ANNOTATIONS and not key.startswith("x-")}
    return schema


def _retired(address: str, today: Contract, on: date) -> bool:
    windows = [channel.get("x-compatibility") or {} for channel in today.channels.values()]
    return any(
        window.get("predecessor") == address and isinstance(until := _day(window.get("until")), date) and until < on
        for window in windows
    )


def _day(value: object) -> date | None:
    try:
        return value if isinstance(value, date) else date.fromisoformat(str(value))
    except ValueError:
        return None


def _channels(contract: Contract) -> dict[str, dict[str, Any]]:
    return {str(channel.get("address")): channel for channel in contract.channels.values()}


def _of(contract: Contract, address: str) -> dict[str, DeclaredMessage]:
    return {message.type: message for message in contract.messages() if message.topic == address}


def _class(channel: Mapping[str, Any]) -> str:
    return str((channel.get("x-governance") or {}).get("event_class"))


def _partitions(channel: Mapping[str, Any]) -> Any:
    return ((channel.get("bindings") or {}).get("kafka") or {}).get("partitions")
