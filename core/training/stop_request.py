"""Turns SIGTERM and Ctrl-C into a request that a run reads between two steps, when it can save."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

REPEAT_AFTER_S = 0.5
"""A launcher may pass on a Ctrl-C that the terminal has already sent: only a signal after this time is a second
request. Equal to `launch.signals.ECHO_S`; a longer time would take the launcher's second signal for an echo."""


class StopRequest:
    """Records SIGTERM and SIGINT while it is entered; a second, later signal interrupts at once.

    `requested` is known on this rank only: ranks must agree on it before one of them acts.
    """

    def __init__(self) -> None:
        self.requested = False  # the first signal sets it, in its handler; never cleared
        self.signal_name = ""  # name of the first signal; valid once `requested`
        self._first_at = 0.0  # time of the first signal; valid once `requested`
        self._before: dict[signal.Signals, Any] = {}  # handlers to restore; set on entering, used on leaving

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
    """Ignores stop signals in data workers, which end with their rank, not with the signal that makes it save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
