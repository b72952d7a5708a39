"""The example of the README runs and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parents[3] / "libs/bizcal/README.md").read_text()


def test_example_prints_what_the_readme_says() -> None:
    source, expected = re.findall(r"```(?:python|text)\n(.*?)```", README, flags=re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(source, {})
    assert printed.getvalue() == expected


def test_every_decision_says_when_to_revisit_it() -> None:
    decisions = README.partition("## Decisions")[2].split("\n- ")[1:]
    assert len(decisions) == 7
    assert all("*Revisit when*" in " ".join(decision.split()) for decision in decisions)
