"""Signals become requests, a second one interrupts, and ranks end with their launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from core.training.launch import processes
from core.training.launch.processes import ECHO_S, SignalCount, StopRequest


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


def test_a_line_that_nobody_reads_is_dropped(monkeypatch):
    monkeypatch.setattr(processes, "_ROOM_S", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", 0) as reader, os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
        processes.say("dropped")
        assert reader.read(4096) == b"x" * 4096
        processes.say("y" * 20_000)  # a pipe with room for a part of it
        assert set(reader.read(1 << 20)) == set(b"xy")
        processes.say("read")
        assert reader.read(100) == b"read\n"


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


def _child(text: str) -> processes.LocalProcess:
    return processes.start_rank(["-c", f"import os, subprocess, sys, time\n{text}"], {})


def _wait_for_end(process: processes.LocalProcess) -> int:
    while (code := process.poll()) is None:
        time.sleep(0.01)
    return code


def test_a_process_keeps_its_number_until_it_is_ended():
    process = _child("sys.exit(3)")
    assert _wait_for_end(process) == 3
    assert Path(f"/proc/{process.pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    process.end()
    assert process.poll() == 3 and not Path(f"/proc/{process.pid}").exists()


def test_no_other_process_is_killed_for_one_that_is_gone(monkeypatch):
    process = _child("sys.exit(0)")
    process.end()
    killed = []
    monkeypatch.setattr(os, "kill", lambda *arguments: killed.append(arguments))
    monkeypatch.setattr(os, "killpg", lambda *arguments: killed.append(arguments))
    process.send_signal(signal.SIGTERM)
    process.end()
    assert killed == []


def _has_ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or "Z" in stat.read_text().split(")")[1]  # its new parent may not have seen it


@pytest.mark.parametrize("code", [-9, 3, 0])
def test_what_a_failed_process_has_started_ends_with_it(tmp_path, code):
    started = tmp_path / "started"
    sleeps = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    process = _child(
        f"subprocess.Popen([sys.executable, '-c', {sleeps!r}])\n{code} < 0 or sys.exit({code})\ntime.sleep(9)"
    )
    while not (started.exists() and started.read_text()):
        time.sleep(0.01)
    if code < 0:
        os.kill(process.pid, signal.SIGKILL)
    assert _wait_for_end(process) == code
    processes.kill([process])
    assert process.poll() == code
    pid, until = int(started.read_text()), time.monotonic() + 60
    while code and not _has_ended(pid):
        assert time.monotonic() < until
    assert code or not _has_ended(pid)  # what it has left may go on
    if not code:
        process.end()


def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch, capsys):
    monkeypatch.setattr(processes, "KILL_S", 0.1)
    process = _child("time.sleep(600)")
    with monkeypatch.context() as without:
        without.setattr(os, "killpg", lambda *_: None)
        process.end()
    assert process.poll() == -9 and "it waits in the kernel" in capsys.readouterr().err
    os.killpg(process.pid, signal.SIGKILL)
    os.waitpid(process.pid, 0)


def test_a_third_signal_ends_a_launcher_in_any_wait(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(processes, "KILL_S", 0.05)
    monkeypatch.setattr(processes, "ECHO_S", -1.0)
    monkeypatch.setattr(os, "_exit", lambda status: status == 128 + signal.SIGTERM and ended.set())
    with SignalCount():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            assert not ended.is_set()
        assert ended.wait(60)
