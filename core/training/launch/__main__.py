"""Starts the ranks of a program on its machines, waits for them, and passes signals on to them.

    python -m shardstack.training.launch --nproc-per-node 2 script.py --flags

On one machine this replaces ``torchrun``, whose environment variables it sets. It differs in its output: a mistake in
the flags is one line, printed by a rank, and that rank's status; a crash is the traceback of the rank that crashed.
Ctrl-C, SIGTERM and SIGHUP are passed on and waited for, so that a run can save; a second signal ends all ranks at
once, a third one kills them. No rank outlives its launcher. Stores and collectives of one machine listen on the
loopback interface only. Several machines need a policy for lost ranks, or ``torchrun``, or Slurm.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but left out of __all__

from ...base.command_line import CommandParser
from ...base.device import device_type
from ...base.errors import ConfigError
from ...base.text import rank_list
from ...rendezvous.environment import MOST_PORT
from ...rendezvous.job_secret import SECRET_FILE, is_loopback, job_secret, listen
from .copies_folder import memory_for_copies
from .entry import USER_ERROR_STATUS, add_flags
from .follower import Follower
from .joining import Job, LostRankPolicy
from .messages import MOST_RANKS, RUN_STARTED, STARTED_FORMAT
from .processes import SignalCount, kill, open_standard_files, say
from .supervisor import Supervisor, Worker

GRACE_S = 5.0
"""Time for the other ranks to end by themselves after one has failed."""

SECOND_SIGNAL_GRACE_S = 1.0
"""Time for ranks to end after a second signal: a rank that waits for another one cannot react."""

_FLAGS = "--master-addr", "--master-port"
_POLL_S = 0.05
_DESCRIPTION = "Starts a program's ranks, on this machine and others."


def main(arguments: Sequence[str], program: str = "python -m shardstack.training.launch", script: str = "") -> int:
    """Runs the ranks to their end. Returns the exit status: 0, or the status of the first rank to fail.

    Args:
        program: what usage errors call the launcher.
        script: the program that each rank runs, if `arguments` does not name it: they are the launcher's flags and the
            program's, mixed. There is then by default a rank for each GPU.
    """
    options = _parse(arguments, program, script)
    if options.secret_file:
        os.environ[SECRET_FILE] = str(Path(options.secret_file).absolute())  # for the ranks too
    try:
        return run_ranks(
            options.nproc_per_node,
            [*(["-m"] if options.m else []), options.script, *options.arguments],
            max_restarts=options.max_restarts,
            policy=LostRankPolicy(options.on_lost_rank, options.lost_rank_timeout, options.spare_processes),
            num_nodes=options.nnodes,
            node=options.node_rank,
            address=(options.master_addr, options.master_port),
            run=options.run_id,
        )
    except ConfigError as error:
        say(f"error: {error}")
        return USER_ERROR_STATUS


def _parse(arguments: Sequence[str], program: str, script: str = "") -> argparse.Namespace:
    parser = CommandParser(prog=program, description=_DESCRIPTION, allow_abbrev=not script)
    add_flags(parser, Path(__file__).with_name("flags.json"))
    if script:
        num_gpus = torch.cuda.device_count() if device_type() == "cuda" else 1
        parser.set_defaults(nproc_per_node=num_gpus, m=False, script=script)
        options = argparse.Namespace()
        _, options.arguments = parser.parse_known_args(arguments, options)
    else:
        parser.add_argument("-m", action="store_true", help="the program is a module, as for python")
        parser.add_argument("script", help="the program that each rank runs")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
        options = parser.parse_args(arguments)
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node-rank is {options.node_rank} and --nnodes {options.nnodes}; nodes count from 0")
    if options.nnodes > 1 and options.on_lost_rank == "restart":
        parser.error("--nnodes above 1 takes --on-lost-rank replace or shrink; to restart all ranks use torchrun")
    decides_alone = options.nnodes > 1 and options.node_rank == 0  # it may compute nothing, and be lost less likely
    bounds = {"nproc_per_node": (1 - decides_alone, MOST_RANKS), "spare_processes": (0, MOST_RANKS)}
    bounds |= {"max_restarts": (0, 10**9), "lost_rank_timeout": (0.001, 10**9), "master_port": (1, MOST_PORT)}
    for name, (least, most) in bounds.items():
        if not least <= (value := getattr(options, name)) <= most:
            parser.error(f"--{name.replace('_', '-')} is {value}; it takes {least} to {most}")
    if options.secret_file == "":
        parser.error("--secret-file is empty; give a file")
    if options.node_rank > 0 and options.spare_processes:
        parser.error("--spare-processes is for the launcher of --node-rank 0, which starts them on its machine")
    if options.on_lost_rank == "restart" and options.spare_processes:
        parser.error("--spare-processes is given without --on-lost-rank replace or shrink, which use them")
    return options


def run_ranks(
    num_ranks: int,
    command: Sequence[str],
    *,
    max_restarts: int = 0,
    policy: LostRankPolicy | None = None,
    num_nodes: int = 1,
    node: int = 0,
    address: tuple[str, int] = ("127.0.0.1", 0),
    run: str = "",
) -> int:
    """Runs ranks of this Python with a command line that begins with a script or ``-m module``.

    Returns the exit status: 0, or the status of the first rank to fail.

    Args:
        max_restarts: how many times to start all ranks again after a failure, except for a user's mistake (status 2)
            and a signal to the launcher. Ranks see TORCHELASTIC_RESTART_COUNT, as under ``torchrun``.
        policy: how survivors of a lost rank go on in their processes. None: all ranks end.
        num_ranks, num_nodes: ranks on this machine, and machines: several take a policy.
        node: number of this machine. Number 0 decides for all.
        address: where launchers of other machines reach that of number 0.
        run: names the job to the launchers of all its machines; empty takes the scheduler's number of it.

    Raises:
        ConfigError: the machines do not find each other, are one, or have no secret in common.
    """
    policy, status, reason = policy or LostRankPolicy(), 1, ""
    start_text = datetime.now(UTC).strftime(STARTED_FORMAT)
    job = Job.of(policy, command, job_secret(address[0]), run)
    open_standard_files()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # one that is ignored, as a parent may have set it, hides statuses
    with (
        SignalCount() as signals,
        memory_for_copies(is_needed=policy.kind != "restart") as copies,
        listen(address, _FLAGS) if num_nodes > 1 and node == 0 else nullcontext() as listener,
    ):
        if node > 0:
            return Follower(node, num_ranks, command, address, copies, signals, job).follow()
        supervisor = Supervisor(job, num_ranks, command, copies, listener, num_nodes, signals)
        try:
            supervisor.join()
            for restarts in range(max_restarts + 1):
                if not supervisor.has_ranks:
                    reason = "no machine is left to run ranks"
                    break
                environment = _environment(num_ranks, address[0], restarts, max_restarts)
                environment[RUN_STARTED] = supervisor.joining.started or start_text
                status, reason = _run_once(supervisor, environment, signals)
                if status in (0, USER_ERROR_STATUS) or signals.count or restarts == max_restarts:
                    break
                say(
                    f"{reason or 'the ranks failed'}; starting them again, to continue from the last good "
                    f"checkpoint (restart {restarts + 1} of {max_restarts})"
                )
        finally:
            supervisor.close(status)
    if reason:
        say(reason)
    return status


def _run_once(supervisor: Supervisor, environment: Mapping[str, str], signals: SignalCount) -> _Ended:
    """Starts all ranks and waits until the last one has ended."""
    host = environment["MASTER_ADDR"]
    with listen((host, 0)) as listener:
        port = listener.getsockname()[1]
        # Serve the store on a socket that is open before any rank starts, so that no other program can take the port.
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        return _wait_for_all(supervisor, supervisor.watch({**environment, "MASTER_PORT": str(port)}), signals)
    finally:
        supervisor.end_processes()
        del store


_Ended = tuple[int, str]
"""Exit status, and why the ranks ended, if they could not print it themselves, or empty."""


def _wait_for_all(supervisor: Supervisor, ranks: Sequence[Worker], signals: SignalCount) -> _Ended:
    """Waits for all ranks. After one has failed, ends the others after a grace period."""
    deadline, first = float("inf"), None
    passed_on = 0
    while not all(worker.has_ended for worker in ranks):
        if first is None and (first := _first_failure(ranks)) is not None:
            deadline = time.monotonic() + (0.0 if signals.ended_by(first[0]) else GRACE_S)
        if passed_on < signals.count:
            passed_on = signals.count
            if passed_on == 2:
                deadline = min(deadline, time.monotonic() + SECOND_SIGNAL_GRACE_S)
            for worker in ranks:
                worker.process.send_signal(signals.sent)
        if time.monotonic() > deadline or signals.count > 2:
            kill(worker.process for worker in ranks)
            break
        supervisor.read(_POLL_S)
    status, why = first or _first_failure(ranks) or (0, "")
    if signals.count > 1:
        return 128 + signals.number, f"ended at once by a second {signals.name}, without saving"
    if signals.ended_by(status):
        return 128 + signals.number, f"ended by {signals.name} before there was anything to save"
    return status if status >= 0 else 128 - status, why


def _first_failure(ranks: Sequence[Worker]) -> _Ended | None:
    """Returns how the first rank failed, given that one has: minus the signal that ended it is its status here."""
    # Of ranks that fail at the same time, one ended by a signal says more than those that lost a partner.
    first = min((worker for worker in ranks if worker.is_lost), key=lambda worker: worker.status, default=None)
    if first is None:
        return None
    if before := [worker.rank or 0 for worker in ranks if worker.has_ended and not worker.is_lost]:
        return first.status, f"{first.why()}; {rank_list(before)} had ended with status 0 before"
    has_said = first.status > 0 and first.process.poll() != 0  # its traceback, or its line
    return first.status, "" if has_said else first.why()


def _environment(num_ranks: int, host: str, restarts: int, max_restarts: int) -> dict[str, str]:
    common = {
        "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "MASTER_ADDR": host,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # use the launcher's store, which outlives a rank that fails
    }
    defaults = {"OMP_NUM_THREADS": "1"}
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback is not None and is_loopback(host):
        # By default both choose an interface that other machines may reach.
        defaults |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return common | {name: value for name, value in defaults.items() if name not in os.environ}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
