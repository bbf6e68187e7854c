"""Signals become requests, a second one interrupts, and ranks end with their launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from core.training.launch import processes
from core.training.launch.processes import ECHO_S, StopRequest


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux")
def test_a_parent_that_is_gone_already_is_noticed():
    command = [sys.executable, "-I", processes.__file__, "1", sys.executable, "-c", "print('ran')"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ended.returncode, ended.stdout) == (137, "")


def test_it_becomes_the_command_that_it_is_given():
    command = f"[sys.executable, '-I', {processes.__file__!r}, str(os.getpid()), sys.executable, '-c', "
    inner = f"import subprocess, sys, os; subprocess.run({command}'import sys; print(sys.argv)', 'a b'])"
    ended = subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True, timeout=600)
    assert ended.stdout == "['-c', 'a b']\n"
