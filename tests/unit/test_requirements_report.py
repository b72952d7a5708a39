"""The report of requirements: which ids are due, what holds them, and what it refuses."""

import sys

import pytest

from tests import requirements_report as report

LIST = """# Requirements

due: TLO-01..TLO-04 OPS-105
not yet: TLO-03

Text that speaks of TLO-99 and - TLO-98 is no row.

- TLO-01 (L1) One.
- TLO-02 (L2) Two, in parts.
  - TLO-02a the first
  - TLO-02b the second
- TLO-03 (L3) Three.
- TLO-03a (L3) A row of its own, between.
- TLO-04 (L4) Four.
- TLO-05 (L5) Five.
- OPS-105 (L6) Six.
- OPS-C1 (L7) Seven.
"""
KNOWN = report.rows(LIST)


def asking(due: str, not_yet: str = "") -> str:
    lines = LIST.splitlines()
    return "\n".join([f"due: {due}", f"not yet: {not_yet}", *lines[4:]])


def test_rows_are_the_lists_ids_with_their_parents():
    assert KNOWN == {
        "TLO-01": None,
        "TLO-02": None,
        "TLO-02a": "TLO-02",
        "TLO-02b": "TLO-02",
        "TLO-03": None,
        "TLO-03a": None,
        "TLO-04": None,
        "TLO-05": None,
        "OPS-105": None,
        "OPS-C1": None,
    }


def test_a_range_is_due_from_its_first_to_its_last_row_less_what_is_not_yet():
    assert report.due(LIST, KNOWN) == {"TLO-01", "TLO-02", "TLO-02a", "TLO-02b", "TLO-03a", "TLO-04", "OPS-105"}


@pytest.mark.parametrize(
    ("due", "not_yet", "expected"),
    [
        ("TLO-05", "", {"TLO-05"}),
        ("TLO-02", "", {"TLO-02", "TLO-02a", "TLO-02b"}),
        ("TLO-02", "TLO-02b", {"TLO-02", "TLO-02a"}),
        ("TLO-01..TLO-03", "TLO-02", {"TLO-01", "TLO-03"}),
        ("TLO-01..TLO-05", "TLO-02..TLO-04", {"TLO-01", "TLO-05"}),
        ("", "", set()),
    ],
)
def test_single_ids_ranges_and_parents_are_due_or_not_yet(due, not_yet, expected):
    assert report.due(asking(due, not_yet), KNOWN) == expected


def test_without_a_due_line_nothing_is_due():
    assert report.due("- TLO-01 One.\n", {"TLO-01": None}) == set()


def test_a_marker_on_a_parent_claims_its_lettered_rows():
    assert report.covered(["TLO-02"], KNOWN) == {"TLO-02", "TLO-02a", "TLO-02b"}


def test_a_marker_on_a_lettered_row_claims_that_row_alone():
    assert report.covered(["TLO-02a"], KNOWN) == {"TLO-02a"}
    assert "TLO-02: no test and no waiver" in report.problems(asking("TLO-02"), ["TLO-02a", "TLO-02b"], [])


def test_a_due_id_without_test_or_waiver_fails():
    marks = ["TLO-01", "TLO-02", "TLO-04"]
    assert report.problems(LIST, marks, ["OPS-105"]) == ["TLO-03a: no test and no waiver"]


def test_nothing_fails_when_every_due_id_has_a_test_or_a_waiver():
    assert report.problems(LIST, ["TLO-01", "TLO-02", "TLO-05"], ["TLO-03a", "TLO-04", "OPS-105"]) == []


@pytest.mark.parametrize(("marks", "waived"), [(["TLO-77"], []), ([], ["TLO-77"])])
def test_an_id_that_does_not_exist_fails_on_a_test_and_in_a_waiver(marks, waived):
    assert report.problems(asking(""), marks, waived) == ["TLO-77: no such requirement"]


@pytest.mark.parametrize(("due", "not_yet"), [("TLO-77", ""), ("TLO-01..TLO-77", ""), ("", "TLO-77")])
def test_an_id_that_does_not_exist_fails_in_the_due_lines(due, not_yet):
    assert "TLO-77: no such requirement" in report.problems(asking(due, not_yet), ["TLO-01"], [])


def test_a_waiver_is_an_id_and_a_reason():
    text = "- TLO-51: an external system\n- TLO-52:\n- TLO-53 no colon\nTLO-54: no dash\n"
    assert report.WAIVER.findall(text) == [("TLO-51", "an external system")]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A list and waivers of its own, and two marked tests as if pytest had collected them."""
    (tmp_path / "requirements.md").write_text(LIST)
    (tmp_path / "requirements_waived.md").write_text("- OPS-105: a document\n- TLO-03a: likewise\n")
    monkeypatch.setattr(report, "TESTS", tmp_path)
    marks = {"TLO-01": ["a.py::one"], "TLO-02": ["a.py::two", "b.py::two"]}
    monkeypatch.setattr(report, "collected_marks", lambda: marks)
    monkeypatch.setattr(sys, "argv", ["requirements_report.py", "--all"])
    return marks


def test_the_report_names_what_is_missing_and_fails(repository, capsys):
    assert report.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert "TLO-02a   a.py::two, b.py::two" in said
    assert "OPS-105   waived: a document" in said
    assert "TLO-05    -" in said
    assert said[-2:] == [
        "TLO-04: no test and no waiver",
        "requirements: 6 of 7 due ids held by tests or waivers; 10 in all",
    ]


def test_the_report_passes_when_all_is_held(repository, capsys):
    repository["TLO-04"] = ["c.py::four"]
    assert report.main() == 0
    assert capsys.readouterr().out.endswith("requirements: 7 of 7 due ids held by tests or waivers; 10 in all\n")


def test_marks_are_collected_as_pytest_sees_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    marked = "import pytest\n\n@pytest.mark.req('TLO-01', 'TLO-02a')\nclass TestBoth:\n    def test_it(self): ...\n"
    several = "\n@pytest.mark.req('TLO-01')\n@pytest.mark.parametrize('n', ['a b'])\ndef test_each(n): ...\n"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    req: ids\n")
    (tmp_path / "test_some.py").write_text(marked + several)
    both, each = "test_some.py::TestBoth::test_it", "test_some.py::test_each[a_b]"
    assert report.collected_marks(tmp_path) == {"TLO-01": [both, each], "TLO-02a": [both]}


def test_tests_that_cannot_be_collected_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_broken.py").write_text("import nowhere_to_be_found\n")
    with pytest.raises(SystemExit, match=r"(?s)could not collect the tests:.*nowhere_to_be_found"):
        report.collected_marks(tmp_path)
