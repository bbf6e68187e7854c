"""Disturbs runs that keep their survivors, at random moments, and compares every step's hash.

    python -m tests.drill.lost_ranks --minutes 60 --results benchmarks/results/lost_ranks.md

Runs are on one machine, or on two launchers that stand for two. Launchers and ranks are forked from a process that has
imported everything, so that a replacement starts in tens of milliseconds. Exits with an error, and keeps the folder,
at the first run that does not end with status 0, leaves a process, has lost a rank without a line that names it in
`NAMED_S`, or whose weights differ after any step from those of a run on one rank that nothing met.

Copies are in a file system of the drill's own, of so many bytes that it can be filled up, mounted at /dev/shm for its
processes alone. Where that is not allowed, no copies are damaged and no memory is filled.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import tests._imports  # noqa: F401  # before anything is forked
from tests.drill.kept_run import ITERATIONS, Run, adopt_orphans
from tests.drill.losses import ONE_MACHINE, TWO_MACHINES, Event, damage, full

ZERO1, ZERO2 = ("--use-distributed-optimizer",), ("--data-parallel-sharding-strategy", "optim_grads")
ZERO3, FSDP2 = ("--data-parallel-sharding-strategy", "optim_grads_params"), ("--use-torch-fsdp2",)
RUNS: tuple[tuple[int, str, int, tuple[str, ...]], ...] = (
    (1, "replace", 2, ZERO1),
    (2, "shrink", 4, ZERO3),
    (1, "shrink", 4, ZERO3),
    (2, "replace", 2, ZERO1),
    (1, "replace", 2, FSDP2),
    (2, "replace", 4, ZERO3),
    (1, "shrink", 4, ZERO1),
    (2, "replace", 2, ()),
    (1, "replace", 4, ZERO3),
    (2, "shrink", 4, FSDP2),
    (1, "shrink", 4, FSDP2),
    (2, "replace", 4, FSDP2),
    (1, "replace", 2, ()),
    (2, "replace", 2, ZERO2),
    (1, "shrink", 4, ZERO2),
    (2, "shrink", 4, ()),
)
"""Machines, policy, ranks on all of them, and flags."""
NAMED_S = 30.0
"""How long the line that names a loss may take."""
_IS_PRIVATE = "DRILL_HAS_MEMORY"
"""Environment variable: /dev/shm is the drill's own."""
_MEMORY_BYTES = 64 << 20
_WARNINGS = "are damaged or do not fit", "no complete copy is left", "goes on without new copies", "is skipped"


class Drill:
    """Counts of the runs that have ended right."""

    def __init__(self, folder: Path, corpus: Path, seed: int, kinds: list[str]) -> None:
        self.folder, self.corpus, self.seed, self.kinds = folder, corpus, seed, kinds
        self.counts: Counter[str] = Counter()
        self.named: dict[str, list[float]] = {}
        """Seconds from each loss to the line that names it."""
        self.went_on: dict[str, list[float]] = {}
        """Seconds from each event to the second step after it."""
        self.warned: Counter[str] = Counter()
        """How often what is said of copies was."""
        self.runs = 0
        self._draw = random.Random(seed)

    def run(self, seconds: float) -> None:
        until, expected = time.monotonic() + seconds, {}
        for policy, iterations in ITERATIONS.items():
            whole = Run(self.folder / f"whole-{policy}", self.corpus, policy, 1, ())
            whole.end()
            expected[policy] = dict(whole.hashes())
            if len(expected[policy]) != iterations:
                raise SystemExit(f"a run on one rank did not end:\n{whole.said()}")
        while time.monotonic() < until:
            machines, policy, ranks, flags = RUNS[(self.seed + self.runs) % len(RUNS)]
            limit_s, is_full = self._draw.choice((6.0, 12.0)) if machines > 1 else 6.0, self._draw.random() < 0.1
            folder = self.folder / f"run{self.runs}"
            run = Run(folder, self.corpus, policy, ranks, flags, machines=machines, limit_s=limit_s, is_full=is_full)
            try:
                self._disturb(run, f"{machines} machine{'s' * (machines > 1)}, {policy}", until)
                status, hashes = run.end(), run.hashes()
            except BaseException:
                run.kill()
                raise
            wrong = [step for step, value in hashes if expected[policy].get(step) != value]
            if status != 0 or wrong or dict(hashes) != expected[policy]:
                raise SystemExit(f"{folder} {flags} ended with {status}, wrong steps {wrong}:\n{run.said()}")
            shutil.rmtree(folder)
            self.runs += 1
            for part in _WARNINGS:
                self.warned[part] += sum(output.text.count(part) for output in run.outputs)
            events = sum(self.counts.values())
            print(f"{self.runs} runs, {events} events, warnings {dict(self.warned)}", file=sys.stderr, flush=True)

    def _disturb(self, run: Run, where: str, until: float) -> None:
        """Meets a run with events until one rank is left, the run has ended, or the time is over."""
        table = {kind: weight for kind, weight in self._table(run).items() if self._is_drawn(kind)}
        if run.outputs[0].is_full:
            self.counts[f"{where}: output to a full device"] += 1
        while time.monotonic() < until and run.wait_for_step(run.step() + 1):
            if self._draw.random() < 0.7:
                time.sleep(self._draw.uniform(0.0, 0.4))  # else at once: that is in a recovery if it takes two steps
            if len(run.processes()) < 2 or run.is_near_its_end:
                break
            has_second = len(run.launchers) > 1 and run.launchers[1].poll() is None
            kinds = {kind: weight for kind, weight in table.items() if has_second or kind in ONE_MACHINE}
            kind = self._draw.choices(list(kinds), list(kinds.values()))[0]
            self._meet(run, kind, f"{where}: {kind.__name__.replace('_', ' ')}")

    def _table(self, run: Run) -> dict[Callable[[Run, random.Random], Event], int]:
        return TWO_MACHINES if len(run.launchers) > 1 else ONE_MACHINE

    def _is_drawn(self, kind: Callable[[Run, random.Random], Event]) -> bool:
        if kind in (damage, full) and not os.environ.get(_IS_PRIVATE):
            return False
        return not self.kinds or kind.__name__ in self.kinds

    def _meet(self, run: Run, kind: Callable[[Run, random.Random], Event], name: str) -> None:
        begun = time.monotonic()
        run.look()
        said = [len(output.text) for output in run.outputs]
        print(f"{datetime.now():%H:%M:%S} {name}, step {run.step()}", file=sys.stderr, flush=True)
        event = kind(run, self._draw)
        line = next(event)
        before = run.step()
        self.counts[name] += 1
        if line is not None and run.outputs[line[0]].is_read:
            node, pattern = line
            if run.wait(lambda: bool(re.search(pattern, run.outputs[node].text[said[node] :])), NAMED_S):
                self.named.setdefault(name, []).append(time.monotonic() - begun)
            elif not run.has_ended:
                raise SystemExit(f"{run.folder}: no {pattern!r} on node {node} in {NAMED_S:g} s:\n{run.said()}")
        next(event, None)
        if run.wait_for_step(before + 2):
            self.went_on.setdefault(name, []).append(time.monotonic() - begun)
        for _ in event:
            pass
        new = "".join(output.text[start:] for output, start in zip(run.outputs, said, strict=True))
        for text in dict.fromkeys(text for text in re.split("[\r\n]", new) if any(w in text for w in _WARNINGS)):
            print(f"  {text}", file=sys.stderr, flush=True)

    def rows(self) -> list[str]:
        """Returns a line of a table for each kind of run and of event."""
        rows, date = [], f"{datetime.now(UTC):%Y-%m-%d}"
        for name, count in sorted(self.counts.items()):
            spreads = [_spread(seconds.get(name, [])) for seconds in (self.named, self.went_on)]
            rows.append(f"| {date} | {self.seed} | {name} | {count} | {' | '.join(spreads)} | {self.runs} |\n")
        return rows


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else ""


def _take_memory() -> None:
    """Runs this program again with a file system in memory of its own, if that is allowed."""
    alone = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    mount = f"mount -t tmpfs -o size={_MEMORY_BYTES} drill /dev/shm"
    with_memory = [*alone, "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if _IS_PRIVATE in os.environ or shutil.which("unshare") is None:
        return
    if subprocess.run([*with_memory, "true"], capture_output=True).returncode == 0:
        os.environ[_IS_PRIVATE] = "1"
        program = [sys.executable, "-m", "tests.drill.lost_ranks", *sys.argv[1:]]
        os.execvp("unshare", [*with_memory, *program])
    print("no file system can be mounted: no copies are damaged, no memory is filled", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drill.lost_ranks")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument(
        "--kinds", nargs="*", default=[], help="of events, by the names of their functions; all if none"
    )
    parser.add_argument("--results", type=Path, help="a table to add a row to for each kind of run and of event")
    options = parser.parse_args()
    _take_memory()
    os.environ.update(SHARDSTACK_DEVICE="cpu", OMP_NUM_THREADS="1")
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="drill-lost-"))
    from tests.unit.datasets._corpus import corpus_in

    drill = Drill(folder, corpus_in(folder), options.seed, options.kinds)
    try:
        drill.run(60.0 * options.minutes)
    finally:  # what has ended counts, also if the last run did not
        rows = drill.rows()
        print("".join(rows))
        if options.results is not None:
            with options.results.open("a") as results:
                results.writelines(rows)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
