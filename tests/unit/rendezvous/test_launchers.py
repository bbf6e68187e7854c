"""How ranks meet: by Slurm's variables, as ``srun`` sets them, and at a store that earlier rounds have used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from core.base.errors import ConfigError, ParallelStateError
from core.rendezvous.default_group import init_process_group
from core.rendezvous.launchers import GENERATION, first_host, set_launcher_variables, store_of_round
from tests._forked import FORKED

TASK = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_NODELIST": "gpu[07-08,12]",
}


def test_a_task_has_the_variables_of_torchrun():
    found = dict(TASK)
    set_launcher_variables(found)
    assert {name: found[name] for name in found.keys() - TASK.keys()} == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(20000 + 123456 % 20000),
    }
    chosen = TASK | {"MASTER_PORT": "29500", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "x1"}
    set_launcher_variables(chosen)
    assert (chosen["MASTER_PORT"], chosen["WORLD_SIZE"], chosen["MASTER_ADDR"]) == ("29500", "2", "x1")
    second_step = TASK | {"SLURM_STEP_ID": "1"}
    set_launcher_variables(second_step)
    assert second_step["MASTER_PORT"] != found["MASTER_PORT"]


@pytest.mark.parametrize(
    "elsewhere",
    [
        {},
        {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"},  # the batch script
        TASK | {"RANK": "0", "WORLD_SIZE": "8"},  # torchrun in a task
    ],
)
def test_nothing_is_set_elsewhere(elsewhere):
    found = dict(elsewhere)
    set_launcher_variables(found)
    assert found == elsewhere


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("gpu[01-04,07],big1", "gpu01"),
        ("rack[2,5]n[3-9]x.cluster", "rack2n3x.cluster"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({"SLURM_NTASKS": ""}, "SLURM_STEP_NUM_TASKS and SLURM_NTASKS not, so that ranks cannot meet"),
        ({"SLURM_TASKS_PER_NODE": "4x2"}, r"SLURM_TASKS_PER_NODE is '4x2'; it takes counts"),
        ({"SLURM_JOB_NODELIST": "a b"}, "Slurm's list of nodes is 'a b'; set MASTER_ADDR"),
    ],
)
def test_odd_variables_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        set_launcher_variables(TASK | change)


def _sums_over_tasks(environment: dict[str, str], sums: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    init_process_group()
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    sums.put((total.item(), dist.get_world_size()))
    dist.destroy_process_group()


def test_two_tasks_meet_with_slurms_variables_alone() -> None:
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost"}
    sums = FORKED.Queue()
    for rank in map(str, range(2)):
        environment = clean | job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        FORKED.Process(target=_sums_over_tasks, args=(environment, sums), daemon=True).start()
    assert [sums.get(timeout=600) for _ in range(2)] == [(3, 2)] * 2


LIMIT = timedelta(seconds=600)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as pool:
        yield pool


def _meet(threads: ThreadPoolExecutor, store: Store) -> list[Store]:
    futures = [threads.submit(store_of_round, store, rank, 3, LIMIT) for rank in (2, 1, 0)]
    return [future.result() for future in futures]


def test_a_round_sees_nothing_of_the_one_before(threads: ThreadPoolExecutor) -> None:
    store = HashStore()
    for number in range(5):
        stores = _meet(threads, store)
        assert not any(of_rank.check(["address"]) for of_rank in stores)
        stores[0].set("address", str(number))
        assert [of_rank.get("address") for of_rank in stores] == [str(number).encode()] * 3


def test_a_round_that_a_rank_left_does_not_mislead_the_next(threads: ThreadPoolExecutor) -> None:
    store = HashStore()
    with pytest.raises(ParallelStateError, match="rank 1 did not join the process group in time"):
        store_of_round(store, 0, 3, timedelta(seconds=0.1))
    with pytest.raises(ParallelStateError, match="rank 0 did not join"):
        store_of_round(store, 2, 3, timedelta(seconds=0.1))
    first, *others = _meet(threads, store)
    first.set("key", "value")
    assert all(other.check(["key"]) for other in others)


def test_ranks_of_two_generations_do_not_meet(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setenv(GENERATION, "3")
    late = threads.submit(store_of_round, store, 1, 2, timedelta(seconds=0.5))  # has not heard of the next one
    while not late.running():
        time.sleep(0.01)
    time.sleep(0.1)
    monkeypatch.setenv(GENERATION, "4")
    with pytest.raises(ParallelStateError, match="rank 1 did not join"):
        store_of_round(store, 0, 2, timedelta(seconds=0.2))
    with pytest.raises(ParallelStateError, match="rank 0 did not join"):
        late.result()
