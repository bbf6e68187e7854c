"""Starts the ranks of a program on this machine, waits for them, and passes signals on to them.

On one machine this replaces ``torchrun``, whose environment variables it sets. It differs in its output: a mistake in
the flags is one line, printed by a rank, and that rank's status; a crash is the traceback of the rank that crashed.
Ctrl-C, SIGTERM and SIGHUP are passed on and waited for, so that a run can save; a second signal ends all ranks at
once, a third one kills them. No rank outlives its launcher. Stores and collectives listen on the loopback interface
only. Several machines need ``torchrun`` or Slurm.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from datetime import datetime, timezone

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

from . import signals as signal_handling
from .entry import RUN_STARTED, USER_ERROR_STATUS
from .signals import SignalCount

GRACE_S = 5.0
"""Time for the other ranks to end by themselves after one has failed."""

SECOND_SIGNAL_GRACE_S = 1.0
"""Time for ranks to end after a second signal: a rank that waits for another one cannot react."""

_POLL_S = 0.05
_HINTS = {
    signal.SIGKILL: " (by the system, where memory ran out, or by a person)",
    signal.SIGBUS: " (a file that it had mapped became shorter, or the disk of shared memory is full)",
}


def run_ranks(num_ranks: int, command: list[str], *, max_restarts: int = 0) -> int:
    """Runs ranks of this Python with a command line that begins with a script or ``-m module``.

    Args:
        max_restarts: how many times to start all ranks again after a failure, except for a user's mistake (status 2)
            and a signal to the launcher. Ranks see TORCHELASTIC_RESTART_COUNT, as under ``torchrun``.

    Returns:
        the exit status: 0, or that of the first rank to fail.
    """
    started = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    with SignalCount() as signals:
        for restarts in range(max_restarts + 1):
            environment = {
                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
                RUN_STARTED: started,
            }
            status, reason = _run_once(num_ranks, command, environment, signals)
            if status in (0, USER_ERROR_STATUS) or signals.count or restarts == max_restarts:
                break
            _say(
                f"{reason or 'the ranks failed'}; starting them again, to continue from the last good "
                f"checkpoint (restart {restarts + 1} of {max_restarts})"
            )
    if reason:
        _say(reason)
    return status


_Ended = tuple[int, str]
"""Exit status, and why the ranks ended, if they could not print it themselves, or empty."""


def _run_once(num_ranks: int, command: list[str], environment: dict[str, str], signals: SignalCount) -> _Ended:
    """Starts all ranks and waits until the last one has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        common = _common_environment(num_ranks, port) | environment
        # Serve the store on a socket that is open before any rank starts, so that no other program can take the port.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    guard = [sys.executable, "-I", signal_handling.__file__, str(os.getpid())]
    ranks = [
        subprocess.Popen(
            [*guard, sys.executable, *command],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone, which passes it on
        )
        for rank in range(num_ranks)
    ]
    try:
        return _wait(ranks, signals)
    finally:
        _kill(ranks)
        del store


def _common_environment(num_ranks: int, port: int) -> dict[str, str]:
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # use the launcher's store, which outlives a rank that fails
    }
    defaults = {"OMP_NUM_THREADS": "1"}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None:
        # By default both choose an interface that other machines may reach.
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return common | {name: value for name, value in defaults.items() if name not in os.environ}


def _wait(ranks: list[subprocess.Popen[bytes]], signals: SignalCount) -> _Ended:
    """Waits for all ranks. After one has failed, ends the others after a grace period."""
    deadline = float("inf")
    first: tuple[int, int] | None = None
    passed_on = 0
    while any(process.poll() is None for process in ranks):
        if first is None and (first := _first_failure(ranks)) is not None:
            deadline = time.monotonic() + (0.0 if signals.ended_by(first[1]) else GRACE_S)
        if passed_on < signals.count:
            passed_on = signals.count
            if passed_on == 2:
                deadline = min(deadline, time.monotonic() + SECOND_SIGNAL_GRACE_S)
            for process in ranks:
                process.send_signal(signals.sent)
        if time.monotonic() > deadline or signals.count > 2:
            _kill(ranks)
            break
        time.sleep(_POLL_S)
    first = first or _first_failure(ranks)
    if signals.count > 1:
        return 128 + signals.number, f"ended at once by a second {signals.name}, without saving"
    if first is None:
        return 0, ""
    rank, code = first
    if signals.ended_by(code):
        return 128 + signals.number, f"ended by {signals.name} before there was anything to save"
    if code < 0:
        ended_by = signal.Signals(-code)
        return 128 - code, f"rank {rank} was ended by {ended_by.name}{_HINTS.get(ended_by, '')}"
    return code, ""


def _kill(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Kills the ranks that have not ended, with the processes that they started."""
    for process in ranks:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # of its own session, and not reaped: the group exists
            process.wait()


def _first_failure(ranks: list[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    failed = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    # Of ranks that fail at the same time, one ended by a signal says more than those that lost a partner.
    return min(failed, key=lambda item: item[1], default=None)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
