"""Signals become requests; a second one, later than a launcher's echo, interrupts."""

from __future__ import annotations

import os
import signal

import pytest

from core.training.launch.signals import ECHO_S, StopRequest


def _signals_come_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a second signal come so many seconds after the first."""
    now = iter([10.0, 10.0 + seconds])
    monkeypatch.setattr("time.monotonic", lambda: next(now))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_an_echo_ignored(number, monkeypatch):
    _signals_come_after(ECHO_S - 0.1, monkeypatch)
    before = signal.getsignal(number)
    with StopRequest() as request:
        assert not request.requested
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert request.requested and request.signal_name == number.name
    assert signal.getsignal(number) is before


def test_a_second_signal_interrupts_at_once(monkeypatch):
    _signals_come_after(ECHO_S + 0.1, monkeypatch)
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
