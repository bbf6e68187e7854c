"""Starts the ranks of a program on this machine, waits for them, and passes signals on to them.

Ranks are processes of torch's elastic agent (`torch.distributed.elastic.multiprocessing`). On one machine this
replaces ``torchrun``, whose environment variables it sets. It differs in its output: a mistake in the flags is one
line, printed by a rank, and that rank's status; a crash is the traceback of the rank that crashed. Ctrl-C, SIGTERM and
SIGHUP are passed on and waited for, so that a run can save; a second signal ends all ranks at once, a third one kills
them. No rank outlives its launcher. Stores and collectives listen on the loopback interface only. Several machines
need ``torchrun`` or Slurm.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

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
    with SignalCount() as signals, tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        for restarts in range(max_restarts + 1):
            environment = {
                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
                RUN_STARTED: started,
            }
            ended = _run_once(num_ranks, command, environment, signals, Path(folder))
            if ended.status in (0, USER_ERROR_STATUS) or signals.count or restarts == max_restarts:
                break
            _say(
                f"{ended.reason or 'the ranks failed'}; starting them again, to continue from the last good "
                f"checkpoint (restart {restarts + 1} of {max_restarts})"
            )
    if ended.reason:
        _say(ended.reason)
    return ended.status


@dataclass
class _Ended:
    """The outcome of one start of the ranks."""

    status: int
    reason: str = ""
    """Why the ranks ended, if they could not print it themselves; else empty."""


def _run_once(
    num_ranks: int, command: list[str], environment: dict[str, str], signals: SignalCount, folder: Path
) -> _Ended:
    """Starts all ranks and waits until the last one has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        common = _common_environment(num_ranks, port) | environment
        # Serve the store on a socket that is open before any rank starts, so that no other program can take the port.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    guard = [sys.executable, "-I", signal_handling.__file__, str(os.getpid())]
    arguments = (*guard[1:], sys.executable, *command)
    with _agent_leaves_signals_alone():
        context = start_processes(
            name="ranks",
            entrypoint=guard[0],
            args=dict.fromkeys(range(num_ranks), arguments),
            envs={rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)},
            logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        )
    try:
        return _wait(cast(SubprocessContext, context), signals)
    finally:
        context.close(signal.SIGKILL, timeout=int(GRACE_S))
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


@contextmanager
def _agent_leaves_signals_alone() -> Iterator[None]:
    """Restricts torch's agent, which installs signal handlers that raise, to SIGQUIT. Restores it on exit."""
    name, before = "TORCHELASTIC_SIGNALS_TO_HANDLE", signal.getsignal(signal.SIGQUIT)
    previous = os.environ.get(name)
    os.environ[name] = "SIGQUIT"
    try:
        yield
    finally:
        signal.signal(signal.SIGQUIT, before)
        del os.environ[name]
        if previous is not None:
            os.environ[name] = previous


def _wait(context: SubprocessContext, signals: SignalCount) -> _Ended:
    """Waits for all ranks. After one has failed, ends the others after a grace period."""
    ranks = {rank: handler.proc for rank, handler in context.subprocess_handlers.items()}
    deadline = float("inf")
    first: tuple[int, int] | None = None
    passed_on = 0
    while any(process.poll() is None for process in ranks.values()):
        if first is None and (first := _first_failure(ranks)) is not None:
            deadline = time.monotonic() + (0.0 if signals.ended_by(first[1]) else GRACE_S)
        if passed_on < signals.count:
            passed_on = signals.count
            if passed_on == 2:
                deadline = min(deadline, time.monotonic() + SECOND_SIGNAL_GRACE_S)
            for process in ranks.values():
                process.send_signal(signals.sent)
        if time.monotonic() > deadline or signals.count > 2:
            context.close(signal.SIGKILL, timeout=int(GRACE_S))
            break
        time.sleep(_POLL_S)
    first = first or _first_failure(ranks)
    if signals.count > 1:
        return _Ended(128 + signals.number, f"ended at once by a second {signals.name}, without saving")
    if first is None:
        return _Ended(0)
    rank, code = first
    if signals.ended_by(code):
        return _Ended(128 + signals.number, f"ended by {signals.name} before there was anything to save")
    if code < 0:
        ended_by = signal.Signals(-code)
        return _Ended(128 - code, f"rank {rank} was ended by {ended_by.name}{_HINTS.get(ended_by, '')}")
    return _Ended(code)


def _first_failure(ranks: dict[int, Any]) -> tuple[int, int] | None:
    failed = [(rank, process.returncode) for rank, process in ranks.items() if process.poll()]
    # Of ranks that fail at the same time, one ended by a signal says more than those that lost a partner.
    return min(failed, key=lambda item: item[1], default=None)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
