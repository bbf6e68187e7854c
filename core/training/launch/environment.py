"""What a launcher (ours, ``torchrun`` or Slurm) says to a rank in environment variables, checked."""

from __future__ import annotations

import os

from ...errors import ConfigError

RUN_STARTED = "SHARDSTACK_RUN_STARTED"
"""Variable of the environment: when the launcher started, which stays the same over its restarts of the ranks."""


def environment_rank() -> int:
    """This process's rank as its launcher gave it; 0 without a launcher. Known before any process group.

    Raises:
        ConfigError: no number, as from every function here that reads the environment.
    """
    return environment_int("RANK", 0)


def environment_world_size() -> int:
    """The number of ranks as the launcher gave it; 1 without a launcher."""
    return environment_int("WORLD_SIZE", 1, least=1) if "RANK" in os.environ else 1


def environment_restart_count() -> int:
    """How many times the launcher, ours or ``torchrun``, has started the ranks again."""
    return environment_int("TORCHELASTIC_RESTART_COUNT", 0)


def environment_threads() -> int:
    """Threads that a rank computes with: OMP_NUM_THREADS, or 1."""
    return environment_int("OMP_NUM_THREADS", 1, least=1)


def check_launcher() -> None:
    """Refuses an environment in which ranks could not meet.

    Raises:
        ConfigError: a rank beyond the number of ranks, or one without the address at which ranks meet.
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
    """A number in the environment, or `default` where the variable is not set."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.strip().isdigit() and len(text) < 10 and int(text) >= least):
        raise ConfigError(f"{name} is {text!r} in the environment; it takes a number from {least} on, or unset it")
    return int(text)
