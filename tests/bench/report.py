"""What a benchmark found: ratios within one run, with the bar that each has to reach."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured ratio.

    Attributes:
        name: what was compared with what.
        ratio: the figure.
        bar: what it must reach (or stay below); None for one that is only reported.
        aim: what is hoped for.
        lower_is_better: the bar is a ceiling.
        detail: the absolute figures behind it, for reading only.
        unit: of a figure that is no ratio.
    """

    name: str
    ratio: float
    bar: float | None = None
    aim: float | None = None
    lower_is_better: bool = False
    detail: str = ""
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the bar is met."""
        if self.bar is None:
            return True
        return self.ratio <= self.bar if self.lower_is_better else self.ratio >= self.bar

    def row(self) -> tuple[str, str, str, str, str]:
        """Return the figure as a line of the table."""
        sign = "≤" if self.lower_is_better else "≥"
        bar = "" if self.bar is None else f"{sign} {self.bar:g}{self.unit}"
        if self.aim is not None:
            bar += f" (aim {self.aim:g})"
        verdict = "" if self.bar is None else ("met" if self.met else "NOT MET")
        return self.name, f"{self.ratio:.2f}{self.unit}", bar, verdict, self.detail

    def record(self) -> dict[str, Any]:
        """Return the figure for the JSON report."""
        return asdict(self) | {"met": self.met}
