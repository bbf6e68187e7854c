"""The harness itself: ranks talk, failures show the rank's traceback, and the next test gets fresh ranks."""

import gc
import importlib
import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit import _spawn
from tests.unit._spawn import RankFailure, give_up_soon, on_ranks, run_distributed


def _sums_ranks(offset: int) -> float:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item()


@on_ranks(2)
def _fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a planted failure")
    dist.barrier()


def _dies() -> None:
    os._exit(7)


def _process_id() -> int:
    return os.getpid()


@pytest.mark.parametrize("offset", [0, 3])
@on_ranks(2)
def test_a_test_on_ranks_runs_there_with_its_arguments(offset: int, tmp_path: Path) -> None:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    assert value == 2 * offset + 1
    assert tmp_path.is_dir()


@pytest.mark.parametrize("size", [1, 3])
@on_ranks("size")
def test_an_argument_says_on_how_many_ranks_a_test_runs(size: int) -> None:
    assert dist.get_world_size() == size


def test_ranks_talk_and_answer_in_rank_order():
    assert run_distributed(_sums_ranks, 2, 10) == [21.0, 21.0]


def _was_forked_with_imports() -> bool:
    return "tests._imports" in sys.modules


def test_ranks_fork_from_a_process_that_imported_everything():
    assert run_distributed(_was_forked_with_imports, 2) == [True, True]


def test_processes_are_reused():
    assert run_distributed(_process_id, 2) == run_distributed(_process_id, 2)


def _makes_groups_that_end() -> int:
    for _ in range(2 * _spawn._GROUPS_LEFT):
        dist.new_group()
    return os.getpid()


def _makes_groups_that_stay() -> int:
    _kept.extend(dist.new_group() for _ in range(2 * _spawn._GROUPS_LEFT))
    return os.getpid()


_kept: list[Any] = []


def test_ranks_are_replaced_only_for_groups_that_stay():
    before = run_distributed(_makes_groups_that_end, 2)
    assert run_distributed(_makes_groups_that_stay, 2) == before
    assert set(run_distributed(_process_id, 2)).isdisjoint(before)


def test_a_failing_rank_shows_its_traceback_and_is_replaced():
    before = run_distributed(_process_id, 2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1.*_fails_on_rank_1.*a planted failure"):
        _fails_on_rank_1()
    assert set(before).isdisjoint(run_distributed(_process_id, 2))


def test_a_dead_rank_is_reported_with_its_exit_code():
    with pytest.raises(RankFailure, match="exit code 7"):
        run_distributed(_dies, 1)


def test_ranks_that_ended_after_their_job_are_replaced():
    before = run_distributed(_process_id, 2)
    os.kill(before[1], signal.SIGKILL)
    _spawn._POOLS[2]._processes[1].join()
    assert set(before).isdisjoint(run_distributed(_process_id, 2))


def _leaves_settings_behind() -> None:
    from core.comm.record import record_of
    from core.tensor_parallel.random import get_rng_tracker

    get_rng_tracker().add("left behind", 1)
    record_of().collective("all-reduce", "left under way", 4)
    give_up_soon(dist.new_group())
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir(tempfile.gettempdir())
    sys.argv.append("left behind")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("error")
    torch.use_deterministic_algorithms(True)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)


def _found_settings() -> tuple[Any, ...]:
    from core.comm import gloo
    from core.comm.record import first_unfinished
    from core.tensor_parallel.random import get_rng_tracker

    return (
        sorted(get_rng_tracker().get_states()),
        first_unfinished(lambda record: -1.0),
        gloo._wait_for.__module__,
        dict(os.environ),
        Path.cwd(),
        list(sys.argv),
        signal.getsignal(signal.SIGTERM),
        [filter[0] for filter in warnings.filters],
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


def test_no_job_finds_what_another_has_set():
    run_distributed(_leaves_settings_behind, 2)
    before = run_distributed(_found_settings, 2)
    assert before[0][:3] == ([], None, "shardstack.comm.gloo") and not before[0][8] and before[0][9] is torch.float32
    run_distributed(_leaves_settings_behind, 2)
    assert run_distributed(_found_settings, 2) == before


def _objects_to_look_at(imports: str) -> int:
    importlib.import_module(imports)
    gc.collect()
    return len(gc.get_objects())


def test_objects_of_an_imported_library_are_looked_at_once():
    (imported,) = run_distributed(_objects_to_look_at, 1, "xmlrpc.server")
    (later,) = run_distributed(_objects_to_look_at, 1, "xmlrpc.server")
    assert later < imported / 2
