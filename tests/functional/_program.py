"""Runs the example programs as their users do, from a command line, without paying for their imports each time.

A server process imports them once and forks for every run: what runs is `run_command(main, arguments)` in a process of
its own, whose output and exit status come back. It starts single ranks; several are started by their launcher.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAM_NAMES = ("pretrain_gpt", "generate", "convert", "prepare_data")
PROGRAMS = {name: REPOSITORY / "examples" / "gpt" / f"{name}.py" for name in PROGRAM_NAMES}
LIMIT_S = 90.0

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
    """This environment for a program of the checkout: importable, on the CPU, one thread."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    common = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SHARDSTACK_DEVICE": "cpu"}
    return {**os.environ, **common, **variables}


def programs_in(page: Path) -> list[str]:
    """The Python programs that a page of Markdown shows."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_scripts(programs: list[str], folder: Path, *, limit_s: float) -> Ended:
    """Runs programs one after the other, as scripts in `folder`, in one process of their own."""
    scripts = [folder / f"program{number}.py" for number in range(len(programs))]
    for script, program in zip(scripts, programs, strict=True):
        script.write_text(program)
    one_after_the_other = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path)"
    ended = subprocess.run(
        [sys.executable, "-c", one_after_the_other, *scripts],
        cwd=folder,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


class ProgramServer:
    """The server, for as long as a test session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.functional._program"],
            cwd=REPOSITORY,
            env=program_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *arguments: str | Path, folder: Path, **variables: str) -> Ended:
        """Runs a program in `folder` with additional environment variables."""
        with tempfile.TemporaryDirectory() as scratch:
            out, err = Path(scratch, "out"), Path(scratch, "err")
            request = {
                "program": program,
                "arguments": [str(argument) for argument in arguments],
                "folder": str(folder),
                "variables": variables,
                "out": str(out),
                "err": str(err),
            }
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            status = int(self._process.stdout.readline())
            return Ended(status, out.read_text(), err.read_text())

    def close(self) -> None:
        self._process.communicate(timeout=10)


def load_program(name: str):
    """An example as a module; it is a script, which finds its neighbours in its own folder."""
    folder = str(PROGRAMS[name].parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, PROGRAMS[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve() -> None:
    programs = {name: load_program(name) for name in PROGRAMS}
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(programs[request["program"]].main, request)
        sys.stdout.write(f"{_wait(child)}\n")
        sys.stdout.flush()


def _run(main, request: dict) -> None:
    from core.training.launch.entry import run_command

    status = 1
    try:
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        run_command(main, request["arguments"])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _wait(child: int) -> int:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


if __name__ == "__main__":
    _serve()
