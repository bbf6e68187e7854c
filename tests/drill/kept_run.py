"""One run that keeps its survivors, seen from outside: its processes, how far it is, and what it wrote."""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from core.training.launch.nodes import MACHINE
from tests.drill._hooks import prepare
from tests.drill.launched import children, send
from tests.unit._forked_launcher import ForkedLauncher
from tests.unit._program import REPOSITORY, TINY

PROGRAM = REPOSITORY / "tests" / "drill" / "_lost_rank.py"
FLAGS = (
    *TINY[:-2],  # but for the number of validations
    *("--eval-iters", "0", "--global-batch-size", "8", "--hidden-dropout", "0.1", "--save-interval", "50"),
    *("--reproducible-across-ranks", "--log-weights-hash", "1"),
)
ITERATIONS = {"replace": 200, "shrink": 150}
SILENT_S = 150.0
"""A run without a step for so long does not end any more."""
LEAVE_S = 15.0
"""How long processes may stay after a run."""
_LOOK_S = 0.02
_FIRST_PORTS = range(20_000, 30_000)
"""Where no connection of another one begins, so that a first launcher that starts again finds its port free."""


class Output:
    """What a launcher and its ranks write: pipes, whose reader can go away and come back.

    Args:
        is_full: they write to a device that is full, and nothing is read.
    """

    def __init__(self, folder: Path, *, is_full: bool) -> None:
        folder.mkdir()
        self.text, self.is_full = "", is_full
        # Whether the reader does nothing, though the pipes are open and full. `fill` sets it, `open` clears it.
        self._pauses = False
        self._log, self._fds = folder / "said.txt", list[int]()
        self._paths = [] if is_full else [folder / "launcher.out", folder / "launcher.err"]
        for path in self._paths:
            os.mkfifo(path)
        if is_full:
            for name in ("launcher.out", "launcher.err"):
                (folder / name).symlink_to("/dev/full")
        self.open()

    @property
    def is_read(self) -> bool:
        return bool(self._fds) and not self._pauses

    def open(self) -> None:
        self._pauses = False
        if not self._fds:
            self._fds = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in self._paths]

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def fill(self) -> None:
        """Reads no more, of pipes that take no more either."""
        self._pauses = True
        for path in self._paths:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            for size in (1 << 12, 1):
                with suppress(BlockingIOError):
                    while True:
                        os.write(fd, b" " * size)
            os.close(fd)

    def read(self) -> None:
        for fd in () if self._pauses else self._fds:
            with suppress(BlockingIOError):
                while data := os.read(fd, 1 << 16):
                    self.text += data.decode(errors="replace")
                    with self._log.open("ab") as log:
                        log.write(data)


class Run:
    """A run on one machine, or on two launchers that stand for two.

    Args:
        ranks: on all machines. One alone has no policy.
        limit_s: of a step.
        is_full: what it writes to is full.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        policy: str,
        ranks: int,
        flags: Sequence[str],
        *,
        machines: int = 1,
        limit_s: float = 6.0,
        is_full: bool = False,
    ) -> None:
        folder.mkdir()
        self.folder, self.policy, self.limit_s, self._machines = folder, policy, limit_s, machines
        self._places = folder / "places"
        self._places.mkdir()
        self.port = _free_port()
        arguments = ["--nproc-per-node", ranks // machines]
        if ranks > 1:
            arguments += ["--on-lost-rank", policy, "--lost-rank-timeout", limit_s, "--max-restarts", 100]
        if machines > 1:
            arguments += ["--nnodes", machines, "--master-port", self.port]
        program = [PROGRAM, *FLAGS, "--train-iters", ITERATIONS[policy], *flags, "--data-path", corpus]
        self._command = arguments, [*program, "--save", folder / "run"]
        self.outputs = [Output(folder / f"node{node}", is_full=is_full) for node in range(machines)]
        self.launchers = [self._start(node) for node in range(machines)]
        self.strangers: list[tuple[float, socket.socket]] = []
        """Connections to the port of the first launcher, and when each ends."""

    def _start(self, node: int) -> ForkedLauncher:
        flags, program = self._command
        number = ["--node-rank", node] if self._machines > 1 else []
        variables = {"DRILL_PLACES": str(self._places)}
        if self._machines > 1:
            variables |= {MACHINE: "ab"[node], "SHARDSTACK_JOB_SECRET": "the secret of the drill"}
        return ForkedLauncher([*flags, *number, *program], self.folder / f"node{node}", prepare, **variables)

    def start_again(self, node: int) -> None:
        """Starts a launcher again that has ended."""
        self.launchers[node] = self._start(node)

    @property
    def _can_start(self) -> bool:
        """Whether a launcher can open what it writes to."""
        return all(output.is_read or output.is_full for output in self.outputs)

    @property
    def has_ended(self) -> bool:
        return self.launchers[0].poll() is not None

    @property
    def is_near_its_end(self) -> bool:
        return self.step() >= ITERATIONS[self.policy] - 5

    def step(self) -> int:
        return max((step for step, _ in self.hashes()), default=0)

    def hashes(self) -> list[tuple[int, str]]:
        """Returns the hash of the weights after each step, also of those that were computed again."""
        log = self.folder / "run" / "log.jsonl"
        text = log.read_text() if log.exists() else ""
        lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return [(line["step"], line["weights_hash"]) for line in lines if "weights_hash" in line]

    def processes(self) -> list[int]:
        """Returns the processes of ranks and of spares."""
        return [pid for launcher in self.launchers for pid in children(launcher.pid)]

    def active(self) -> dict[int, int]:
        """Returns the rank of each process of the newest generation that one has entered."""
        places = {}
        for path in self._places.iterdir():
            if path.suffix != ".new":
                generation, rank = path.read_text().split()
                places[int(path.name)] = int(generation), int(rank)
        newest = max((generation for generation, _ in places.values()), default=-1)
        alive = set(self.processes())
        return {pid: rank for pid, (generation, rank) in places.items() if generation == newest and pid in alive}

    def look(self) -> None:
        """Reads what was written, ends strangers in time, and starts a second launcher again that gave up."""
        for output in self.outputs:
            output.read()
        now = time.monotonic()
        for _, connection in [stranger for stranger in self.strangers if stranger[0] < now]:
            connection.close()
        self.strangers = [stranger for stranger in self.strangers if stranger[0] >= now]
        if self._machines > 1 and self.policy == "replace" and not self.has_ended and self._can_start:
            status = self.launchers[1].poll()
            if status is not None and status > 0:
                self.start_again(1)

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Returns whether it holds within so many seconds, and before the run ends."""
        until = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return True
            if self.has_ended or time.monotonic() > until:
                self.look()
                return condition()
            time.sleep(_LOOK_S)

    def wait_for_step(self, step: int) -> bool:
        """Returns whether the run came so far; False if it has ended before."""
        if self.wait(lambda: self.step() >= step, SILENT_S):
            return True
        if not self.has_ended:
            raise SystemExit(f"{self.folder}: no step {step} in {SILENT_S:g} s:\n{self.said()}")
        return False

    def end(self) -> int | None:
        """Waits for the end, also that of all processes, and returns the exit status."""
        before = self.step()
        while not self.wait(lambda: self.has_ended, SILENT_S):
            if self.step() <= before:
                raise SystemExit(f"{self.folder} does not end:\n{self.said()}")
            before = self.step()
        for _, connection in self.strangers:
            connection.close()
        for output in self.outputs:
            output.open()
        until = time.monotonic() + LEAVE_S
        while any(launcher.poll() is None for launcher in self.launchers) or orphans():
            self.look()
            if self._machines > 1 and self.launchers[1].poll() is None:
                send([self.launchers[1].pid], signal.SIGTERM)  # it may look for a first one that is no more
            if time.monotonic() > until:
                raise SystemExit(f"{self.folder}: processes {[*self.processes(), *orphans()]} stay:\n{self.said()}")
            time.sleep(0.1)
        self.look()
        for output in self.outputs:
            output.close()
        return self.launchers[0].poll()

    def kill(self) -> None:
        for launcher in self.launchers:
            if launcher.poll() is None:
                send([launcher.pid], signal.SIGKILL)

    def said(self) -> str:
        return "".join(f"--- node {node}\n{output.text[-4000:]}" for node, output in enumerate(self.outputs))


def adopt_orphans() -> None:
    """Makes processes whose launcher has ended children of this one."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of <sys/prctl.h>


def orphans() -> list[int]:
    """Returns processes of runs that are there without their launcher."""
    left = []
    for pid in [int(child) for child in Path("/proc/self/task", str(os.getpid()), "children").read_text().split()]:
        command = Path(f"/proc/{pid}/cmdline").read_bytes() if Path(f"/proc/{pid}").exists() else b""
        with suppress(ChildProcessError, ProcessLookupError):
            if b"multiprocessing.forkserver" in command and os.getpgid(pid) == os.getpgrp():
                continue  # the process that launchers are forked from
            if b"resource_tracker" not in command and os.waitpid(pid, os.WNOHANG)[0] == 0:
                left.append(pid)
    return left


def _free_port() -> int:
    while True:
        port = random.choice(_FIRST_PORTS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
