"""Reports a drill: per kind of fault the number, the time lost, and the message to the user."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Kind:
    """Faults of one kind."""

    count: int = 0
    lost_s: list[float] = field(default_factory=list)
    """Of each, seconds until training was where it had been before the fault; where that was seen."""
    message: str = ""
    """The line that the last one brought."""


class Report:
    """Grows while a drill lasts."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}
        self.comparisons = 0
        """Runs whose last checkpoint was compared with that of an undisturbed run; all were bitwise equal."""
        self.measured: dict[str, float] = {}

    def fault(self, name: str, *, count: int = 1, lost_s: float | None = None, message: str = "") -> None:
        kind = self.kinds.setdefault(name, Kind())
        kind.count += count
        if lost_s is not None:
            kind.lost_s.append(lost_s)
        kind.message = message or kind.message

    def lines(self) -> list[str]:
        """Returns the report as a table in Markdown."""
        rows = ["| fault | times | seconds lost, median (most) | what the user saw |", "| --- | --- | --- | --- |"]
        for name, kind in self.kinds.items():
            lost = f"{statistics.median(kind.lost_s):.1f} ({max(kind.lost_s):.1f})" if kind.lost_s else ""
            rows.append(f"| {name} | {kind.count} | {lost} | {_cell(kind.message)} |")
        rows += ["", f"Runs compared bit by bit with undisturbed ones, all equal: {self.comparisons}."]
        return rows + [f"{name}: {seconds:.2f} s." for name, seconds in self.measured.items()]


def line_with(text: str, part: str) -> str:
    """Returns the last line of a run's output that has `part` in it; empty if none has."""
    found = [line for line in text.replace("\r", "\n").splitlines() if part in line]
    return found[-1][max(found[-1].find("error: "), 0) :].strip() if found else ""  # a progress bar may come before


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:300]
