"""What was released stays as it was, and everything that was ever sent stays readable.

`contracts/released/<contract>/<version>.yaml` are snapshots, `contracts/golden/<topic>/*.json` are records as they were
sent; both only ever grow, and `contracts/released/SHA256SUMS` names each file's hash, so that a changed or lost one is
noticed. A release is refused when it breaks an earlier one.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, Final

import jsonschema_rs

from chassis.contracts.checker import closed
from chassis.contracts.evolution import changes, refusals
from chassis.contracts.governance import place
from chassis.contracts.reader import SUFFIX, Contract, DeclaredMessage, every_message, load_contracts

SUMS: Final = "SHA256SUMS"


class ReleaseRefused(ValueError):
    """A contract that can't be released; the text has one sentence per line."""


def breaches(message: DeclaredMessage, headers: dict[str, Any], payload: Any, *, strict: bool = True) -> list[str]:
    """Return where a record leaves its schemas.

    Args:
        message: the declared message.
        headers: the record's headers as text.
        payload: its parsed value.
        strict: a field or header that is not declared is a breach too; a reader of old records ignores it.
    """
    return [
        f"{part}{''.join(f'.{step}' for step in error.instance_path)}: {error.message}"
        for part, schema, value in (("headers", message.headers, headers), ("payload", message.payload, payload))
        for error in jsonschema_rs.Draft202012Validator(
            closed(schema) if strict else schema, validate_formats=True
        ).iter_errors(value)
    ]


def bad_examples(contract: Contract) -> list[str]:
    """Messages without an example, and examples that their own schemas refuse."""
    sentences = []
    for message in contract.messages():
        where = place(contract, message)
        if not message.examples:
            sentences.append(f"{where}: no example")
        for example in message.examples:
            found = breaches(message, dict(example.get("headers", {})), example.get("payload"))
            sentences += [f"{where}: example {example.get('name')}: {breach}" for breach in found]
    return sentences


def released(folder: Path, name: str) -> list[Contract]:
    """Return a contract's released versions, oldest first.

    Args:
        folder: the folder of contracts.
        name: the contract's name.
    """
    return sorted(map(Contract, (folder / "released" / name).glob("*.yaml")), key=lambda one: _number(one.version))


def broken_promises(contract: Contract, folder: Path, on: date) -> list[str]:
    """Changes that a released version of the contract forbids; all versions count, not only the last."""
    sentences: list[str] = []
    for earlier in released(folder, contract.name):
        sentences += [said for said in refusals(earlier, contract, on) if said not in sentences]
        if earlier.version == contract.version and changes(earlier, contract, on):
            sentences.append(f"{contract.path.name}: {contract.version} is released and differs: raise info.version")
    return sentences


def lost_contracts(contracts: Iterable[Contract], folder: Path) -> list[str]:
    """Released contracts of which no file is left."""
    present = {contract.name for contract in contracts}
    names = sorted(path.name for path in (folder / "released").glob("*/"))
    return [f"{name}{SUFFIX}: released, and there is no such file any more" for name in names if name not in present]


def unreadable_records(contracts: Iterable[Contract], folder: Path) -> list[str]:
    """Golden old records that today's schemas don't read."""
    known = {(message.topic, message.type): message for _, message in every_message(contracts)}
    sentences = []
    for path in sorted((folder / "golden").glob("*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        where = path.relative_to(folder).as_posix()
        message = known.get((path.parent.name, record["headers"].get("ce_type")))
        if message is None:
            sentences.append(f"{where}: no contract declares {record['headers'].get('ce_type')} on {path.parent.name}")
            continue
        found = breaches(message, record["headers"], record["payload"], strict=False)
        sentences += [f"{where}: {breach}" for breach in found]
    return sentences


def tampered(folder: Path) -> list[str]:
    """Snapshots and golden records that are not what `SHA256SUMS` remembers, or that it doesn't name."""
    path = folder / "released" / SUMS
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    remembered = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    now = _sums(folder)
    changed = [name for name in sorted(now.keys() & remembered.keys()) if remembered[name] != now[name]]
    return [
        *(f"{name}: changed since it was released" for name in changed),
        *(f"{name}: was released and is gone" for name in sorted(remembered.keys() - now.keys())),
        *(f"{name}: not in {SUMS}; only a release adds files" for name in sorted(now.keys() - remembered.keys())),
    ]


def release(folder: Path, name: str, on: date) -> list[Path]:
    """Keep a contract as it is for ever: its snapshot, and its examples as golden records.

    Args:
        folder: the folder of contracts.
        name: the contract's name.
        on: the day of the release.

    Returns:
        The files written.

    Raises:
        ReleaseRefused: the version exists or isn't the highest, an earlier version forbids a change, or files that
            were released before have changed.
    """
    contracts = {contract.name: contract for contract in load_contracts(folder)}
    if name not in contracts:
        raise ReleaseRefused(f"{name}{SUFFIX}: no such contract in {folder}")
    contract = contracts[name]
    found = [
        *_bad_version(contract, folder),
        *broken_promises(contract, folder, on),
        *bad_examples(contract),
        *tampered(folder),
    ]
    if found:
        raise ReleaseRefused("\n".join(found))
    snapshot = folder / "released" / name / f"{contract.version}.yaml"
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(contract.path, snapshot)
    written = [snapshot, *_golden(contract, folder)]
    lines = [f"{digest}  {file}\n" for file, digest in sorted(_sums(folder).items())]
    (folder / "released" / SUMS).write_text("".join(lines), encoding="utf-8")
    return written


def _bad_version(contract: Contract, folder: Path) -> Iterator[str]:
    number = _number(contract.version)
    if len(number) != 3:
        yield f"{contract.path.name}: info.version {contract.version} is not major.minor.patch"
    for earlier in released(folder, contract.name):
        if _number(earlier.version) >= number:
            yield f"{contract.path.name}: {earlier.version} is released; info.version must be above it"


def _golden(contract: Contract, folder: Path) -> Iterator[Path]:
    """Write the examples that no golden record of their topic equals."""
    for message in contract.messages():
        kept = folder / "golden" / message.topic
        kept.mkdir(parents=True, exist_ok=True)
        known = [json.loads(path.read_text(encoding="utf-8")) for path in kept.glob("*.json")]
        for example in message.examples:
            record = {"headers": example["headers"], "payload": example["payload"]}
            if record in known:
                continue
            path = kept / f"{contract.version}-{message.name}-{example['name']}.json"
            path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            yield path


def _sums(folder: Path) -> dict[str, str]:
    paths = [*(folder / "released").glob("*/*.yaml"), *(folder / "golden").glob("*/*.json")]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def _number(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()
