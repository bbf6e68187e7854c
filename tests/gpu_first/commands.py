"""Runs a command with a time limit, and passes on what it prints while it prints it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_machine import ROOT

SIGNALS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
"""What ends a command, with the seconds that each gets. At an interrupt pytest still reports the tests that failed."""
ENDS_WITH_PARENT = ROOT / "core" / "training" / "launch" / "processes.py"


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: str
    """``passed``, ``failed``, ``timed out``, ``interrupted`` or ``not run``."""
    seconds: float = 0.0
    why: str = ""
    """Empty if it passed."""


def run_command(
    arguments: Sequence[str], limit_s: float, environment: Mapping[str, str], write: Callable[[str], None]
) -> Outcome:
    """Runs this Python in the root of the repository until it ends or its time is over, then ends all its processes.

    Args:
        arguments: of Python.
        write: takes each line that the command prints, on both streams. A thread of its own calls it.

    Raises:
        BaseException: what interrupts the wait, once the processes have ended.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        # The kernel ends it should this process be killed: a benchmark would keep the GPU's memory.
        [sys.executable, ENDS_WITH_PARENT, str(os.getpid()), sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=_begin_group,
    )
    reader = threading.Thread(target=_pass_on, args=(process, write), daemon=True)
    reader.start()
    is_over = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        is_over = True
    finally:
        _end(process)
        reader.join(5.0)  # a process that left the group may hold the pipe open
    seconds = round(time.monotonic() - started, 1)
    if is_over:
        return Outcome("timed out", seconds, f"its limit of {limit_s / 60:g} min is over")
    if process.returncode:
        return Outcome("failed", seconds, f"status {process.returncode}")
    return Outcome("passed", seconds)


def _begin_group() -> None:
    """Makes a process group, so that one signal reaches a command and its children; the session stays the caller's.

    A caller in the background may ignore interrupts, which would be inherited.
    """
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _pass_on(process: subprocess.Popen[str], write: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        write(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a command and what is left of its process group."""
    for signum, patience in SIGNALS:
        if process.poll() is not None and not living_members(process.pid):
            return
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (process.poll() is None or living_members(process.pid)):
            time.sleep(0.05)


def living_members(group: int) -> list[int]:
    """Returns the processes of a group that have not ended. Orphans stay zombies where no process waits for them."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:  # it has ended meanwhile
                continue
            state, _, its_group = text.rpartition(")")[2].split()[:3]  # after the name, which may have blanks
            if int(its_group) == group and state != "Z":
                members.append(int(entry.name))
    return members


def reason_for_no_test(report: Path) -> str:
    """Returns why a report of pytest (JUnit's format) shows no test that passed; "" if there is one."""
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return "it left no report of its tests"
    tests, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped"))
    return "" if tests > skipped else f"no test ran: {skipped} of {tests} were skipped"
