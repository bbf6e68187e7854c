"""Appends what a benchmark measures to `results/history.jsonl`, one line of JSON a row, from which the site draws.

A program whose arguments are parsed by `Parser` appends, unless it has `--no-history`; a function that is imported and
called does not. `docs/benchmarks-over-time.md` says what a line has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _measure import PairedRatio

HISTORY = Path(__file__).resolve().parent / "results" / "history.jsonl"


class _State:
    path: Path | None = None
    """Where lines go; None: nowhere. Set when a program's arguments are parsed."""
    started = ""
    """When that was, so that the rows of a run have one date."""
    heading = ""
    """What is being measured, of `section`."""


class Parser(argparse.ArgumentParser):
    """Parses the arguments of a benchmark, and says where its lines go."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        where = self.add_mutually_exclusive_group()
        where.add_argument("--history", type=Path, default=HISTORY, metavar="FILE", help="append ratios to this file")
        where.add_argument("--no-history", action="store_true", help="append nothing")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        asked = super().parse_args(args, namespace)
        if args is None:  # called as a program
            _State.path = None if asked.no_history else asked.history
            _State.started = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
        return asked


def head(title: str) -> None:
    """Sets what rows are of, until the next call."""
    _State.heading = title


def record(row: str, ratio: PairedRatio | float) -> None:
    """Appends a ratio: of rounds, with the 95 % interval of their median, or one that was counted."""
    if _State.path is None:
        return
    if isinstance(ratio, (int, float)):
        median, spread, rounds = ratio, (ratio, ratio), 1
    else:
        median, spread, rounds = ratio.median, ratio.interval(), len(ratio.ratios)
    line = {
        "date": _State.started,
        **_place(),
        "benchmark": Path(sys.argv[0]).stem,
        "row": ": ".join(filter(None, (_State.heading, row))),
        "ratio": round(median, 6),
        "spread": [round(end, 6) for end in spread],
        "rounds": rounds,
    }
    with _State.path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _place() -> dict[str, str | None]:
    """Returns what a figure depends on besides the code that it measures."""
    import torch
    from _measure import commit, processor

    gpu = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None
    return {"commit": commit(), "machine": processor(), "device": gpu or "CPU", "torch": torch.__version__}
