"""Reads and checks the environment variables that a launcher (ours, ``torchrun`` or Slurm) sets for a rank.

Also has the exit statuses of a program of several ranks, which the launcher reads without importing what a rank needs.
"""

from __future__ import annotations

import os

from ...errors import ConfigError

CRASH_STATUS = 1
USER_ERROR_STATUS = 2
RUN_ERROR_STATUS = 3
INTERRUPTED_STATUS = 130

RUN_STARTED = "SHARDSTACK_RUN_STARTED"
"""Environment variable: when the launcher started; unchanged when it restarts the ranks."""


def environment_rank() -> int:
    """Returns this process's rank from the environment, or 0 without a launcher. Needs no process group.

    Raises:
        ConfigError: the variable is no number; so do all functions here that read the environment.
    """
    return environment_int("RANK", 0)


def environment_world_size() -> int:
    """Returns the number of ranks from the environment, or 1 without a launcher."""
    return environment_int("WORLD_SIZE", 1, least=1) if "RANK" in os.environ else 1


def environment_restart_count() -> int:
    """Returns how many times the launcher, ours or ``torchrun``, has restarted the ranks."""
    return environment_int("TORCHELASTIC_RESTART_COUNT", 0)


def environment_threads(*, updates_on_host: bool = False) -> int:
    """Returns the number of threads that a rank computes with: OMP_NUM_THREADS, or 1.

    Args:
        updates_on_host: offloaded parameters are updated on the host while a GPU waits: the ranks of a machine share
            its cores unless OMP_NUM_THREADS is set. A 1 may be a launcher's, ours or ``torchrun``, and does not count.
    """
    num_threads = environment_int("OMP_NUM_THREADS", 1, least=1)
    if not updates_on_host or num_threads > 1:
        return num_threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // environment_int("LOCAL_WORLD_SIZE", 1, least=1), 1)


def check_launcher() -> None:
    """Refuses an environment in which ranks cannot connect.

    Raises:
        ConfigError: the rank is beyond the number of ranks, or the address of the rendezvous is missing.
    """
    if "RANK" not in os.environ:
        return
    rank, size = environment_rank(), environment_world_size()
    if rank >= size:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {size}; ranks count from 0, so it takes at most {size - 1}")
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set and {' and '.join(missing)} not, so that ranks cannot meet; start them with "
            "core.training.launch, torchrun or Slurm, or unset RANK"
        )
    environment_int("MASTER_PORT", 0)


def environment_int(name: str, default: int, *, least: int = 0) -> int:
    """Returns a number in the environment, or `default` if the variable is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.strip().isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{name} is {text!r} in the environment; it takes a number from {least} on, or unset it")
    return int(text)
