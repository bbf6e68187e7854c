"""What a rank gets from its launcher (ours, ``torchrun`` or Slurm), and the exit status that it returns.

A failed program ends with one line for a user's mistake, one traceback for a crash, and no hang. When a rank fails,
the others soon fail too, because a collective lost its partner. Only the first failure is of use to a reader. Ranks
therefore ask the store of the process group which was first: that rank prints its whole report, the others at most
one line.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import parallel_state
from ...base.device import barrier
from ...base.errors import MemoryLimitError, OutOfStepError, ShardstackError
from ...rendezvous.environment import MOST_RANKS, environment_int, num_threads
from ...rendezvous.launchers import GENERATION, set_launcher_variables
from .generations import current_generation
from .link import tell_launcher
from .messages import Began, Leaves
from .processes import keep_going_without_output, say
from .tracebacks import shorten, where

CRASH_STATUS = 1
USER_ERROR_STATUS = 2
RUN_ERROR_STATUS = 3
INTERRUPTED_STATUS = 130


def add_flags(parser: ArgumentParser, table: Path) -> None:
    """Adds the flags of a table: for each its type, default, help and choices, as `argparse` names them."""
    types = {"int": int, "float": float, "str": str}
    for name, options in json.loads(table.read_text("utf-8")).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=types[options.pop("type", "str")], **options)


def environment_rank() -> int:
    """Returns this process's rank from the environment, or 0 without a launcher. Needs no process group.

    Raises:
        ConfigError: the variable is no number; so do all functions here that read the environment.
    """
    return environment_int("RANK", 0)


def environment_world_size() -> int:
    """Returns the number of ranks from the environment, or 1 without a launcher."""
    return environment_int("WORLD_SIZE", 1, least=1, most=MOST_RANKS) if "RANK" in os.environ else 1


def environment_restart_count() -> int:
    """Returns how many times the launcher, ours or ``torchrun``, has restarted the ranks."""
    return environment_int("TORCHELASTIC_RESTART_COUNT", 0)


def environment_threads(*, updates_on_host: bool = False) -> int:
    """Returns the number of threads that a rank computes with: OMP_NUM_THREADS, or 1.

    Args:
        updates_on_host: offloaded parameters are updated on the host while a GPU waits: the ranks of a machine share
            its cores unless OMP_NUM_THREADS is set. A 1 may be a launcher's, ours or ``torchrun``, and does not count.
    """
    threads = num_threads()
    if not updates_on_host or threads > 1:
        return threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(cores // environment_int("LOCAL_WORLD_SIZE", 1, least=1), 1)


_FIRST = "shardstack/first_failure"


def run_command(main: Callable[[Sequence[str]], Any], arguments: Sequence[str] | None = None) -> None:
    """Runs a program's `main` on its command line, and ends the process with an exit status.

    0: `main` returned. 2: an error of the user; all ranks together print one line. 3: the same, but a run had begun,
    for example with a full disk. 1: any other exception; the first rank to fail prints its traceback. Ranks out of
    step and failed allocations count as such, because their place and table matter. 130: an interrupt.
    """
    keep_going_without_output()
    tell_launcher(Began())
    try:
        set_launcher_variables()
        main(sys.argv[1:] if arguments is None else arguments)
        if dist.is_available() and dist.is_initialized():
            barrier()  # no rank leaves while another one still needs it
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        _say_that_it_ends()
    except SystemExit as end:
        if not end.code:
            _say_that_it_ends()
        raise
    except KeyboardInterrupt:
        _leave(INTERRUPTED_STATUS, "interrupted\n")
    except Exception as error:
        if isinstance(error, ShardstackError) and not isinstance(error, (OutOfStepError, MemoryLimitError)):
            _leave(RUN_ERROR_STATUS if error.ended_run else USER_ERROR_STATUS, f"error: {one_line(error)}\n")
        else:
            trace, _ = shorten(error)
            _leave(CRASH_STATUS, f"\n{where()}:\n{trace}", f"{where()} stopped too: {one_line(error)[:200]}\n")


def _say_that_it_ends() -> None:
    generation = current_generation()
    tell_launcher(Leaves(-1 if generation is None else generation.number))


def one_line(error: BaseException) -> str:
    """Returns an error's message without line breaks, or the name of its type if it has none."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def _leave(status: int, first_report: str, later_report: str = "") -> None:
    has_group = dist.is_available() and dist.is_initialized()
    first_status = _claim_first_failure(status) if has_group else None
    if first_status is None:
        # Before there is a group all ranks fail in the same way, reading their flags: one reports it. Crashes differ.
        if has_group or _speaks_for_all() or status == CRASH_STATUS:
            _tell(first_report)
    elif first_status == CRASH_STATUS and later_report:
        _tell(later_report)
    if has_group:
        # A normal exit would wait for the group's threads, which wait for ranks that no longer answer.
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _speaks_for_all() -> bool:
    """Returns whether this is the first rank, or one that may be the only one in error: without a valid rank, or among
    survivors of a lost one."""
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    has_numbers = rank.isascii() and rank.isdigit() and size.isascii() and size.isdigit()
    is_survivor = os.environ.get(GENERATION, "0") != "0"
    return is_survivor or not has_numbers or int(rank) == 0 or int(rank) >= int(size)


def _tell(report: str) -> None:
    # One write, so that the lines of several ranks do not interleave. The line break keeps a progress bar visible.
    on_terminal = sys.stderr.isatty() and dist.is_initialized()
    say(("\n" if on_terminal else "") + report.removesuffix("\n"))


def _claim_first_failure(status: int) -> int | None:
    """Returns None on the rank that fails first, and on a later one the status of the first."""
    try:
        store = dist.distributed_c10d._get_default_store()
        if store.add(f"{_FIRST}/count", 1) == 1:
            store.set(f"{_FIRST}/status", str(status))
            return None
        return int(store.get(f"{_FIRST}/status"))
    except Exception:  # the store is gone with the rank that held it, which failed first
        return CRASH_STATUS
