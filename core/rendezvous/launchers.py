"""Lets ranks that a launcher started find each other: under Slurm, and in a job that ``torchrun`` restarts.

The place of a task that ``srun`` started is translated to the variables that ``torchrun`` sets.

Slurm names no meeting place: ranks meet on the first node of the job step, at a port that follows from the job's
number, so that jobs that share a node seldom take one port.

``torchrun`` reuses one store for all restarts (pytorch/pytorch#135712): each round of ranks gets a store of its own,
because ranks would read addresses of the previous one, where nothing listens any more, and wait. Its count of restarts
cannot name a restart, because node agents that follow another one's failure do not count it.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but left out of __all__

from ..base.errors import ConfigError, ParallelStateError

_FIRST_PORT, _NUM_PORTS = 20000, 20000
"""Above the ports of services, and for most jobs below the ports that Linux gives to clients (32768 on)."""

_STEP = ("SLURM_STEP_ID", "SLURM_STEPID")
"""Set in tasks that ``srun`` started, and not in the batch script, which has a task's other variables."""


def set_launcher_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in a
    task of ``srun``. Those that are set already stay.

    Does nothing elsewhere, and where another launcher has set ``RANK``: ``torchrun`` in a task of ``srun``.

    Raises:
        ConfigError: variables of Slurm that are missing, or are no number or list of nodes.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment or not any(name in environment for name in _STEP):
        return
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    variables = {
        "RANK": _number(environment, "SLURM_PROCID"),
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": _number(environment, "SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": _tasks_here(environment, num_tasks),
        "MASTER_ADDR": first_host(_text(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")),
        "MASTER_PORT": _port(environment),
    }
    for name, value in variables.items():
        environment.setdefault(name, str(value))


def first_host(nodes: str) -> str:
    """Returns the first name of one of Slurm's lists of nodes: ``gpu01`` of ``gpu[01-04,07],big1``.

    Raises:
        ConfigError: no such list.
    """
    name = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes).group())  # type: ignore[union-attr]
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"Slurm's list of nodes is {nodes!r}; set MASTER_ADDR to the name of its first node")
    return name


def _tasks_here(environment: Mapping[str, str], num_tasks: int) -> int:
    """Returns the number of tasks on this node: of ``4(x2),3`` 4 on the first two, and 3 on the last."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if name not in environment:
            continue
        counts: list[int] = []
        for entry in environment[name].split(","):
            match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,6})\))?", entry)
            if match is None:
                raise ConfigError(f"{name} is {environment[name]!r}; it takes counts as '4(x2),3', or unset it")
            counts += [int(match[1])] * int(match[2] or 1)
        node = _number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0
        return counts[min(node, len(counts) - 1)]  # SLURM_NTASKS_PER_NODE is one number for all
    return num_tasks // max(_number(environment, "SLURM_NNODES") if "SLURM_NNODES" in environment else 1, 1)


def _port(environment: Mapping[str, str]) -> int:
    step = next(environment[name] for name in _STEP if name in environment)
    steps_before = int(step) if step.isascii() and step.isdigit() else 0  # two steps of one job may run at once
    return _FIRST_PORT + (_number(environment, "SLURM_JOB_ID", "SLURM_JOBID") + steps_before) % _NUM_PORTS


def _number(environment: Mapping[str, str], *names: str) -> int:
    text = _text(environment, *names)
    if not (text.isascii() and text.isdigit() and len(text) < 11):
        raise ConfigError(f"{' or '.join(names)} is {text!r} in the environment; it takes a number")
    return int(text)


def _text(environment: Mapping[str, str], *names: str) -> str:
    for name in names:
        if environment.get(name):
            return environment[name]
    raise ConfigError(
        f"SLURM_PROCID is set and {' and '.join(names)} not, so that ranks cannot meet; start the program with srun, "
        "or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
    )


_LEADER = "shardstack/round"
GENERATION = "SHARDSTACK_GENERATION"
"""Environment variable: the number of the ranks' generation, under a launcher that keeps survivors of a lost rank."""
_POLL_S = 0.02


def store_of_round(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """Returns `store` as `fresh_store` does, for the ranks of this process's generation."""
    if GENERATION in os.environ:  # ranks of two must not meet: one leaves as soon as it hears of the next
        store = PrefixStore(f"generation{os.environ[GENERATION]}", store)
    return fresh_store(store, rank, num_ranks, timeout)


def fresh_store(store: Store, rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """Returns `store` under a prefix that no earlier round has used. All ranks of a round call it once.

    Rank 0 proposes a name; the others answer with names of their own; it closes the round by listing these. What an
    earlier round has left lists other names, so that no rank takes it for its own.

    Raises:
        ParallelStateError: another rank did not come in time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(_LEADER, own)
        names = [_wait_for(store, f"{own}/{other}", other, deadline) for other in range(1, num_ranks)]
        store.set(f"{own}/members", ",".join(names))
        return PrefixStore(own, store)
    while time.monotonic() < deadline:
        if store.check([_LEADER]):
            leader = store.get(_LEADER).decode()
            store.set(f"{leader}/{rank}", own)
            members = f"{leader}/members"
            if store.check([members]) and own in store.get(members).decode().split(","):
                return PrefixStore(leader, store)
        time.sleep(_POLL_S)
    raise _absent(0)


def _wait_for(store: Store, key: str, rank: int, deadline: float) -> str:
    while time.monotonic() < deadline:
        if store.check([key]):
            return store.get(key).decode()
        time.sleep(_POLL_S)
    raise _absent(rank)


def _absent(rank: int) -> ParallelStateError:
    return ParallelStateError(
        f"rank {rank} did not join the process group in time; look at its output, or raise the limit "
        "(--distributed-timeout-minutes)"
    )
