"""Starts and kills the processes of ranks, and says how one ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from . import signals as signal_handling

Process = subprocess.Popen[bytes]

_HINTS = {
    signal.SIGKILL: " (by the system, where memory ran out, or by a person)",
    signal.SIGBUS: " (a file that it had mapped became shorter, or the disk of shared memory is full)",
}


def start_rank(command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()) -> Process:
    """Starts this Python with a command line, in a session of its own. It ends with this process.

    Args:
        environment: added to that of this process.
        fds: open files that it inherits.
    """
    guard = [sys.executable, "-I", signal_handling.__file__, str(os.getpid())]
    return subprocess.Popen(
        [*guard, sys.executable, *command],
        env={**os.environ, **environment},
        pass_fds=fds,
        start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone, which passes it on
    )


def kill(processes: Iterable[Process]) -> None:
    """Kills the processes that have not ended, with those that they started."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # of its own session, and not reaped: the group exists
            process.wait()


def kill_left_over(process: Process) -> None:
    """Kills what an ended process had started, such as workers that read data."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
