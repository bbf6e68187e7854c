"""Kills ranks of small runs at random moments, resumes each, and compares the outcome with runs left alone.

    python -m tests.functional._killed_runs CORPUS FOLDER --kills 50 --seed 1

Ranks are forked from this process, which has imported everything and computed nothing, so that an attempt takes a
second. Prints one JSON line of what happened; exits with an error where a run does not resume to the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch.distributed as dist

import tests._imports  # noqa: F401  # before the ranks are forked
from core.dist_checkpointing import latest_checkpoint, verify
from core.training.launch.entry import run_command
from tests.unit._program import TINY, content, load_program

RANKS, GRACE_S = 2, 5.0
KILLS_A_RUN = 50
"""Most kills of a run before it is left to end."""
KINDS = {
    "ddp": (),
    "fsdp2, async": ("--use-torch-fsdp2", "--async-save"),
    "zero1, async": ("--use-distributed-optimizer", "--async-save", "--bf16"),
    "fsdp2, few kept": ("--use-torch-fsdp2", "--keep-last", "2", "--keep-every", "10"),
}
FLAGS = (
    *TINY[:-2],  # but for the number of validations
    *("--save-interval", "1", "--eval-interval", "1000", "--eval-iters", "0"),
    *("--global-batch-size", "4", "--hidden-dropout", "0.1"),
)


class Attempt:
    """The ranks of one start of a run."""

    def __init__(self, main, flags: list[str], output: Path) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self.started = time.monotonic()
        self.ranks = [self._fork(main, flags, rank, port, output) for rank in range(RANKS)]
        self.statuses: dict[int, int] = {}
        self._store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def _fork(self, main, flags: list[str], rank: int, port: int, output: Path) -> int:
        child = os.fork()
        if child:
            return child
        try:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
            for number in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            run_command(main, flags)
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            status = 1
        os._exit(status)

    def poll(self) -> bool:
        """Returns whether all ranks have ended."""
        for rank in self.ranks:
            if rank not in self.statuses:
                ended, status = os.waitpid(rank, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) == RANKS

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < until:
            time.sleep(0.002)
        return self.poll()

    def kill(self, ranks: list[int]) -> None:
        for rank in ranks:
            if rank not in self.statuses:
                os.kill(rank, signal.SIGKILL)


def run_whole(main, flags: list[str], folder: Path) -> float:
    """Runs to the end and returns how long it took."""
    attempt = Attempt(main, [*flags, "--save", str(folder), "--load", str(folder)], folder.with_suffix(".txt"))
    if not attempt.wait(120) or set(attempt.statuses.values()) != {0}:
        attempt.kill(attempt.ranks)
        raise SystemExit(f"a run that was not killed failed:\n{folder.with_suffix('.txt').read_text()}")
    return time.monotonic() - attempt.started


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no kill after so many")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--iterations", type=int, default=24)
    options = parser.parse_args()
    draw, pretrain = random.Random(options.seed), load_program("pretrain_gpt").main
    counts = {"kills": 0, "of one rank": 0, "of all": 0, "while saving": 0, "runs": 0, "resumed from": []}
    final = f"iter_{options.iterations:07d}"
    wholes = {}
    until, a_run = time.monotonic() + options.seconds, min(options.kills / len(options.kinds), KILLS_A_RUN)
    while counts["kills"] < options.kills and time.monotonic() < until:
        kind = options.kinds[counts["runs"] % len(options.kinds)]
        flags = [*FLAGS, *KINDS[kind], "--train-iters", str(options.iterations), "--data-path", str(options.corpus)]
        if kind not in wholes:
            folder = options.folder / f"whole-{len(wholes)}"
            seconds = run_whole(pretrain, flags, folder)
            wholes[kind] = content(folder / final), seconds
        expected, seconds = wholes[kind]
        folder = options.folder / f"killed-{counts['runs']}"
        in_this_run = 0
        while counts["kills"] < options.kills and in_this_run < a_run and time.monotonic() < until:
            attempt = Attempt(
                pretrain, [*flags, "--save", str(folder), "--load", str(folder)], folder.with_suffix(".txt")
            )
            if attempt.wait(draw.uniform(0.25, 1.0) * seconds):
                break  # it ended before
            counts["while saving"] += any(folder.glob(".iter_*.tmp"))
            of_all = draw.random() < 0.5
            attempt.kill(attempt.ranks if of_all else [draw.choice(attempt.ranks)])
            attempt.wait(GRACE_S)
            attempt.kill(attempt.ranks)
            attempt.wait(GRACE_S)
            counts["kills"] += 1
            in_this_run += 1
            counts["of all" if of_all else "of one rank"] += 1
            found = latest_checkpoint(folder)
            if found is not None:
                verify(found)
            counts["resumed from"].append(int(found.name[5:]) if found else None)
        run_whole(pretrain, flags, folder)
        if content(folder / final) != expected:
            raise SystemExit(f"{kind}: {folder / final} is not what the run that was left alone has")
        counts["runs"] += 1
    print(json.dumps(counts))


if __name__ == "__main__":
    sys.exit(main())
