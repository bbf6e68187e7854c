"""The data-parallel mesh of an adapter, in every situation that it may find."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from core import parallel_state
from core.adapters.bridge.meshes import data_parallel_mesh, fully_replicated
from core.base.errors import ParallelConfigError
from tests.unit._ranks import fake_world


@pytest.fixture(autouse=True)
def _two_machines():
    with fake_world(5, 8), mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"):
        yield


def test_without_a_mesh_all_ranks_or_those_of_a_machine_shard():
    assert tuple(data_parallel_mesh(None, hybrid=False).shape) == (8,)
    mesh = data_parallel_mesh(None, hybrid=True)
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE")
        assert tuple(data_parallel_mesh(None, hybrid=True).shape) == (1, 8)


def test_a_users_mesh_is_used_and_given_the_axes_that_are_needed():
    one = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",))
    assert tuple(data_parallel_mesh(one, hybrid=False).shape) == (8,)
    assert data_parallel_mesh(one, hybrid=True).mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    two = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    assert tuple(data_parallel_mesh(two, hybrid=True).shape) == (4, 2)
    assert tuple(data_parallel_mesh(two, hybrid=False).shape) == (8,)
    assert tuple(fully_replicated(one).shape) == (8, 1)


def test_parallel_states_mesh_comes_first():
    parallel_state.initialize_model_parallel(2)
    assert dist.get_process_group_ranks(data_parallel_mesh(None, hybrid=False).get_group()) == [1, 3, 5, 7]
    with pytest.raises(ParallelConfigError, match="4 data-parallel ranks of 8 in one axis"):
        data_parallel_mesh(None, hybrid=True)


@pytest.mark.parametrize("size", ["3", "0", "16", "four"])
def test_a_local_world_size_that_does_not_divide_is_named(size):
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=size),
        pytest.raises(ParallelConfigError, match=f"LOCAL_WORLD_SIZE is '{size}'"),
    ):
        data_parallel_mesh(None, hybrid=True)
