"""What `eagle3 doctor` found: one line for each thing looked at, and what to do about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "stops"]


@dataclass(frozen=True)
class Finding:
    """level: stops = a run would end with an error; warning = it would not, but see to it. remedy: empty where ok."""

    level: Level
    subject: str
    told: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert bool(self.remedy) == (self.level != "ok"), self

    @property
    def lines(self) -> list[str]:
        """For a person."""
        mark = {"ok": "ok", "warning": "WARNING", "stops": "STOPS"}[self.level]
        first = f"{mark:8} {self.subject:13} {self.told}"
        return [first, f"{'':22} -> {self.remedy}"] if self.remedy else [first]


def conclusion(findings: Sequence[Finding]) -> str:
    """The last line."""
    stops, warnings = (sum(finding.level == level for finding in findings) for level in ("stops", "warning"))
    if stops:
        return f"{stops} would stop a run, {warnings} warnings"
    return f"nothing would stop a run, {warnings} warnings" if warnings else "all well"
