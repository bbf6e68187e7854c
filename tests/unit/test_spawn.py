"""The harness itself: ranks talk, failures show the rank's traceback, and the next test gets fresh ranks."""

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from tests.unit import _spawn
from tests.unit._spawn import RankFailure, run_distributed


def _sums_ranks(offset: int) -> float:
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return value.item()


def _fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a planted failure")
    dist.barrier()


def _dies() -> None:
    os._exit(7)


def _process_id() -> int:
    return os.getpid()


def test_ranks_talk_and_answer_in_rank_order():
    assert run_distributed(_sums_ranks, 2, 10) == [21.0, 21.0]


def _was_forked_with_imports() -> bool:
    return "tests._imports" in sys.modules


def test_ranks_are_forked_from_a_process_that_has_imported_everything():
    assert run_distributed(_was_forked_with_imports, 2) == [True, True]


def test_processes_are_reused():
    assert run_distributed(_process_id, 2) == run_distributed(_process_id, 2)


def test_a_failing_rank_shows_its_traceback_and_the_next_job_gets_new_ranks():
    before = run_distributed(_process_id, 2)
    with pytest.raises(RankFailure, match=r"(?s)rank 1.*_fails_on_rank_1.*a planted failure"):
        run_distributed(_fails_on_rank_1, 2)
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
    from core.tensor_parallel.random import get_rng_tracker

    get_rng_tracker().add("left behind", 1)
    torch.use_deterministic_algorithms(True)


def _found_settings() -> tuple[list[str], bool]:
    from core.tensor_parallel.random import get_rng_tracker

    return sorted(get_rng_tracker().get_states()), torch.are_deterministic_algorithms_enabled()


def test_no_job_finds_what_another_has_set():
    run_distributed(_leaves_settings_behind, 2)
    assert run_distributed(_found_settings, 2) == [([], False)] * 2
