"""The page of queues: every topic and every queue in a table, with who answers for it; written from the contracts.

The page is committed, and a test refuses one that is older than the contracts: no queue is invisible.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chassis.contracts.classes import EVENT_CLASSES, QUEUE_CLASSES
from chassis.contracts.governance import queues_of
from chassis.contracts.reader import Contract

PAGE: Final = "QUEUES.md"
_HEAD: Final = """# Queues

Written by `make queues` from the contracts; a test refuses a page that is older than they are. Topics carry events
between services and are kept and replayed; work of one service waits in its own tables.
"""


def page(contracts: Sequence[Contract]) -> str:
    """Return the page."""
    families: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
    for contract in contracts:
        for contour, name, lines in (*_topics(contract), *_tables(contract)):
            families[contour].append((name, lines))
    parts = [_HEAD, _overview(families), _event_classes(), _queue_classes()]
    for contour in sorted(families):
        parts.append(f"## Contour: {contour}\n")
        parts += [f"### {name}\n\n" + "".join(lines) for name, lines in sorted(families[contour])]
    return "\n".join(parts)


def stale(folder: Path, contracts: Sequence[Contract]) -> list[str]:
    """Return a sentence if the committed page isn't what the contracts say."""
    path = folder / PAGE
    if path.exists() and path.read_text(encoding="utf-8") == page(contracts):
        return []
    return [f"{PAGE}: older than the contracts; `make queues` writes it"]


def _topics(contract: Contract) -> Iterator[tuple[str, str, list[str]]]:
    for channel in contract.channels.values():
        governance = channel.get("x-governance") or {}
        binding = (channel.get("bindings") or {}).get("kafka") or {}
        config = binding.get("topicConfiguration") or {}
        retention = governance.get("retention") or {}
        kinds = [message.type for message in contract.messages() if message.topic == channel["address"]]
        kind = EVENT_CLASSES.get(str(governance.get("event_class")))
        settings = f"{binding.get('partitions')} partitions, {binding.get('replicas')} replicas"
        facts = {
            "what": channel.get("description") or channel.get("title"),
            "types": ", ".join(f"`{one}`" for one in kinds),
            **_who(governance),
            "event class": f"{governance.get('event_class')}: {kind.delivery}; order {kind.order}" if kind else None,
            "evolution": kind.evolution if kind else None,
            "key": _key(contract, channel),
            "settings": f"{settings}, min.insync.replicas {config.get('min.insync.replicas', 1)}",
            "retention": f"topic {retention.get('topic')}, event log {retention.get('log')}",
            **_care(governance),
        }
        yield str(governance.get("contour")), f"`{channel['address']}`", _rows(facts)


def _tables(contract: Contract) -> Iterator[tuple[str, str, list[str]]]:
    for name, queue in queues_of(contract):
        facts = {
            "what": queue.get("description"),
            "where": queue.get("where"),
            **_who(queue),
            "retention": queue.get("retention"),
            **_care(queue),
        }
        yield str(queue.get("contour")), f"{contract.name}: {name}", _rows(facts)


def _who(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "producer": said.get("producer"),
        "consumers": ", ".join(said.get("consumers") or []),
        "queue class": said.get("queue_class"),
        "idempotency key": said.get("idempotency_key"),
    }


def _care(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "retry": said.get("retry_policy"),
        "poisoned when": said.get("poison_rule"),
        "operator action": said.get("operator_action"),
        "alert": said.get("alert"),
    }


def _key(contract: Contract, channel: Mapping[str, Any]) -> str:
    if field := channel.get("x-message-key"):
        return f"`{field}`"
    messages = map(contract.resolve, channel.get("messages", {}).values())
    keys = [((message.get("bindings") or {}).get("kafka") or {}).get("key") or {} for message in messages]
    return next((str(key["description"]) for key in keys if key.get("description")), "none")


def _rows(facts: Mapping[str, Any]) -> list[str]:
    cells = [(name, " ".join(str(value).split()).replace("|", "\\|")) for name, value in facts.items() if value]
    return ["| | |\n|---|---|\n", *(f"| {name} | {value} |\n" for name, value in cells)]


def _overview(families: Mapping[str, list[tuple[str, list[str]]]]) -> str:
    rows = [
        f"| {contour} | {', '.join(name for name, _ in sorted(families[contour]))} |\n" for contour in sorted(families)
    ]
    return "## Families by execution contour\n\n| contour | queues |\n|---|---|\n" + "".join(rows)


def _event_classes() -> str:
    rows = [
        f"| {name} | {kind.source} | {kind.delivery} | {kind.order} | "
        f"{f'{kind.log_years} years or more' if kind.log_years else 'by channel'} | {kind.encryption} | "
        f"{kind.evolution} |\n"
        for name, kind in EVENT_CLASSES.items()
    ]
    head = "| class | source of truth | delivery | order | event log | encryption | evolution |\n" + "|---" * 7 + "|\n"
    return "## Event classes\n\n" + head + "".join(rows)


def _queue_classes() -> str:
    rows: Iterable[str] = (f"| {name} | {meaning} |\n" for name, meaning in QUEUE_CLASSES.items())
    return "## Queue classes\n\n| class | what it is, and the broker for it |\n|---|---|\n" + "".join(rows)
