"""The drill: every fault of `tests.drill.faults`, in rounds, until the time is used up; then a report.

    python -m tests.drill --minutes 10 --seed 1 --report drill.md
    python -m tests.drill --hours 8

Exits with an error, and keeps the folder, at the first run that does not end in the undisturbed weights, process that
outlives its run, or damage that is read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.drill.faults import SINGLE, Drill, kills, planted
from tests.drill.report import Report
from tests.unit._program import REPOSITORY, program_environment
from tests.unit.datasets._corpus import corpus_in

LAUNCHED_SHARE, FORKED_SHARE, LOST_SHARE = 0.2, 0.3, 0.25
"""Shares of the time: for kills under the launcher, for kills of forked ranks, which are faster, and for lost ranks
whose survivors stay."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drill")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--hours", type=float, help="in the place of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="file for the report, in addition to the standard output")
    options = parser.parse_args()
    seconds = 60.0 * (options.minutes if options.hours is None else 60.0 * options.hours)
    folder, report, started = Path(tempfile.mkdtemp(prefix="drill-")), Report(), time.monotonic()
    try:
        _drill(folder, report, started, seconds, options)
    finally:  # also of a drill that found something
        report.measured["The drill"] = time.monotonic() - started
        text = "\n".join(report.lines()) + "\n"
        print(text)
        if options.report is not None:
            options.report.write_text(text)
    shutil.rmtree(folder)


def _drill(folder: Path, report: Report, started: float, seconds: float, options: argparse.Namespace) -> None:
    corpus = corpus_in(folder)
    drill = Drill(corpus, folder, options.seed, report)
    planted(drill, "full log", "a full disk at the log alone", "pages and plots pause")
    rounds = 0
    while rounds == 0 or time.monotonic() - started < (1.0 - LAUNCHED_SHARE - FORKED_SHARE - LOST_SHARE) * seconds:
        for fault in SINGLE:
            fault(drill)
            _progress(report, started)
        rounds += 1
    kills(drill, LAUNCHED_SHARE * seconds)
    _progress(report, started)
    _lost_ranks(LOST_SHARE * seconds, options.seed, report)
    left = max(30.0, seconds - (time.monotonic() - started))
    _forked_kills(corpus, folder / "forked", left, options.seed, report)


def _forked_kills(corpus: Path, folder: Path, seconds: float, seed: int, report: Report) -> None:
    """Ranks forked from a process that has imported everything: a start takes no time, and so a minute has more."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.functional._killed_runs", str(corpus), str(folder)]
    command += ["--kills", "1000000", "--seconds", str(seconds), "--seed", str(seed)]
    ended = subprocess.run(
        command, cwd=REPOSITORY, env=program_environment(), capture_output=True, text=True, timeout=seconds + 600
    )
    if ended.returncode != 0:
        raise SystemExit(ended.stderr[-4000:])
    counts = json.loads(ended.stdout.splitlines()[-1])
    report.fault("kill -9 of one forked rank", count=counts["of one rank"])
    report.fault("kill -9 of all forked ranks", count=counts["of all"])
    report.comparisons += counts["runs"]


def _lost_ranks(seconds: float, seed: int, report: Report) -> None:
    command = [sys.executable, "-m", "tests.drill.lost_ranks", "--minutes", str(seconds / 60.0), "--seed", str(seed)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds + 1200)
    if ended.returncode != 0:
        raise SystemExit(ended.stderr[-6000:])
    for row in filter(None, ended.stdout.splitlines()):
        _, _, name, count, *_ = row.strip("| ").split(" | ")
        report.fault(f"survivors stay, {name}", count=int(count))


def _progress(report: Report, started: float) -> None:
    counts = ", ".join(f"{name} {kind.count}" for name, kind in report.kinds.items())
    print(f"{time.monotonic() - started:.0f} s: {counts}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
