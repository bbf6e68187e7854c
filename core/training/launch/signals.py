"""Signals to a launcher, counted, so that it can pass them on to the ranks that it waits for."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

ECHO_S = 0.5
"""Signals that follow one another more closely count as one: some programs send them to a process and its group."""


class SignalCount:
    """While it is entered, SIGTERM, SIGINT and SIGHUP are counted: whoever waits for the ranks passes them on."""

    def __init__(self) -> None:
        self.count = 0
        """Signals so far, echoes left out."""
        self.number = 0
        """The last one."""
        self._at = -ECHO_S
        self._before: dict[signal.Signals, Any] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def sent(self) -> int:
        """What ranks get of it: a hang-up asks the same of them as SIGTERM."""
        return signal.SIGTERM if self.number == signal.SIGHUP else self.number

    def ended_by(self, code: int) -> bool:
        """Whether a rank of this exit code was ended by what was passed on to it, for want of a handler."""
        return self.count > 0 and code == -self.sent

    def __enter__(self) -> SignalCount:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
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
