"""Runs a function on simulated streams, in a process of its own: the simulation changes the whole process.

def _two_streams_write() -> None:                  # at module level: it travels by name
    ...

def test_the_streams_do_not_race():
    assert_no_race(_two_streams_write)
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests._forked import FORKED
from tests.streams.installed import simulated_streams
from tests.unit._process_state import process_state_kept
from tests.unit._ranks import fake_world

LIMIT_S = 600.0
MOST_SHOWN = 4


@dataclass(frozen=True)
class Report:
    """What a simulation has found."""

    result: Any
    races: dict[str, int]
    operations: dict[str, int]
    waits: list[str]
    """Where the host has waited for the device, as lines of the project's files."""
    most_bytes: int
    """Of the device at once: see `Simulation`."""


def simulate(function: Callable[..., Any], *args: Any, ranks: int = 2, rank: int = 0) -> Report:
    """Calls `function(*args)` as one rank of several, whose collectives do nothing, and returns what was found.

    Raises:
        AssertionError: the function raised; the message has its traceback.
    """
    pipe = _pipe()
    pipe.send((function, args, ranks, rank))
    if not pipe.poll(LIMIT_S):
        _end()
        raise AssertionError(f"{function.__name__}: no end within {LIMIT_S:g} s")
    try:
        succeeded, answer = pickle.loads(pipe.recv_bytes())
    except EOFError:
        succeeded, answer = False, "the process died"
    if not succeeded:
        _end()
        raise AssertionError(f"{function.__name__}:\n{answer}")
    return answer  # type: ignore[no-any-return]


def assert_no_race(function: Callable[..., Any], *args: Any, ranks: int = 2) -> Report:
    """Raises AssertionError with the first races, unless there are none and more than one stream was used."""
    report = simulate(function, *args, ranks=ranks)
    shown = "\n".join(f"{count} x {race}" for race, count in list(report.races.items())[:MOST_SHOWN])
    assert not report.races, f"{len(report.races)} races on simulated streams:\n{shown}"
    assert len([line for line in report.operations if not line.startswith("host")]) > 1, "it used one stream alone"
    return report


_process: list[tuple[Any, Connection]] = []
"""The process and its pipe; `_pipe` starts it, `_end` ends it."""


def _pipe() -> Connection:
    if not _process:
        ours, theirs = FORKED.Pipe()
        process = FORKED.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _process.append((process, ours))
    return _process[0][1]


@atexit.register
def _end() -> None:
    while _process:
        process, pipe = _process.pop()
        process.kill()
        process.join(10)
        pipe.close()


def _serve(pipe: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", SHARDSTACK_DEVICE="cpu")
    torch.set_num_threads(1)
    while True:
        try:
            function, args, ranks, rank = pipe.recv()
        except EOFError:
            return
        with process_state_kept():
            try:
                answer = (True, _simulated(function, args, ranks, rank))
            except BaseException:
                answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))
        del function, args
        gc.collect()


def _simulated(function: Callable[..., Any], args: Any, ranks: int, rank: int) -> Report:
    from core.distributed import groups  # which the parent process need not import

    warnings.simplefilter("ignore")
    torch.manual_seed(1234)
    with fake_world(rank, ranks), simulated_streams() as simulation:
        result = function(*args)
        groups._twins.clear()
        waits = [f"{file}:{line} {name}" for (file, line, name), *_ in filter(None, simulation.waits)]
        return Report(result, dict(simulation.races), dict(simulation.operations), waits, simulation.most_bytes)
