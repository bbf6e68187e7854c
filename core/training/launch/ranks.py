"""Starts the ranks of a program on its machines, waits for them, and passes signals on to them.

On one machine this replaces ``torchrun``, whose environment variables it sets. It differs in its output: a mistake in
the flags is one line, printed by a rank, and that rank's status; a crash is the traceback of the rank that crashed.
Ctrl-C, SIGTERM and SIGHUP are passed on and waited for, so that a run can save; a second signal ends all ranks at
once, a third one kills them. No rank outlives its launcher. Stores and collectives of one machine listen on the
loopback interface only. Several machines need a policy for lost ranks, or ``torchrun``, or Slurm.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime, timezone

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

from ...base.errors import ConfigError
from .entry import RUN_STARTED, USER_ERROR_STATUS
from .nodes import Joining, follow
from .processes import Process, how_it_ended, kill, say, start_rank
from .signals import SignalCount
from .supervisor import LostRankPolicy, Supervisor, memory_for_copies

GRACE_S = 5.0
"""Time for the other ranks to end by themselves after one has failed."""

SECOND_SIGNAL_GRACE_S = 1.0
"""Time for ranks to end after a second signal: a rank that waits for another one cannot react."""

_POLL_S = 0.05


def run_ranks(
    num_ranks: int,
    command: list[str],
    *,
    max_restarts: int = 0,
    policy: LostRankPolicy | None = None,
    num_nodes: int = 1,
    node: int = 0,
    address: tuple[str, int] = ("127.0.0.1", 0),
) -> int:
    """Runs ranks of this Python with a command line that begins with a script or ``-m module``.

    Args:
        num_ranks: on this machine.
        max_restarts: how many times to start all ranks again after a failure, except for a user's mistake (status 2)
            and a signal to the launcher. Ranks see TORCHELASTIC_RESTART_COUNT, as under ``torchrun``.
        policy: how survivors of a lost rank go on in their processes. None: all ranks end.
        num_nodes: machines; more than one with a policy alone.
        node: number of this machine. Number 0 decides for all.
        address: where launchers of other machines reach that of number 0.

    Returns:
        the exit status: 0, or that of the first rank to fail.

    Raises:
        ConfigError: the machines do not find each other, or are one.
    """
    started = f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}"
    with ExitStack() as stack:
        signals = stack.enter_context(SignalCount())
        copies = stack.enter_context(memory_for_copies(needed=policy is not None))
        if node > 0:
            return follow(node, num_ranks, command, address, copies, signals, policy.kind if policy else "")
        supervisor = None
        if policy is not None:
            joining = (
                Joining(stack.enter_context(_listener(address)), num_nodes, policy.kind) if num_nodes > 1 else None
            )
            supervisor = Supervisor(policy, num_ranks, command, joining)
            supervisor.join(signals)
        status, reason = 1, ""
        for restarts in range(max_restarts + 1):
            if supervisor is not None and not supervisor.has_ranks:
                reason = "no machine is left to run ranks"
                break
            environment = {
                "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
                "TORCHELASTIC_RESTART_COUNT": str(restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
                RUN_STARTED: started,
                **copies,
            }
            status, reason = _run_once(num_ranks, command, environment, signals, supervisor, address[0])
            if status in (0, USER_ERROR_STATUS) or signals.count or restarts == max_restarts:
                break
            say(
                f"{reason or 'the ranks failed'}; starting them again, to continue from the last good "
                f"checkpoint (restart {restarts + 1} of {max_restarts})"
            )
        if supervisor is not None:
            supervisor.close(status)
    if reason:
        say(reason)
    return status


_Ended = tuple[int, str]
"""Exit status, and why the ranks ended, if they could not print it themselves, or empty."""


def _listener(address: tuple[str, int]) -> socket.socket:
    """Returns a socket that listens at an address: on the loopback interface alone, or on all."""
    try:
        return socket.create_server((address[0] if _is_loopback(address[0]) else "", address[1]))
    except OSError as error:
        raise ConfigError(f"--master-port {address[1]} cannot be used ({error}); choose another one") from None


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.")


def _run_once(
    num_ranks: int,
    command: list[str],
    environment: dict[str, str],
    signals: SignalCount,
    supervisor: Supervisor | None,
    host: str,
) -> _Ended:
    """Starts all ranks and waits until the last one has ended."""
    with _listener((host, 0)) as listener:
        port = listener.getsockname()[1]
        common = _common_environment(num_ranks, host, port) | environment
        # Serve the store on a socket that is open before any rank starts, so that no other program can take the port.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    ranks: Sequence[Process] = []
    try:
        if supervisor is None:
            places = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
            ranks = [start_rank(command, place) for place in places]
        else:
            ranks = supervisor.watch(common, signals)
        return wait_for_all(ranks, signals)
    finally:
        kill(ranks)
        if supervisor is not None:
            supervisor.end_processes()
        del store


def _common_environment(num_ranks: int, host: str, port: int) -> dict[str, str]:
    common = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # use the launcher's store, which outlives a rank that fails
    }
    defaults = {"OMP_NUM_THREADS": "1"}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None and _is_loopback(host):
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
    failed = [(rank, code) for rank, process in enumerate(ranks) if (code := process.poll())]
    # Of ranks that fail at the same time, one ended by a signal says more than those that lost a partner.
    return min(failed, key=lambda item: item[1], default=None)
