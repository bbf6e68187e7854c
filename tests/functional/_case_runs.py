"""Runs a case as a user would: the GPT example with its flags; what comes back is the log that it wrote.

On the CPU ranks are forked, where a launch would take ten seconds of imports; on GPUs the launcher starts them.
"""

from __future__ import annotations

import fcntl
import functools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from corpus import prepare

from core.run_log import read_log
from tests.functional._cases import Case, Leg, merged_flags
from tests.functional._golden import METRICS, Golden, rounded
from tests.gpu_machine import gpu_slug
from tests.unit._program import PROGRAMS, Ended, forget_after, program_environment, run_program

LIMIT_S = 600.0
COMMON = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--ffn-hidden-size", "48"),
    *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "16", "--train-iters", "16"),
    *("--log-interval", "1", "--eval-iters", "0", "--lr", "1e-2", "--lr-warmup-iters", "2", "--clip-grad", "1.0"),
    "--log-num-zeros-in-grad",
)
"""Flags of every case: of two ranks each takes four micro-batches, and a case's own flags come in their place."""


@dataclass(frozen=True)
class Target:
    """Where cases run."""

    device: str
    """Of the golden file: ``cpu``, or the GPU's name."""
    gpus: int = 0

    def legs(self, case: Case) -> tuple[Leg, ...]:
        """Returns the parts of a case as they run here; on GPUs with as many ranks as there are, where legs do not
        differ."""
        if not self.gpus:
            return case.legs
        is_resharded = len({leg.ranks for leg in case.legs}) > 1
        ranks = self.ranks(case)
        return tuple(
            replace(leg, flags=merged_flags(leg.flags, case.gpu.flags), ranks=leg.ranks if is_resharded else ranks)
            for leg in case.legs
        )

    def ranks(self, case: Case) -> int:
        """Ranks of the first leg: of GPUs the largest power of two times what the case needs, and of batches."""
        if not self.gpus:
            return case.legs[0].ranks
        ranks = case.gpu.min_ranks
        while 2 * ranks <= min(self.gpus, 8):
            ranks *= 2
        return ranks

    def equality(self, case: Case) -> tuple[str | None, float]:
        """Returns the case that this one equals here, and within what."""
        return (case.gpu.equal_to, case.gpu.tolerance) if self.gpus else (case.equal_to, case.tolerance)


CPU = Target("cpu")


def gpu_target() -> Target | None:
    """Returns the GPUs of this machine; None without."""
    if not torch.cuda.is_available():
        return None
    return Target(gpu_slug(torch.cuda.get_device_name(0)), torch.cuda.device_count())


def write_corpus(folder: Path) -> Path:
    """Returns the prefix of a corpus that is the same everywhere: counting, in documents of very different lengths."""
    draw = random.Random(8)
    documents = []
    for _ in range(300):
        first, step, length = draw.randrange(10), draw.randrange(1, 4), draw.choice((1, 3, 5, 11, 24))
        documents.append(" ".join(str((first + step * i) % 10) * 2 for i in range(length)))
    text = folder / "counting.txt"
    text.write_text("\n".join(documents), encoding="utf-8")
    prepare([text], folder / "counting", tokenizer="byte", split_on="line")
    return folder / "counting"


class CaseRunner:
    """Runs cases on one corpus, each once a session, however many others are compared with it.

    Args:
        shared: a folder in which processes that share out the cases leave their curves for each other.
    """

    def __init__(self, folder: Path, target: Target, shared: Path | None = None) -> None:
        self.target = target
        self._folder, self._shared = folder, shared
        self._corpus = write_corpus(folder)
        self.curve = functools.lru_cache(maxsize=None)(self._curve)

    def _curve(self, case: Case) -> tuple[Golden, Golden]:
        """Returns the whole curve of a case, put together from its legs; and that of the first leg, had it gone on."""
        if self._shared is None:
            return self._run(case)
        with (self._shared / f"{case.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a process that wants the same curve waits for it
            path = self._shared / f"{case.name}.json"
            if not path.exists():
                path.write_text(json.dumps([asdict(curve) for curve in self._run(case)]))
            first, second = (Golden(**curve) for curve in json.loads(path.read_text()))
            return first, second

    def _run(self, case: Case) -> tuple[Golden, Golden]:
        run = self._folder / case.name
        legs = self.target.legs(case)
        lines: list[dict] = []
        undisturbed: list[dict] = []
        for number, leg in enumerate(legs):
            self._pretrain(leg, run, resumes=number > 0)
            written = [line for line in read_log(run / "log.jsonl") if "loss" in line]
            undisturbed = undisturbed or written
            lines = written  # a resumed run drops what came after its checkpoint
            if leg.until is not None:
                forget_after(run, leg.until)
        shutil.rmtree(run)
        return self._golden(lines, legs[0]), self._golden(undisturbed, legs[0])

    def _pretrain(self, leg: Leg, run: Path, resumes: bool) -> None:
        where = ("--load", str(run)) if resumes else ("--save", str(run))
        # Every leg runs to the end of the run: what came after its last step is then taken away, as by a crash.
        interval = () if leg.until is None else ("--save-interval", str(leg.until))
        flags = merged_flags(COMMON, leg.flags, ("--data-path", str(self._corpus)), where, interval)
        ended = (self._launch if self.target.gpus else self._fork)(leg.ranks, flags)
        assert ended.status == 0, f"{' '.join(flags)}\n{ended.err[-4000:]}"

    def _fork(self, ranks: int, flags: Sequence[str]) -> Ended:
        return run_program("pretrain_gpt", *flags, folder=self._folder, ranks=ranks)

    def _launch(self, ranks: int, flags: Sequence[str]) -> Ended:
        """Starts the ranks by the launcher: a process that has used CUDA cannot be forked."""
        launch = ("-m", "core.training.launch", "--nproc-per-node", str(ranks))
        ended = subprocess.run(
            [sys.executable, *launch, str(PROGRAMS["pretrain_gpt"]), *flags],
            cwd=self._folder,
            env=program_environment(SHARDSTACK_DEVICE="cuda"),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _golden(self, lines: list[dict], first: Leg) -> Golden:
        values: dict[str, list[float | None]] = {metric: [] for metric in METRICS}
        for line in lines:
            found = line | {"peak_memory_mib": line["memory_bytes"] / 2**20}
            for metric in METRICS:
                values[metric].append(found.get(metric))
        steps = [line["step"] for line in lines]
        # A step that is missing, or there twice, leaves fewer or more values than there are steps.
        return Golden(self.target.device, torch.__version__, first.ranks, steps[0], steps[-1], 1, values)


def as_golden(curve: Golden) -> Golden:
    """Returns a curve as it is written down."""
    values = {metric: [rounded(metric, value) for value in curve.values[metric]] for metric in METRICS}
    return replace(curve, values=values)
