"""What benchmarks have in common towards people: arguments, lines of figures, and verdicts about limits."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Sequence

from _history import Parser, record
from _measure import PairedRatio

MIB = 2**20


def arguments(
    doc: str | None, only: Sequence[str], rows: Collection[str] = (), *, of: str = "row", launches: int | None = None
) -> argparse.ArgumentParser:
    """Returns a parser of the arguments of a benchmark.

    Args:
        doc: of the benchmark's module.
        only: the kinds of measurements, if there are several; `--only` takes one.
        rows: what may be named; without names the benchmark runs its own choice.
        of: what one of them is called.
        launches: processes a candidate for the memory peak.
    """
    parser = Parser(doc)
    if rows:
        parser.add_argument(f"{of}s", nargs="*", metavar=of.upper(), help=f"of {', '.join(map(repr, rows))}")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of the timing; a limit needs 15")
    if launches is not None:
        parser.add_argument(
            "--launches", type=int, default=launches, help="interleaved launches a candidate for the memory peak"
        )
    if only:
        parser.add_argument("--only", choices=tuple(only), help="measure one of them")
    return parser


def check_names(parser: argparse.ArgumentParser, asked: Sequence[str], known: Collection[str]) -> None:
    """Ends the program with one line where a name is unknown."""
    if unknown := [name for name in asked if name not in known]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")


def print_spread(name: str, values: Sequence[float], unit: str, more: str = "") -> None:
    """Prints the median of seconds (``s``) or bytes (``MiB``), and the least and the most."""
    scale, digits = (MIB, 1) if unit == "MiB" else (1, 2)
    median, least, most = (f"{f(values) / scale:.{digits}f}" for f in (statistics.median, min, max))
    print(f"  {name:30} {unit:3} median {median:>7}   {least} to {most}{more}", flush=True)


def judge(what: str, candidate: Sequence[float], baseline: Sequence[float], limit: float = float("inf")) -> bool:
    """Prints the ratio of two candidates, which goes to the history, and returns whether it holds the limit."""
    ratio = PairedRatio.of(candidate, baseline)
    record(what, ratio)
    print(f"  {what}: {ratio}{ratio.verdict(limit)}", flush=True)
    return ratio.holds(limit)


def exit_status(within: bool) -> int:
    """Prints whether all limits hold."""
    print("\nwithin limits" if within else "\nABOVE A LIMIT")
    return 0 if within else 1
