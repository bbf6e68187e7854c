"""Starts, kills and signals the processes of ranks, and lets a run take a signal as a request to stop.

Run as a script, ends a process with its launcher: ``python -I processes.py LAUNCHER_PID command ...`` becomes that
command. Linux sends the signal when the launcher dies for any reason; the request survives ``exec``. If the launcher
died before the request, the parent's process id has changed, and the process ends itself. This file imports nothing of
the package, so that the time in between is short.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (by the system, where memory ran out, or by a person)",
    signal.SIGBUS: " (a file that it had mapped became shorter, or the disk of shared memory is full)",
}


class Process(Protocol):
    """A rank's process, on this machine or on another launcher's."""

    def poll(self) -> int | None:
        """Returns its exit status, or minus the signal that ended it. None before its end."""

    def send_signal(self, sig: int, /) -> None:
        """Sends a signal. SIGKILL goes to the process's children too, such as workers that read data."""

    def end(self) -> None:
        """Kills the process and its children, and waits for `KILL_S` at most. Then the process counts as ended."""


KILL_S = 5.0
"""How long a process that was killed is waited for: one that waits in the kernel, for a disk or a device, may stay."""


class LocalProcess:
    """A process of this machine, in a session of its own.

    Args:
        arguments: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **arguments: Any) -> None:
        self._process = subprocess.Popen(command, **arguments, start_new_session=True)
        self.pid = self._process.pid
        # How it ended; `poll` and `end` set it once. The process is not reaped before `end`: until then no other one
        # gets its number, nor a process group that of its session.
        self._code: int | None = None
        # When it counts as ended all the same; `send_signal` sets it once, with SIGKILL.
        self._deadline = float("inf")

    def poll(self) -> int | None:
        if self._code is not None:
            return self._code
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            self._code = self._process.poll()
        elif (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            self._code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._code

    def send_signal(self, sig: int) -> None:
        if sig == signal.SIGKILL:
            self._deadline = min(self._deadline, time.monotonic() + KILL_S)
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if sig == signal.SIGKILL else os.kill)(self.pid, sig)

    def end(self) -> None:
        self.send_signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(self._deadline - time.monotonic(), 0.0))
        if self.poll() is None:
            self._code = -signal.SIGKILL
            say(f"process {self.pid} was killed and does not end: it waits in the kernel, for a disk or a device")


def start_rank(command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()) -> LocalProcess:
    """Starts this Python with a command line, in a session of its own. It ends with this process.

    Args:
        environment: added to that of this process.
        fds: open files that it inherits.
    """
    guard = [sys.executable, "-I", __file__, str(os.getpid())]
    return LocalProcess([*guard, sys.executable, *command], env={**os.environ, **environment}, pass_fds=fds)


def kill(processes: Iterable[Process]) -> None:
    """Kills processes, with those that they started: also what one has left that failed.

    One that ended with 0 may have left what is to go on, as an upload.
    """
    killed = [process for process in processes if process.poll() != 0]
    for process in killed:  # all of them before the first is waited for
        process.send_signal(signal.SIGKILL)
    for process in killed:
        process.end()


def how_it_ended(rank: int, code: int) -> str:
    """Says how the process of a rank ended, given its return code."""
    if code == 0:
        return f"rank {rank} ended with status 0 before its program had"
    if code > 0:
        return f"rank {rank} failed with status {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"rank {rank} was ended by {names.get(-code, f'signal {-code}')}{_HINTS.get(-code, '')}"


_ROOM_S = 1.0
"""How long a line waits for a reader, before it is dropped: ranks and other launchers wait for what is next."""
_PART, _ASCII_PART = 400, 4000
"""Characters that a pipe with room takes at once, without a wait: a page. Others than ASCII have 10 bytes at most."""


def say(line: str) -> None:
    """Writes a line of the launcher's, if there is still an output for it."""
    with suppress(OSError, ValueError, AttributeError):  # a closed pipe, a full disk, a closed or absent stream
        text = f"{line}\n"
        length = _ASCII_PART if text.isascii() else _PART
        while text and _has_room(sys.stderr):
            sys.stderr.write(text[:length])
            sys.stderr.flush()
            text = text[length:]


def _has_room(stream: Any) -> bool:
    """Returns whether a stream takes a line, at once or soon. One without a file does."""
    with suppress(OSError, ValueError):
        return is_ready(stream.fileno(), select.POLLOUT, _ROOM_S)
    return True


def is_ready(file: int, event: int, seconds: float) -> bool:
    """Returns whether an open file takes or has data (`select.POLLOUT` or `POLLIN`), after waiting for so long."""
    poll = select.poll()  # `select` takes no file of number 1024 or above
    poll.register(file, event)
    return bool(poll.poll(1000 * seconds))


class _Output:
    """A stream whose reader may go away, or whose disk may be full: what cannot be written is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def keep_going_without_output() -> None:
    """Lets no write to stdout or stderr end this process from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _Output):
            setattr(sys, name, _Output(stream if stream is not None else Path(os.devnull).open("w")))  # noqa: SIM115


def open_standard_files() -> None:
    """Opens stdin, stdout and stderr where they are closed, on nothing: else the next socket would be one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


ECHO_S = 0.5
"""Signals within this time count as one: some programs send a signal to a process and to its group, and a launcher may
pass on a Ctrl-C that the terminal has already sent. A run that waited longer would take the launcher's second signal
for an echo."""


class _SignalHandler:
    """Calls `_note` for signals while it is entered, and restores their handlers on leaving."""

    numbers: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}  # handlers to restore; set on entering, used on leaving

    def __enter__(self) -> Self:
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
        self._end: threading.Timer | None = None  # ends the launcher after a third signal; `_note` sets it once

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
        if self.count > 2 and self._end is None:  # even if something else is waited for; ranks end with this process
            self._end = threading.Timer(2 * KILL_S, os._exit, [128 + number])
            self._end.daemon = True
            self._end.start()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._end is not None:
            self._end.cancel()


class StopRequest(_SignalHandler):
    """Records SIGTERM and SIGINT while it is entered. A run reads it between two steps, when it can save. A second
    signal, no echo of the first, interrupts at once.

    `requested` is known on this rank only: ranks must agree on it before one of them acts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requested = False  # the first signal sets it, in its handler
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
