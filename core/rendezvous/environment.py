"""Checks what the environment says about a rank: numbers, its place among others, where they meet, and by which
interface.

All variables that this library reads as numbers or names of a network are read here. A mistake in one is one
line that names the variable, its value and what it takes.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress

import torch.distributed as dist

from ..base.errors import ConfigError
from ..base.files import brief
from .launchers import GENERATION

MOST_RANKS, MOST_THREADS, MOST_PORT = 1 << 20, 4096, 65535
"""Most ranks of a run, most threads of a rank (no machine has as many cores), and the largest port."""

_ATTEMPTS, _PAUSE_S = 20, 0.5
"""How often a name is looked up, and the seconds after each time. The name of a machine that has just started is known
a few seconds later."""


def environment_int(name: str, default: int, *, least: int = 0, most: int = 10**9) -> int:
    """Returns a number in the environment, or `default` if the variable is not set.

    Raises:
        ConfigError: the variable is no whole number, or is out of bounds.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.strip().isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise ConfigError(f"{name} is {brief(text)} in the environment; it takes {least} to {most}, or unset it")
    return int(text)


def num_threads() -> int:
    """Returns OMP_NUM_THREADS, or 1 if it is not set."""
    return environment_int("OMP_NUM_THREADS", 1, least=1, most=MOST_THREADS)


def check_environment() -> None:
    """Refuses an environment in which a process cannot compute, or ranks cannot meet. Call it before they do.

    Raises:
        ConfigError: a number, an interface or an address is none; a rank is beyond their number; or where ranks meet
            is missing.
    """
    num_threads()
    _check_interfaces()
    if "RANK" not in os.environ:
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK is set and {' and '.join(missing)} not, so that ranks cannot meet; start them with "
            "shardstack.training.launch, torchrun or Slurm, or unset RANK"
        )
    size = environment_int("WORLD_SIZE", 1, least=1, most=MOST_RANKS)
    local_size = environment_int("LOCAL_WORLD_SIZE", size, least=1, most=size)
    for name, of, count in (("RANK", "WORLD_SIZE", size), ("LOCAL_RANK", "LOCAL_WORLD_SIZE", local_size)):
        is_place = name == "LOCAL_RANK" and GENERATION in os.environ  # its GPU: it stays when others here are lost
        if (rank := environment_int(name, 0)) >= count and of in os.environ and not is_place:
            raise ConfigError(f"{name} is {rank} and {of} {count}; ranks count from 0: it takes at most {count - 1}")
    environment_int("MASTER_PORT", 0, least=1, most=MOST_PORT)
    _check_address(os.environ["MASTER_ADDR"])


def _check_interfaces() -> None:
    """Refuses interfaces that gloo cannot use, by asking it: it takes names of those that have an address."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    try:
        for name in filter(None, names.split(",")):
            dist.ProcessGroupGloo.create_device(interface=name)
    except RuntimeError:
        known = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            f"GLOO_SOCKET_IFNAME is {brief(names)}; take interfaces of this machine that have an address, of {known}"
        ) from None


def _check_address(host: str) -> None:
    for _ in range(_ATTEMPTS):
        with suppress(OSError, UnicodeError):
            socket.getaddrinfo(host, None)
            return
        time.sleep(_PAUSE_S)
    raise ConfigError(f"MASTER_ADDR is {brief(host)}, which this machine cannot find; take the address of rank 0's")
