"""Starts, kills and signals the processes of ranks, and lets a run take a signal as a request to stop.

Run as a script, ends a process with its launcher: ``python -I processes.py LAUNCHER_PID command ...`` becomes that
command. Linux sends the signal when the launcher dies for any reason; the request survives ``exec``. If the launcher
died before the request, the parent's process id has changed, and the process ends itself. This file imports nothing of
the package, so that the time in between is short.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, TypeVar

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
    guard = [sys.executable, "-I", __file__, str(os.getpid())]
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


ECHO_S = 0.5
"""Signals within this time count as one: some programs send a signal to a process and to its group, and a launcher may
pass on a Ctrl-C that the terminal has already sent. A run that waited longer would take the launcher's second signal
for an echo."""

Self = TypeVar("Self", bound="_SignalHandler")


class _SignalHandler:
    """Calls `_note` for signals while it is entered, and restores their handlers on leaving."""

    numbers: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}  # handlers to restore; set on entering, used on leaving

    def __enter__(self: Self) -> Self:
        for number in self.numbers:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # keep nohup's setting
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        raise NotImplementedError


class SignalCount(_SignalHandler):
    """Counts SIGTERM, SIGINT and SIGHUP while it is entered. The launcher passes them on to the ranks."""

    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        """Signals so far, without echoes. `_note` counts them, in the signal handler."""
        self.number = 0
        """Number of the last signal, 0 before the first. `_note` sets it."""
        self._at = -ECHO_S  # time of the last signal, echoes included; `_note` sets it

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def sent(self) -> int:
        """The signal to pass on to ranks: SIGTERM for a hang-up, else the last one."""
        return signal.SIGTERM if self.number == signal.SIGHUP else self.number

    def ended_by(self, code: int) -> bool:
        """Returns whether an exit code means that the signal passed on ended a rank, which had no handler."""
        return self.count > 0 and code == -self.sent

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._at > ECHO_S:
            self.count, self.number = self.count + 1, number
        self._at = now


class StopRequest(_SignalHandler):
    """Records SIGTERM and SIGINT while it is entered. A run reads it between two steps, when it can save. A second
    signal, no echo of the first, interrupts at once.

    `requested` is known on this rank only: ranks must agree on it before one of them acts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requested = False  # the first signal sets it, in its handler; never cleared
        self.signal_name = ""  # name of the first signal; valid once `requested`
        self._first_at = 0.0  # time of the first signal; valid once `requested`

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._first_at > ECHO_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._first_at = True, now
            self.signal_name = signal.Signals(number).name


def ignore_stop_signals(_: int = 0) -> None:
    """Ignores stop signals in data workers, which end with their rank, not with the signal that makes it save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, of process id `parent`, dies. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
