"""Counts signals to a launcher, so that it can pass them on to the ranks that it waits for."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

ECHO_S = 0.5
"""Signals within this time count as one: some programs send a signal to a process and to its group."""


class SignalCount:
    """Counts SIGTERM, SIGINT and SIGHUP while it is entered; the launcher passes them on to the ranks."""

    def __init__(self) -> None:
        self.count = 0
        """Signals so far, without echoes. `_note` counts them, in the signal handler."""
        self.number = 0
        """Number of the last signal; 0 before the first. `_note` sets it."""
        self._at = -ECHO_S  # time of the last signal, echoes included; `_note` sets it
        self._before: dict[signal.Signals, Any] = {}  # handlers to restore; set on entering, used on leaving

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

    def __enter__(self) -> SignalCount:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # keep nohup's setting
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._at > ECHO_S:
            self.count, self.number = self.count + 1, number
        self._at = now
