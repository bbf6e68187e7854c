"""Machines that run ranks: this one, and the machines of other launchers, which obey the first launcher."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from . import tracebacks
from .lines import Connection, Events
from .link import LAUNCHER_FD
from .messages import End, Ended, FromOther, FromRank, MessageError, Said, Signal, Start, Tell, ToRank
from .processes import KILL_S, LocalProcess, Process, say, start_rank

MACHINE = "SHARDSTACK_MACHINE"
"""Environment variable: the name of this machine, in the place of the kernel's id of its boot."""

OnMessage = Callable[[int, Any], None]
"""Takes what a rank says (`messages.FromRank`), given the number of its worker."""

_POLL_S = 0.2


def machine_name() -> str:
    """Returns a name that no other machine has."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return os.environ.get(MACHINE) or (boot.read_text().strip() if boot.exists() else socket.gethostname())


class ThisNode:
    """This machine: starts ranks, and gives what they say to `take`.

    Args:
        variables: of this machine, such as the folder for copies, added to the environment of its ranks.
    """

    is_lost = False
    why = ""

    def __init__(
        self,
        number: int,
        num_ranks: int,
        command: Sequence[str],
        variables: Mapping[str, str],
        events: Events,
        take: OnMessage,
    ) -> None:
        self.number, self.num_ranks = number, num_ranks
        self._command, self._variables, self._events, self._take = command, variables, events, take
        self._traces = uuid.uuid4().hex  # of the files for tracebacks, one for each restart; no other job's
        # Of each worker; `start` adds it.
        self._lines: dict[int, Connection] = {}

    def start(self, worker: int, place: int, environment: Mapping[str, str]) -> Process:
        """Starts the process of a worker, to be LOCAL_RANK `place`."""
        ours, theirs = socket.socketpair()
        variables = {"RANK": str(place), "LOCAL_RANK": str(place), LAUNCHER_FD: str(theirs.fileno())}
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        variables[tracebacks.FILE] = f"{gettempdir()}/shardstack-{self._traces}-{restart}.txt"
        with theirs:
            command = [tracebacks.__file__, *self._command]
            process = start_rank(command, {**environment, **self._variables, **variables}, (theirs.fileno(),))
        lines = self._lines[worker] = Connection(ours, FromRank, lambda message: self._take(worker, message))
        self._events.add(lines)
        self._events.add_end(process)
        return _ThisProcess(process, lines)

    def tell(self, worker: int, message: ToRank) -> None:
        """Sends a message to a worker."""
        self._lines[worker].send(message)

    def close(self, status: int) -> None:
        """Says the exit status to the machine's launcher, if that is another one."""


class _ThisProcess:
    """A process of this machine, which has ended once all that it said was taken."""

    def __init__(self, process: LocalProcess, lines: Connection) -> None:
        self._process, self._lines = process, lines
        self.send_signal, self.end = process.send_signal, process.end

    def poll(self) -> int | None:
        code = self._process.poll()
        while code is not None and self._lines.read():
            pass
        if code is None and self._lines.why:
            say(f"process {self._process.pid} says what no rank does, and is killed: {self._lines.why}")
            self.end()
        return code


class OtherNode:
    """A machine of another launcher, which starts ranks there."""

    def __init__(self, number: int, num_ranks: int, launcher: str, lines: Connection, take: OnMessage) -> None:
        self.number, self.num_ranks, self.launcher = number, num_ranks, launcher
        self.lines, self._take = lines, take
        self._processes: dict[int, _OtherProcess] = {}
        lines.expect(FromOther, self._take_message, is_known=True)

    @property
    def is_lost(self) -> bool:
        return self.lines.is_over

    @property
    def why(self) -> str:
        """Why it is lost. Empty if it ended the connection."""
        return self.lines.why

    def start(self, worker: int, place: int, environment: Mapping[str, str]) -> Process:
        self.lines.send(Start(worker, place, dict(environment)))
        process = self._processes[worker] = _OtherProcess(self, worker)
        return process

    def tell(self, worker: int, message: ToRank) -> None:
        self.lines.send(Tell(worker, message))

    def close(self, status: int) -> None:
        self.lines.send(End(status))

    def _take_message(self, message: Said | Ended) -> None:
        process = self._processes.get(message.worker)
        if process is None or process.code is not None:
            raise MessageError(f"is of worker {message.worker}, which does not run there")
        if isinstance(message, Ended):
            process.code = message.code
        else:
            self._take(message.worker, message.message)


class _OtherProcess:
    def __init__(self, node: OtherNode, worker: int) -> None:
        self._node, self._worker = node, worker
        # How it ended, as its launcher says; None before.
        self.code: int | None = None
        # When it counts as ended with its machine; `send_signal` sets it once, with SIGKILL.
        self._deadline = float("inf")

    def poll(self) -> int | None:
        if self.code is None:
            self._node.lines.read()
        return -signal.SIGKILL if self.code is None and self._node.is_lost else self.code

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGKILL:
            self._deadline = min(self._deadline, time.monotonic() + KILL_S)
        self._node.lines.send(Signal(self._worker, sig))

    def end(self) -> None:
        """Takes the whole machine for lost if its launcher does not say in time that the process has ended."""
        self.send_signal(signal.SIGKILL)
        while self.poll() is None:
            if time.monotonic() > self._deadline:
                self._node.lines.end(f"its launcher did not end a process in {KILL_S:g} s")
            self._node.lines.read(_POLL_S)


Node = ThisNode | OtherNode
