"""Starts and kills the processes of ranks, and says how one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from . import signals as signal_handling

_HINTS = {
    signal.SIGKILL: " (by the system, where memory ran out, or by a person)",
    signal.SIGBUS: " (a file that it had mapped became shorter, or the disk of shared memory is full)",
}


class Process(Protocol):
    """A rank's process, on this machine or on that of another launcher."""

    @property
    def returncode(self) -> int | None:
        """None until it has ended and `poll` was called."""

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int, /) -> None: ...

    def end(self) -> None:
        """Kills it, with what it has started, such as workers that read data."""


class LocalProcess(subprocess.Popen[bytes]):
    """A process of this machine, in a session of its own."""

    def end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


def start_rank(command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()) -> LocalProcess:
    """Starts this Python with a command line, in a session of its own. It ends with this process.

    Args:
        environment: added to that of this process.
        fds: open files that it inherits.
    """
    guard = [sys.executable, "-I", signal_handling.__file__, str(os.getpid())]
    return LocalProcess(
        [*guard, sys.executable, *command],
        env={**os.environ, **environment},
        pass_fds=fds,
        start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone, which passes it on
    )


def kill(processes: Iterable[Process]) -> None:
    """Kills the processes that have not ended, with those that they started."""
    for process in processes:
        if process.poll() is None:
            process.end()


def how_it_ended(rank: int, code: int) -> str:
    """Says how the process of a rank ended, given its return code."""
    if code >= 0:
        return f"rank {rank} failed with status {code}"
    number = signal.Signals(-code)
    return f"rank {rank} was ended by {number.name}{_HINTS.get(number, '')}"


def say(line: str) -> None:
    """Writes a line of the launcher's."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
