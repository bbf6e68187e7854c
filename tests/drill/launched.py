"""One run under the launcher, from outside: its processes, how far it is, and what it printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tests.unit._program import REPOSITORY, TINY, program_environment

RANKS, ITERATIONS, STEP_S = 2, 40, 0.05
RANK_PROGRAM = REPOSITORY / "tests" / "drill" / "_rank.py"
FLAGS = (
    *TINY[:-2],  # but for the number of validations
    *("--train-iters", str(ITERATIONS), "--save-interval", "1", "--eval-interval", "1000", "--eval-iters", "0"),
    *("--global-batch-size", "4", "--hidden-dropout", "0.1", "--keep-last", "4"),
)
LIMIT_S = 240.0


class Launched:
    """A run in `folder`; `start` begins it, and continues it when it has ended.

    Args:
        corpus: prefix of its data.
        restarts: for ``--max-restarts``.
        fault: what a rank plants in itself, ``kind@step``.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        *flags: str,
        restarts: int = 0,
        fault: str = "",
        step_s: float = STEP_S,
        output: Path | None = None,
    ) -> None:
        self.folder, self.output = folder, output or folder.with_suffix(".txt")
        command = [sys.executable, "-m", "core.training.launch", "--nproc-per-node", str(RANKS)]
        command += ["--max-restarts", str(restarts), str(RANK_PROGRAM), *FLAGS, *flags]
        self._command = [*command, "--data-path", str(corpus), "--save", str(folder)]
        self._environment = program_environment(
            DRILL_FAULT=fault, DRILL_ONCE=str(folder.with_suffix(".once")), DRILL_STEP_S=str(step_s)
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, load: Path | None = None) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [*self._command, "--load", str(load or self.folder)],
            env=self._environment,
            stdout=subprocess.PIPE,  # and not a file: a disk that is full for its ranks is not full for what they say
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._note, args=(self.process.stdout,), daemon=True).start()
        return self.process

    def _note(self, said: IO[bytes]) -> None:
        with said, self.output.open("ab", buffering=0) as output:
            while data := os.read(said.fileno(), 1 << 16):
                output.write(data)

    def wait(self, seconds: float = LIMIT_S) -> int:
        """Returns the launcher's exit status."""
        assert self.process is not None
        try:
            status = self.process.wait(seconds)
            time.sleep(0.1)  # until the last that it said is noted
            return status
        except subprocess.TimeoutExpired:
            self.kill()
            raise SystemExit(f"{self.folder} did not end in {seconds:.0f} s:\n{self.output()[-4000:]}") from None

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def finish(self) -> None:
        """Runs to the end, undisturbed."""
        self.start()
        if (status := self.wait()) != 0:
            raise SystemExit(f"{self.folder}: a run that no fault met ended with {status}:\n{self.output()[-4000:]}")

    def step(self) -> int:
        """Returns the last step in the log; 0 before there is one."""
        try:
            return int(json.loads((self.folder / "log.jsonl").read_text().splitlines()[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def wait_for_step(self, step: int, seconds: float = LIMIT_S) -> bool:
        """Returns whether the run came so far; False where it ended before."""
        deadline = time.monotonic() + seconds
        while self.step() < step:
            if self.process is None or self.process.poll() is not None:
                return self.step() >= step
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.folder}: step {step} was not reached:\n{self.output()[-4000:]}")
            time.sleep(0.01)
        return True

    def output(self) -> str:
        """Returns all that the run wrote for its user so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def ranks(self) -> list[int]:
        """Returns the process ids of its ranks, starting ones included."""
        assert self.process is not None
        return [pid for pid in children(self.process.pid) if self._is_ours(pid)]

    def orphans(self, patience_s: float = 10.0) -> list[int]:
        """Returns the run's processes that are left, some time after all were to have ended."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _left(self) -> list[int]:
        return [int(p.name) for p in Path("/proc").glob("[0-9]*") if self._is_ours(int(p.name))]

    def _is_ours(self, pid: int) -> bool:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return str(self.folder).encode() in arguments


def send(pids: Sequence[int], number: signal.Signals) -> int:
    """Returns how many of the processes were there to be sent the signal."""
    sent = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            sent += 1
        except ProcessLookupError:
            continue
    return sent


def children(pid: int) -> list[int]:
    """Returns the process ids of a process's children that have not ended."""
    try:
        pids = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [pid for pid in pids if ") Z " not in Path(f"/proc/{pid}/stat").read_text()]
    except OSError:
        return []
