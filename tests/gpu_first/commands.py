"""Runs a command with a time limit, and passes on what it prints while it prints it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu_machine import ROOT

GRACE_S = 15.0
"""Between the signal that asks a command to end and the one that ends it."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: str
    """``passed``, ``failed``, ``timed out`` or ``not run``."""
    seconds: float = 0.0
    why: str = ""
    """Of any other status than ``passed``."""


def run_command(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str], write: Callable[[str], None]
) -> Outcome:
    """Runs a command in the root of the repository until it ends or its time is over, then ends all its processes.

    Args:
        write: takes each line that it prints, on both streams. Called by a thread of its own.

    Raises:
        BaseException: what interrupts the wait, once the processes have ended.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # its process group has the ranks that it starts, so that one signal reaches all
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
        reader.join(GRACE_S)  # a process that left the group may hold the pipe open
    seconds = round(time.monotonic() - started, 1)
    if is_over:
        return Outcome("timed out", seconds, f"its limit of {limit_s / 60:g} min is over")
    if process.returncode:
        return Outcome("failed", seconds, f"status {process.returncode}")
    return Outcome("passed", seconds)


def _pass_on(process: subprocess.Popen[str], write: Callable[[str], None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        write(line)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a command's process group."""
    for signum, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        if process.poll() is not None and not _has_group(process.pid):
            return
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (process.poll() is None or _has_group(process.pid)):
            time.sleep(0.05)


def _has_group(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def without_a_test(report: Path) -> str:
    """Returns why a report of pytest (JUnit's format) shows no test that passed; "" if there is one."""
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return "it left no report of its tests"
    tests = skipped = 0
    for suite in suites:
        tests += int(suite.get("tests", 0))
        skipped += int(suite.get("skipped", 0))
    return "" if tests > skipped else f"no test ran: {skipped} of {tests} were skipped"
