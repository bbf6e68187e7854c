"""Runs the example programs as their users do, from a command line, without paying for their imports each time.

A program runs in processes of its own, which are forked; their output and exit status come back. Tests of the launcher
start it as a user does, with `program_environment`.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing as mp
import os
import re
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests._forked import FORKED

REPOSITORY = Path(__file__).parents[2]
PROGRAM_NAMES = ("pretrain_gpt", "generate", "convert", "prepare_data")
PROGRAMS = {name: REPOSITORY / "examples" / "gpt" / f"{name}.py" for name in PROGRAM_NAMES}
LIMIT_S = 600.0

TINY = (
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--ffn-hidden-size", "48"),
    *("--seq-length", "32", "--micro-batch-size", "2", "--log-interval", "1", "--eval-iters", "1"),
)
"""Flags of a model that takes milliseconds a step."""


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int
    out: str
    err: str


def program_environment(**variables: str) -> dict[str, str]:
    """Returns the environment of a program of the checkout: importable, on the CPU, one thread."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SHARDSTACK_DEVICE": "cpu"}
    return {**os.environ, **common, **variables}


def programs_in(page: Path) -> list[str]:
    """Returns the Python programs that a page of Markdown shows."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_program(
    program: str | Path, *arguments: object, folder: Path, ranks: int = 0, limit_s: float = LIMIT_S, **variables: str
) -> Ended:
    """Runs an example, or another script, in `folder` with additional environment variables, on ranks that are forked.

    Ranks find in the environment what the launcher gives them; 0 is a single process without a launcher. The status is
    that of the first rank whose status is not 0.
    """
    script = PROGRAMS[program] if isinstance(program, str) else program
    command = [str(part) for part in (script, *arguments)]
    with tempfile.TemporaryDirectory() as scratch, _meeting_place(ranks) as meeting:
        out, err = Path(scratch, "out"), Path(scratch, "err")
        places = [{**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
        processes = [
            FORKED.Process(target=_run, args=(command, folder, place | variables, out, err)) for place in places
        ]
        for process in processes:
            process.start()
        return Ended(_wait(processes, limit_s), out.read_text(), err.read_text())


def one_line(ended: Ended) -> str:
    """Returns the line that a command ends with, once it is sure that there is nothing else."""
    # A progress bar may be drawn before what is wrong is known.
    lines = [line for line in ended.err.replace("\r", "\n").splitlines() if line and not line.startswith("training:")]
    assert ended.status == 2 and len(lines) == 1 and lines[0].startswith("error: "), ended
    assert len(lines[0]) < 1000
    return lines[0]


def _run(command: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    mp.set_start_method(mp.get_all_start_methods()[0], force=True)  # that of a process which nothing forked
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))  # as Python does for a script
    runpy.run_path(command[0], run_name="__main__")


@contextmanager
def _meeting_place(ranks: int) -> Iterator[dict[str, str]]:
    """Returns the environment in which ranks meet, at a store that listens before any of them starts."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    yield {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    del store


def _wait(processes: Sequence[BaseProcess], limit_s: float) -> int:
    """Returns the first status that is not 0, once all have ended.

    Raises:
        TimeoutError: some had to be killed.
    """
    deadline, stuck = time.monotonic() + limit_s, []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            stuck.append(process)
    for process in stuck:
        process.kill()
        process.join()
    if stuck:
        raise TimeoutError(f"{len(stuck)} of {len(processes)} processes had not ended after {limit_s:g} s")
    return next((process.exitcode for process in processes if process.exitcode), 0)


def load_program(name: str):
    """Loads an example as a module; it is a script, which finds its neighbours in its own folder."""
    folder = str(PROGRAMS[name].parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, PROGRAMS[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pretrain(*arguments: str) -> None:
    """Runs the pretraining example on this rank."""
    load_program("pretrain_gpt").main(arguments)


def forget_after(run: Path, step: int) -> None:
    """Leaves the folder of a run as a crash after a checkpoint does: the log is ahead of it."""
    for checkpoint in run.glob("iter_*"):
        if int(checkpoint.name.removeprefix("iter_")) > step:
            shutil.rmtree(checkpoint)
    (run / "latest").write_text(f"iter_{step:07d}\n")


def content(checkpoint: Path) -> dict[str, Any]:
    """Returns every byte of every tensor, and all that is said about them but where the run was kept."""
    description = json.loads((checkpoint / "checkpoint.json").read_text())
    del description["metadata"]["config"], description["sha256"]
    return {"description": description} | {p.name: p.read_bytes() for p in sorted(checkpoint.glob("*.bin"))}


def log(run: Path) -> list[dict[str, Any]]:
    """Returns the log without what a clock and a memory gauge said."""
    measured = ("step_s", "tokens_per_s", "mfu", "memory_bytes", "skew", "slowest_rank")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]
