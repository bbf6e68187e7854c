"""Starts the ranks of a program on this machine, waits for them, and passes signals on to them.

On one machine this replaces ``torchrun``, whose environment variables it sets. It differs in its output: a mistake in
the flags is one line, printed by a rank, and that rank's status; a crash is the traceback of the rank that crashed.
Ctrl-C, SIGTERM and SIGHUP are passed on and waited for, so that a run can save; a second signal ends all ranks at
once, a third one kills them. No rank outlives its launcher. Stores and collectives listen on the loopback interface
only. Several machines need ``torchrun`` or Slurm.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import datetime, timezone

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

from .entry import RUN_STARTED, USER_ERROR_STATUS
from .generations import LAUNCHER_FD
from .processes import Process, how_it_ended, kill, say, start_rank
from .signals import SignalCount
from .supervisor import LostRankPolicy, Supervisor, memory_for_copies

GRACE_S = 5.0
"""Time for the other ranks to end by themselves after one has failed."""

SECOND_SIGNAL_GRACE_S = 1.0
"""Time for ranks to end after a second signal: a rank that waits for another one cannot react."""

_POLL_S = 0.05


def run_ranks(
    num_ranks: int, command: list[str], *, max_restarts: int = 0, policy: LostRankPolicy | None = None
) -> int:
    """Runs ranks of this Python with a command line that begins with a script or ``-m module``.

    Args:
        max_restarts: how many times to start all ranks again after a failure, except for a user's mistake (status 2)
            and a signal to the launcher. Ranks see TORCHELASTIC_RESTART_COUNT, as under ``torchrun``.
        policy: how survivors of a lost rank go on in their processes. None: all ranks end.

    Returns:
        the exit status: 0, or that of the first rank to fail.
    """
    started = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    supervisor = Supervisor(policy) if policy is not None else None
    with SignalCount() as signals, memory_for_copies(needed=policy is not None) as copies:
        for restarts in range(max_restarts + 1):
            environment = {
                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
                RUN_STARTED: started,
                **copies,
            }
            status, reason = _run_once(num_ranks, command, environment, signals, supervisor)
            if status in (0, USER_ERROR_STATUS) or signals.count or restarts == max_restarts:
                break
            say(
                f"{reason or 'the ranks failed'}; starting them again, to continue from the last good "
                f"checkpoint (restart {restarts + 1} of {max_restarts})"
            )
    if reason:
        say(reason)
    return status


_Ended = tuple[int, str]
"""Exit status, and why the ranks ended, if they could not print it themselves, or empty."""


def _run_once(
    num_ranks: int,
    command: list[str],
    environment: dict[str, str],
    signals: SignalCount,
    supervisor: Supervisor | None = None,
) -> _Ended:
    """Starts all ranks and waits until the last one has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        common = _common_environment(num_ranks, port) | environment
        # Serve the store on a socket that is open before any rank starts, so that no other program can take the port.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def start(rank: int, fd: int | None = None) -> Process:
        place = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if fd is None:
            return start_rank(command, place)
        return start_rank(command, place | {LAUNCHER_FD: str(fd)}, (fd,))

    ranks: Sequence[Process] = []
    try:
        if supervisor is None:
            ranks = [start(rank) for rank in range(num_ranks)]
        else:
            ranks = supervisor.watch(num_ranks, start, signals)
        return wait_for_all(ranks, signals)
    finally:
        kill(ranks)
        if supervisor is not None:
            supervisor.close()
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


def wait_for_all(ranks: Sequence[Process], signals: SignalCount) -> _Ended:
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
            kill(ranks)
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
        return 128 - code, how_it_ended(rank, code)
    return code, ""


def _first_failure(ranks: Sequence[Process]) -> tuple[int, int] | None:
    failed = [(rank, process.returncode) for rank, process in enumerate(ranks) if process.poll()]
    # Of ranks that fail at the same time, one ended by a signal says more than those that lost a partner.
    return min(failed, key=lambda item: item[1], default=None)
