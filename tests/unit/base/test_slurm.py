"""Ranks from Slurm's variables, as ``srun`` sets them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.base.errors import ConfigError
from core.base.rendezvous import first_host, set_launcher_variables

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


SCRIPT = """
import torch, core.base.device
core.base.device.init_process_group()
total = torch.tensor(torch.distributed.get_rank() + 1.0)
torch.distributed.all_reduce(total)
print(int(total), torch.distributed.get_world_size())
torch.distributed.destroy_process_group()
"""


def test_two_tasks_meet_with_slurms_variables_alone() -> None:
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    clean |= {"PYTHONPATH": str(Path(__file__).parents[3]), "SHARDSTACK_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "3", "SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost"}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=clean | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [task.communicate(timeout=600)[0].split() for task in tasks] == [["3", "2"]] * 2
