"""Two major versions of a topic live side by side for a window that the contract declares, and say how one is read as
the other.

The successor's channel carries `x-compatibility`; without it, or without its predecessor beside it, a break would be
silent for every reader that has not moved yet.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from typing import Any, Final

from chassis.contracts.governance import TOPIC, channels_of, days
from chassis.contracts.reader import Contract

SAYS: Final = ("predecessor", "from", "until", "upcaster", "replay_impact")
"""What `x-compatibility` says: the topic it follows, the window's days, what reads an old record as a new one, and what
a replay of the log does with both."""


def window_gaps(contracts: Iterable[Contract]) -> list[str]:
    """Second and later majors of a topic whose compatibility window is not declared, or too short to move in."""
    majors: dict[str, dict[int, tuple[str, dict[str, Any]]]] = defaultdict(dict)
    for contract in contracts:
        for where, channel in channels_of(contract):
            if parts := TOPIC.fullmatch(str(channel.get("address"))):
                stem = str(channel["address"]).rpartition(".v")[0]
                majors[stem][int(parts["major"])] = (where, channel)
    sentences = []
    for found in majors.values():
        for older, newer in zip(sorted(found), sorted(found)[1:], strict=False):
            where, channel = found[newer]
            sentences += [f"{where}: {said}" for said in _gaps(channel.get("x-compatibility"), found[older][1])]
    return sentences


def _gaps(window: Any, predecessor: Mapping[str, Any]) -> list[str]:
    if not isinstance(window, dict):
        return [f"two majors at once, and no x-compatibility towards {predecessor.get('address')}"]
    if lacking := [name for name in SAYS if not window.get(name)]:
        return [f"x-compatibility lacks {name}" for name in lacking]
    if window["predecessor"] != predecessor.get("address"):
        return [f"x-compatibility.predecessor {window['predecessor']} is not {predecessor.get('address')}"]
    try:
        length = date.fromisoformat(str(window["until"])) - date.fromisoformat(str(window["from"]))
    except ValueError:
        return ["x-compatibility.from and until must be days (YYYY-MM-DD)"]
    kept = days(((predecessor.get("x-governance") or {}).get("retention") or {}).get("topic")) or 0
    if length < timedelta(days=max(kept, 1)):
        return [f"the window of {length.days} days is shorter than the {kept} days that the predecessor's records live"]
    return []
