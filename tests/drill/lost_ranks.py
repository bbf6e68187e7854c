"""Kills, stops and hangs ranks of runs that keep the survivors, at random moments, and compares every step's hash.

    python -m tests.drill.lost_ranks --minutes 60 --results benchmarks/results/lost_ranks.md

Launcher and ranks are forked from a process that has imported everything, so that a replacement starts in tens of
milliseconds. Exits with an error, and keeps the folder, at the first run that does not end, or whose weights differ
after any step from those of a run on one rank that nothing met.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import tests._imports  # noqa: F401  # before anything is forked
from tests.drill.launched import children, send
from tests.functional._forked_launcher import ForkedLauncher
from tests.functional._program import REPOSITORY, TINY

PROGRAM = REPOSITORY / "tests" / "drill" / "_lost_rank.py"
FLAGS = (
    *TINY[:-2],  # but for the number of validations
    *("--eval-iters", "0", "--global-batch-size", "8", "--hidden-dropout", "0.1", "--save-interval", "50"),
    *("--reproducible-across-ranks", "--log-weights-hash", "1"),
)
LIMIT_S, MARGIN_S = 6.0, 10.0
"""Limit of a step, and what a hang may take beyond it."""
ITERATIONS = {"replace": 400, "shrink": 60}
RUNS = (
    ("replace", 2, ("--use-distributed-optimizer",)),
    ("shrink", 4, ("--data-parallel-sharding-strategy", "optim_grads_params")),
    ("replace", 2, ("--use-torch-fsdp2",)),
    ("shrink", 4, ("--use-distributed-optimizer",)),
    ("replace", 4, ("--data-parallel-sharding-strategy", "optim_grads_params")),
    ("shrink", 4, ("--use-torch-fsdp2",)),
    ("replace", 2, ()),
    ("shrink", 4, ("--data-parallel-sharding-strategy", "optim_grads")),
)
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "hang": signal.SIGUSR1}
WEIGHTS = (12, 1, 1)
SILENT_S = 300.0
"""A run without a step for so long does not end any more."""


class Run:
    """A run that keeps its survivors."""

    def __init__(self, folder: Path, corpus: Path, policy: str, ranks: int, flags: tuple[str, ...]) -> None:
        folder.mkdir()
        self.folder = folder / "run"
        arguments = ["--nproc-per-node", ranks]
        if ranks > 1:
            arguments += ["--on-lost-rank", policy, "--lost-rank-timeout", LIMIT_S, "--max-restarts", 100]
        arguments += [PROGRAM, *FLAGS, "--train-iters", ITERATIONS[policy], *flags]
        self.launcher = ForkedLauncher([*arguments, "--data-path", corpus, "--save", self.folder], folder)

    def step(self) -> int:
        return max(self.hashes(), default=0)

    def hashes(self) -> dict[int, str]:
        log = self.folder / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return {line["step"]: line["weights_hash"] for line in lines if "weights_hash" in line}

    def wait_for_step(self, step: int) -> bool:
        """Returns whether the run came so far; False if it has ended before."""
        until = time.monotonic() + SILENT_S
        while self.step() < step:
            if self.launcher.poll() is not None:
                return self.step() >= step
            if time.monotonic() > until:
                raise SystemExit(f"{self.folder}: no step {step} in {SILENT_S:g} s:\n{self.said()[-4000:]}")
            time.sleep(0.02)
        return True

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.parent.glob("launcher.*")))


def disturb(
    run: Run, draw: random.Random, policy: str, counts: Counter[str], seconds: dict[str, list[float]], until: float
) -> None:
    """Loses ranks of a run at random moments, until one is left, the run has ended, or the time is over."""
    while time.monotonic() < until and run.wait_for_step(run.step() + 1):
        if draw.random() < 0.7:
            time.sleep(draw.uniform(0.0, 0.4))  # else at once, which falls into a recovery if that takes two steps
        ranks, before = children(run.launcher.pid), run.step()
        if len(ranks) < 2 or before >= ITERATIONS[policy] - 5:
            break
        kind = draw.choices(list(SIGNALS), WEIGHTS)[0]
        victims = draw.sample(ranks, 2 if kind == "kill" and len(ranks) > 2 and draw.random() < 0.2 else 1)
        begun, gone = time.monotonic(), send(victims, SIGNALS[kind])
        counts[f"{policy}: {kind}"] += gone
        if kind == "kill" and draw.random() < 0.2:  # in the recovery
            time.sleep(draw.uniform(0.05, 0.5))
            left = [rank for rank in children(run.launcher.pid) if rank not in victims]
            if len(left) > 1:
                counts[f"{policy}: kill"] += send(draw.sample(left, 1), signal.SIGKILL)
        if kind != "kill":
            while set(victims) & set(children(run.launcher.pid)) and run.launcher.poll() is None:
                if time.monotonic() - begun > LIMIT_S + MARGIN_S:
                    raise SystemExit(f"{run.folder}: a {kind} was not ended in its limit:\n{run.said()[-4000:]}")
                time.sleep(0.02)
            send(victims, signal.SIGCONT)  # it must not come back
        if run.wait_for_step(before + 2):
            seconds.setdefault(f"{policy}: {kind}", []).append(time.monotonic() - begun)


class Drill:
    """Counts of the runs that have ended right."""

    def __init__(self, folder: Path, corpus: Path, seed: int) -> None:
        self.folder, self.corpus, self.seed = folder, corpus, seed
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        self.runs = 0

    def run(self, seconds: float) -> None:
        draw, until, expected = random.Random(self.seed), time.monotonic() + seconds, {}
        for policy, iterations in ITERATIONS.items():
            whole = Run(self.folder / f"whole-{policy}", self.corpus, policy, 1, ())
            whole.launcher.communicate(SILENT_S)
            expected[policy] = whole.hashes()
            if len(expected[policy]) != iterations:
                raise SystemExit(f"a run on one rank did not end:\n{whole.said()[-4000:]}")
        while time.monotonic() < until:
            policy, ranks, flags = RUNS[(self.seed + self.runs) % len(RUNS)]
            run = Run(self.folder / f"run{self.runs}", self.corpus, policy, ranks, flags)
            counts: Counter[str] = Counter()
            taken: dict[str, list[float]] = {}
            disturb(run, draw, policy, counts, taken, until)
            run.launcher.communicate(SILENT_S)
            if run.launcher.poll() != 0 or run.hashes() != expected[policy]:
                raise SystemExit(f"{run.folder} {flags} ended with {run.launcher.poll()}:\n{run.said()[-6000:]}")
            shutil.rmtree(run.folder.parent)
            self.runs += 1
            self.counts += counts
            for name, values in taken.items():
                self.seconds.setdefault(name, []).extend(values)
            print(f"{self.runs} runs, {dict(self.counts)}", file=sys.stderr, flush=True)

    def rows(self) -> list[str]:
        """Returns a line of a table for each policy and kind of loss."""
        rows, date = [], f"{datetime.now(timezone.utc):%Y-%m-%d}"
        for name, count in sorted(self.counts.items()):
            taken = self.seconds.get(name, [])
            spread = f"{statistics.median(taken):.1f} ({max(taken):.1f})" if taken else ""
            rows.append(f"| {date} | {self.seed} | {name} | {count} | {spread} | {self.runs} |\n")
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drill.lost_ranks")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--results", type=Path, help="a table to add a row to for each policy and kind of loss")
    options = parser.parse_args()
    os.environ.update(SHARDSTACK_DEVICE="cpu", OMP_NUM_THREADS="1")
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit("ended by SIGTERM"))
    folder = Path(tempfile.mkdtemp(prefix="drill-lost-"))
    from tests.drill.__main__ import corpus_in

    drill = Drill(folder, corpus_in(folder), options.seed)
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
