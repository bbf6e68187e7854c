"""The faults of a drill that a run under the launcher meets; each ends in the weights of an undisturbed run."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.dist_checkpointing import latest_checkpoint, verify
from core.dist_checkpointing.format.folders import complete_checkpoints
from tests.drill.launched import ITERATIONS, Launched, send
from tests.drill.report import Report, line_with
from tests.unit._program import content

FINAL = f"iter_{ITERATIONS:07d}"
MANY = 1000
"""Restarts that no drill uses up."""


KILLS = {"one rank": 5, "all ranks": 2, "launcher": 3, "term": 1, "term twice": 1}
"""What ends a run under the launcher early, and how often of twelve times once each has come."""


class Drill:
    """A corpus, a folder to work in, and what an undisturbed run leaves."""

    def __init__(self, corpus: Path, folder: Path, seed: int, report: Report) -> None:
        self.corpus, self.folder, self.report = corpus, folder, report
        self.draw = random.Random(seed)
        self.not_yet = list(KILLS)  # kinds of kill that have not been drawn; `_disturb` takes each once, then any
        self._runs = 0
        started = time.monotonic()
        whole = self.run()
        whole.finish()
        report.measured["An undisturbed run, its start included"] = time.monotonic() - started
        self.expected = content(whole.folder / FINAL)

    def run(self, *flags: str, **settings: Any) -> Launched:
        self._runs += 1
        return Launched(self.folder / f"run{self._runs}", settings.pop("corpus", self.corpus), *flags, **settings)

    def compare(self, run: Launched) -> None:
        """Compares what a run ended with to the undisturbed one; ends the drill where they differ, or a rank is
        left."""
        if content(run.folder / FINAL) != self.expected:
            raise SystemExit(f"{run.folder / FINAL} is not what an undisturbed run ends with:\n{run.output()[-4000:]}")
        if left := run.orphans():
            raise SystemExit(f"{run.folder}: processes {left} outlived their run")
        self.report.comparisons += 1
        shutil.rmtree(run.folder)


def kills(drill: Drill, seconds: float) -> None:
    """Sends kill -9 to one rank, to all and to the launcher, and SIGTERM once and twice, at moments drawn at
    random."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        run = drill.run(restarts=MANY)
        run.start()
        while run.step() < ITERATIONS and time.monotonic() < until:
            wait_until = time.monotonic() + drill.draw.uniform(0.2, 9.0)
            while time.monotonic() < wait_until and run.process is not None and run.process.poll() is None:
                time.sleep(0.01)
            if run.process is None or run.process.poll() is not None:
                break
            _disturb(drill, run)
            _check_newest(run)
        run.kill()
        if left := run.orphans():
            raise SystemExit(f"{run.folder}: processes {left} outlived their launcher")
        run.finish()
        drill.compare(run)


def _disturb(drill: Drill, run: Launched) -> None:
    kind = drill.not_yet.pop() if drill.not_yet else drill.draw.choices(list(KILLS), list(KILLS.values()))[0]
    before, started = run.step(), time.monotonic()
    if kind in ("one rank", "all ranks"):
        ranks = run.ranks()
        chosen = ranks if kind == "all ranks" else drill.draw.sample(ranks, min(1, len(ranks)))
        if not send(chosen, signal.SIGKILL):
            return
        drill.report.fault(f"kill -9 of {kind}", message=line_with(run.output(), "starting them again"))
        if run.wait_for_step(before + 1):
            drill.report.fault(f"kill -9 of {kind}", count=0, lost_s=time.monotonic() - started)
        return
    assert run.process is not None
    if kind == "launcher":
        run.process.kill()
    else:
        run.process.send_signal(signal.SIGTERM)
        if kind == "term twice":
            time.sleep(0.6)
            run.process.send_signal(signal.SIGTERM)
    run.wait()
    name = {"launcher": "kill -9 of the launcher", "term": "SIGTERM", "term twice": "SIGTERM twice"}[kind]
    message = line_with(run.output(), "SIGTERM") if kind != "launcher" else "nothing: it is queued again"
    run.start()  # at once, as a queue does: ranks of the run before may still be ending
    drill.report.fault(name, message=message)
    if run.wait_for_step(before + 1):
        drill.report.fault(name, count=0, lost_s=time.monotonic() - started)


def _check_newest(run: Launched) -> None:
    """Checks that the newest checkpoint is whole. It may be rotated away while it is read: then the next counts."""
    for _ in range(3):
        newest = latest_checkpoint(run.folder) if run.folder.exists() else None
        if newest is None:
            return
        try:
            verify(newest)
        except Exception:
            if newest.exists():
                raise
        else:
            return


def planted(drill: Drill, fault: str, name: str, part: str) -> None:
    """Lets a rank plant a fault in itself, in the midst of a run that may start again."""
    flags = ("--save-interval", "10") if fault == "full log" else ()  # no checkpoint while the disk is full
    step = 12 if fault == "full log" else drill.draw.randint(5, 15)
    run = drill.run(*flags, restarts=MANY, fault=f"{fault}@{step}")
    started = time.monotonic()
    run.finish()
    lost = time.monotonic() - started - drill.report.measured["An undisturbed run, its start included"]
    drill.report.fault(name, lost_s=max(lost, 0.0), message=line_with(run.output(), part))
    drill.compare(run)


def stopped_rank(drill: Drill) -> None:
    """Stops a rank by SIGSTOP: the others wait in a collective, until its time limit names the rank and all start
    again."""
    run = drill.run("--distributed-timeout-minutes", "0.25", "--save-interval", "8", restarts=MANY)
    run.start()
    run.wait_for_step(drill.draw.randint(9, 14))
    started = time.monotonic()
    before = run.step()
    send(drill.draw.sample(run.ranks(), 1), signal.SIGSTOP)
    seen = run.output().count("starting them again")
    while run.output().count("starting them again") == seen and time.monotonic() - started < 120:
        time.sleep(0.05)
    drill.report.measured["From a hang to the line that names it, at a limit of 15 s"] = time.monotonic() - started
    run.wait_for_step(before + 1)
    named = line_with(run.output(), "OutOfStepError") or line_with(run.output(), "Timed out")
    drill.report.fault("SIGSTOP of a rank", lost_s=time.monotonic() - started, message=named)
    if (status := run.wait()) != 0:
        raise SystemExit(f"{run.folder} ended with {status}:\n{run.output()[-4000:]}")
    drill.compare(run)


def flipped_bit(drill: Drill) -> None:
    """Flips a bit of the newest checkpoint: the run refuses it and names an older one, from which it then
    continues."""
    run = drill.run(restarts=1)
    run.start()
    run.wait_for_step(drill.draw.randint(8, 20))
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    damaged = complete_checkpoints(run.folder)[0]
    started = time.monotonic()
    file = drill.draw.choice(sorted(damaged.glob("rank_*.bin")))
    data = bytearray(file.read_bytes())
    data[drill.draw.randrange(64)] ^= 1 << drill.draw.randrange(8)  # of the first tensor: no byte between two
    file.write_bytes(data)
    run.start()
    if run.wait() != 2 or "is damaged in" not in run.output():
        raise SystemExit(f"{file} is damaged, and was read:\n{run.output()[-4000:]}")
    line = line_with(run.output(), "is damaged in")
    drill.report.fault("a flipped bit in the newest checkpoint", lost_s=time.monotonic() - started, message=line)
    run.start(load=Path(line.rpartition("--load ")[2]))
    if (status := run.wait()) != 0:
        raise SystemExit(f"{run.folder} ended with {status}:\n{run.output()[-4000:]}")
    drill.compare(run)


def truncated_corpus(drill: Drill) -> None:
    """Shortens the corpus while it is read; once it is whole again, the run continues."""
    prefix = drill.folder / "shrinking" / drill.corpus.name
    prefix.parent.mkdir(exist_ok=True)
    for path in drill.corpus.parent.glob(f"{drill.corpus.name}.*"):
        if path.is_file():
            shutil.copy2(path, prefix.parent / path.name)
    run = drill.run(restarts=2, corpus=prefix)
    tokens = prefix.with_name(f"{prefix.name}.bin")
    content_before = tokens.read_bytes()
    run.start()
    run.wait_for_step(drill.draw.randint(5, 15))
    started = time.monotonic()
    with tokens.open("r+b") as file:
        file.truncate(100)
    status = run.wait()
    message = line_with(run.output(), "truncated")
    if status != 2 or not message:
        raise SystemExit(f"a truncated corpus ended a run with {status}:\n{run.output()[-4000:]}")
    tokens.write_bytes(content_before)
    drill.report.fault("a corpus that is cut short", lost_s=time.monotonic() - started, message=message)
    run.finish()
    drill.compare(run)


def two_runs(drill: Drill) -> None:
    """Starts a second run in the folder of the first: it gets one line, and the first notices nothing."""
    run = drill.run()
    run.start()
    run.wait_for_step(2)
    ranks = run.ranks()
    send(ranks, signal.SIGSTOP)  # so that it lasts until the second has ended
    second = Launched(run.folder, drill.corpus, output=drill.folder / "second.txt")
    second.start()
    status = second.wait()
    send(ranks, signal.SIGCONT)
    message = line_with(second.output(), "is in use by process")
    if status != 2 or not message:
        raise SystemExit(f"a second run in {run.folder} ended with {status}:\n{second.output()[-4000:]}")
    drill.report.fault("a second run in one folder", message=message)
    if (status := run.wait()) != 0:
        raise SystemExit(f"{run.folder} ended with {status}:\n{run.output()[-4000:]}")
    drill.compare(run)


SINGLE: list[Callable[[Drill], None]] = [
    lambda drill: planted(drill, "nan", "a weight that becomes NaN", "error: gradients"),
    lambda drill: planted(drill, "full disk", "a disk that fills up, at a checkpoint", "error: saving"),
    stopped_rank,
    flipped_bit,
    truncated_corpus,
    two_runs,
]
"""What a drill does once a round."""
