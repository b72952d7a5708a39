"""Released versions and old records are kept, untouched and readable; majors live side by side for a declared time."""

import json
import shutil
from datetime import date
from pathlib import Path

import pytest
from contract_checks import ROOT, contract_named, edited

from chassis.contracts import Contract, load_contracts
from chassis.contracts.__main__ import findings, main
from chassis.contracts.releases import (
    ReleaseRefused,
    broken_promises,
    lost_contracts,
    release,
    released,
    tampered,
    unreadable_records,
)
from chassis.contracts.windows import window_gaps

ON = date(2026, 11, 30)
OVERDUE = "pin.crm.timeline-overdue.v1"
FIELDS = ("components", "schemas", "DealTimelineOverdueEvent")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of the repository's contracts."""
    return Path(shutil.copytree(ROOT / "contracts", tmp_path / "contracts"))


def rewrite(folder, path, value, version=None):
    """Change one place of crm's contract, and its version."""
    contract = edited(Contract(folder / "crm.asyncapi.yaml"), path, value)
    if version is not None:
        contract.document["info"]["version"] = version
    (folder / "crm.asyncapi.yaml").write_text(json.dumps(contract.document))
    return Contract(folder / "crm.asyncapi.yaml")


@pytest.mark.req("EVT-130", "EVT-131")
def test_every_rule_for_contract_files_holds_here():
    assert findings(ROOT / "contracts", ON) == []


def test_every_contract_was_released_once(contracts):
    assert [contract.name for contract in contracts if not released(ROOT / "contracts", contract.name)] == []


def test_a_release_keeps_snapshot_and_examples_and_then_stands(folder):
    contract = rewrite(folder, (*FIELDS, "properties", "Priority"), {"type": "integer"}, "9.0.0")
    known = {path.name for path in folder.glob("golden/*/*.json")}
    written = release(folder, "crm", ON)
    assert written[0] == folder / "released/crm/9.0.0.yaml"
    assert written[0].read_bytes() == contract.path.read_bytes()
    assert all(path.name.startswith("9.0.0-") and path.name not in known for path in written[1:])
    for topic in (folder / "golden").iterdir():
        records = [path.read_text() for path in topic.iterdir()]
        assert len(set(records)) == len(records), "an example that was kept before is kept once"
    assert [tampered(folder), broken_promises(contract, folder, ON)] == [[], []]
    with pytest.raises(ReleaseRefused, match=r"9\.0\.0 is released; info\.version must be above it"):
        release(folder, "crm", ON)


def test_a_breaking_change_is_not_released(folder, capsys):
    rewrite(folder, (*FIELDS, "properties", "OverdueAt"), ..., "9.0.0")
    before = sorted(path.name for path in folder.rglob("*"))
    assert main(["release", str(folder), "crm"]) == 1
    told = capsys.readouterr().err
    assert f"{OVERDUE}: {OVERDUE}: payload.OverdueAt: " in told
    assert "domain is FULL_TRANSITIVE" in told
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize(("version", "reason"), [("1.0.0", "must be above it"), ("2.0", "is not major.minor.patch")])
def test_a_version_that_is_not_new_is_not_released(version, reason, folder):
    rewrite(folder, ("info", "title"), "crm", version)
    with pytest.raises(ReleaseRefused, match=reason):
        release(folder, "crm", ON)


def test_an_unknown_contract_is_not_released(folder):
    with pytest.raises(ReleaseRefused, match=r"sales\.asyncapi\.yaml: no such contract"):
        release(folder, "sales", ON)


def test_a_released_version_cannot_be_given_another_content(folder):
    """Even an allowed change needs a version of its own."""
    rewrite(folder, ("info", "title"), "crm", "9.0.0")
    release(folder, "crm", ON)
    contract = rewrite(folder, (*FIELDS, "properties", "Priority"), {"type": "integer"})
    assert broken_promises(contract, folder, ON) == [
        "crm.asyncapi.yaml: 9.0.0 is released and differs: raise info.version"
    ]


def test_all_released_versions_count_and_not_only_the_last(folder):
    """A field may come, but not come back as something else."""
    rewrite(folder, (*FIELDS, "properties", "Priority"), {"type": "integer"}, "8.0.0")
    release(folder, "crm", ON)
    rewrite(folder, ("info", "title"), "crm", "9.0.0")
    release(folder, "crm", ON)
    (folder / "released/crm/9.0.0.yaml").write_text(
        (folder / "released/crm/1.0.0.yaml").read_text().replace("version: 1.0.0", "version: 9.0.0")
    )
    contract = rewrite(folder, (*FIELDS, "properties", "Priority"), {"type": "string"}, "10.0.0")
    replaced = "payload.Priority: the type was replaced from integer to string (since 8.0.0; domain is FULL_TRANSITIVE)"
    assert broken_promises(contract, folder, ON) == [f"crm.asyncapi.yaml: {OVERDUE}: {OVERDUE}: {replaced}"]


def test_versions_are_ordered_as_numbers(folder):
    for version in ("2.0.0", "10.0.0"):
        rewrite(folder, ("info", "title"), "crm", version)
        release(folder, "crm", ON)
    assert [one.version for one in released(folder, "crm")][-2:] == ["2.0.0", "10.0.0"]


@pytest.fixture
def others(contracts):
    """The contracts but crm's."""
    return [contract for contract in contracts if contract.name != "crm"]


def test_a_contract_that_vanished_after_its_release_is_told(contracts):
    assert lost_contracts(contracts, ROOT / "contracts") == []
    gone = "{}.asyncapi.yaml: released, and there is no such file any more"
    assert lost_contracts([], ROOT / "contracts") == [gone.format("chessboard"), gone.format("crm")]


@pytest.mark.req("EVT-130")
def test_an_old_record_that_todays_schema_refuses_is_told(folder, others):
    contract = rewrite(folder, (*FIELDS, "properties", "Type"), {"type": "integer"})
    [told] = unreadable_records([*others, contract], folder)
    assert told.startswith(f"golden/{OVERDUE}/1.0.0-DealTimelineOverdueEvent-document-not-sent.json: payload.Type: ")


def test_an_old_record_of_a_message_that_is_gone_is_told(folder, others):
    contract = rewrite(folder, ("channels", "timelineOverdue"), ...)
    [told] = unreadable_records([*others, contract], folder)
    assert told.endswith(f": no contract declares {OVERDUE} on {OVERDUE}")


def test_an_old_record_may_hold_what_is_no_longer_declared(folder, contracts):
    path = next((folder / "golden" / OVERDUE).glob("*.json"))
    record = json.loads(path.read_text())
    record["payload"]["Retired"] = 1
    record["headers"]["ce_retired"] = "1"
    path.write_text(json.dumps(record))
    assert unreadable_records(contracts, folder) == []


@pytest.mark.parametrize("kind", ["golden/*/*.json", "released/*/*.yaml"])
def test_what_was_released_can_be_neither_changed_nor_removed_nor_slipped_in(kind, folder):
    path = next(folder.glob(kind))
    name = path.relative_to(folder).as_posix()
    content = path.read_bytes()
    path.write_bytes(content + b"\n")
    assert tampered(folder) == [f"{name}: changed since it was released"]
    with pytest.raises(ReleaseRefused, match="changed since it was released"):
        release(folder, "crm", ON)
    path.unlink()
    assert tampered(folder) == [f"{name}: was released and is gone"]
    path.write_bytes(content)
    slipped = path.with_stem("9.9.9")
    slipped.write_bytes(content)
    told = f"{slipped.relative_to(folder).as_posix()}: not in SHA256SUMS; only a release adds files"
    assert tampered(folder) == [told]


def test_the_check_tells_every_breach_and_fails(folder, capsys):
    assert main(["check", str(folder)]) == 0
    assert capsys.readouterr().out == "contracts: governance, evolution and old records are good\n"
    rewrite(folder, ("channels", "timelineOverdue", "x-governance", "poison_rule"), ...)
    assert main(["check", str(folder)]) == 1
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "crm.asyncapi.yaml: channel timelineOverdue: x-governance lacks poison_rule"
    assert told[-2:] == ["QUEUES.md: older than the contracts; `make queues` writes it", "contracts: 2 breaches"]


# Two majors at once.

WINDOW = {
    "predecessor": OVERDUE,
    "from": "2026-12-01",
    "until": "2027-03-01",
    "upcaster": "crm.upcasters.timeline_overdue_v1",
    "replay_impact": "the log's v1 records are read as v2",
}
PLACE = "crm.asyncapi.yaml: channel successor: "


def with_successor(contract, window):
    successor = contract.channels["timelineOverdue"] | {"address": "pin.crm.timeline-overdue.v2"}
    if window is not None:
        successor["x-compatibility"] = window
    return edited(contract, ("channels", "successor"), successor)


@pytest.mark.req("EVT-128", "EVT-129", "EVT-130")
@pytest.mark.parametrize(
    ("window", "told"),
    [
        (WINDOW, None),
        (None, f"two majors at once, and no x-compatibility towards {OVERDUE}"),
        ({**WINDOW, "upcaster": ""}, "x-compatibility lacks upcaster"),
        ({**WINDOW, "replay_impact": None}, "x-compatibility lacks replay_impact"),
        (
            {**WINDOW, "predecessor": "pin.crm.deal-timeline.v1"},
            f"x-compatibility.predecessor pin.crm.deal-timeline.v1 is not {OVERDUE}",
        ),
        ({**WINDOW, "until": "soon"}, "x-compatibility.from and until must be days (YYYY-MM-DD)"),
        (
            {**WINDOW, "until": "2026-12-20"},
            "the window of 19 days is shorter than the 30 days that the predecessor's records live",
        ),
    ],
)
def test_two_majors_of_a_topic_declare_their_window(window, told, contracts):
    assert window_gaps([with_successor(contract_named(contracts, "crm"), window)]) == (
        [] if told is None else [PLACE + told]
    )


def test_the_repositorys_majors_declare_their_windows():
    assert window_gaps(load_contracts(ROOT / "contracts")) == []
