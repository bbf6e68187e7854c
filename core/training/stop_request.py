"""SIGTERM and Ctrl-C as a request that a run answers between two steps, when it can save."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

REPEAT_AFTER_S = 0.5
"""A launcher may pass on a Ctrl-C that the terminal has sent already: only a later one is a second request. As long as
the `ECHO_S` of `launch.signals`, or its second signal would be taken for an echo."""


class StopRequest:
    """Notes SIGTERM and SIGINT while it is entered; a second signal some seconds later interrupts at once.

    `requested` is this rank's own knowledge: ranks must agree on it before one of them acts.
    """

    def __init__(self) -> None:
        self.requested = False
        self.signal_name = ""
        self._first_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.requested and now - self._first_at > REPEAT_AFTER_S:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested, self._first_at = True, now
            self.signal_name = signal.Signals(number).name


def ignore_stop_signals(_: int = 0) -> None:
    """For processes that read data: they end with their rank, not with the signal that asks the rank to save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
