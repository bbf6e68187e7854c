"""Meshes by the names of their axes, and units by size, class or path of a class."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from core import parallel_state
from core.adapters.bridge.sharding import (
    axis_sizes,
    check_classes_are_in,
    data_parallel_mesh,
    fully_replicated,
    mesh_axes,
    units_by_class,
    units_by_size,
)
from core.adapters.nemo import import_classes_from_paths
from core.base.errors import ParallelConfigError, WrapError
from tests.unit._ranks import fake_world
from tests.unit.adapters._adapters import Net

CASES = [
    # axes, flattened ones, the data-parallel mesh, all of its ranks, tensor-parallel ranks
    ({"data_parallel": 8}, {}, (8,), 8, None),
    ({"data_parallel": 4, "tensor_parallel": 2}, {}, (4,), 4, 2),
    ({"data_parallel": 8, "tensor_parallel": 1}, {}, (8,), 8, None),
    ({"data_parallel": 2, "context_parallel": 2, "tensor_parallel": 2}, {}, (4,), 4, 2),
    ({"data_parallel": 2, "context_parallel": 4}, {"dp_cp": ("data_parallel", "context_parallel")}, (8,), 8, None),
    ({"dp_replicate": 2, "dp_shard": 4}, {}, (2, 4), 8, None),
    ({"dp_replicate": 1, "dp_shard": 8}, {}, (8,), 8, None),
    ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {}, (2, 2), 4, 2),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {}, (2, 4), 8, None),
    ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, {"dp_shard_cp": ("dp_shard", "cp")}, (2, 4), 8, None),
    ({"dp_shard_cp": 4, "tp": 2}, {}, (4,), 4, 2),
    ({"dp_cp": 8}, {}, (8,), 8, None),
    ({"dp_shard": 4, "cp": 2}, {}, (8,), 8, None),
]


@pytest.mark.parametrize(("axes", "flattened", "data", "ranks", "tensor"), CASES)
def test_axes_are_found_by_name(axes, flattened, data, ranks, tensor):
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        for name, parts in flattened.items():
            mesh[parts]._flatten(name)
        for _ in range(2):  # a second time finds what the first has flattened
            found = mesh_axes(mesh)
            assert tuple(found.data.shape) == data
            assert found.data.size() == ranks
            assert (None if found.tensor is None else found.tensor.size()) == tensor


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data_paralel": 8}, "the axes data_paralel, none of which.*did you mean .data_parallel."),
        ({"tp": 8}, "the axes tp, none of which.*tensor parallelism is the axis"),
        ({"dp_replicate": 8}, "it takes one of dp_shard_cp, dp_shard, next to dp_replicate"),
    ],
)
def test_a_missing_axis_is_said_with_those_there_are(axes, message):
    with fake_world(0, 8):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        with pytest.raises(ParallelConfigError, match=message):
            mesh_axes(mesh)
        nameless = init_device_mesh("cpu", (8,))
        with pytest.raises(ParallelConfigError, match="without names"):
            mesh_axes(nameless)
        assert axis_sizes(mesh) == ", ".join(f"{name}={size}" for name, size in axes.items())


@pytest.fixture
def two_machines():
    with fake_world(5, 8), mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"):
        yield


@pytest.mark.usefixtures("two_machines")
def test_without_a_mesh_all_ranks_or_those_of_a_machine_shard():
    assert tuple(data_parallel_mesh(None, hybrid=False).shape) == (8,)
    mesh = data_parallel_mesh(None, hybrid=True)
    assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE")
        assert tuple(data_parallel_mesh(None, hybrid=True).shape) == (1, 8)


@pytest.mark.usefixtures("two_machines")
def test_a_users_mesh_is_used_and_given_the_axes_that_are_needed():
    one = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_shard",))
    assert tuple(data_parallel_mesh(one, hybrid=False).shape) == (8,)
    assert data_parallel_mesh(one, hybrid=True).mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    two = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    assert tuple(data_parallel_mesh(two, hybrid=True).shape) == (4, 2)
    assert tuple(data_parallel_mesh(two, hybrid=False).shape) == (8,)
    assert tuple(fully_replicated(one).shape) == (8, 1)


@pytest.mark.usefixtures("two_machines")
def test_parallel_states_mesh_comes_first():
    parallel_state.initialize_model_parallel(2)
    assert dist.get_process_group_ranks(data_parallel_mesh(None, hybrid=False).get_group()) == [1, 3, 5, 7]
    with pytest.raises(ParallelConfigError, match="4 data-parallel ranks of 8 in one axis"):
        data_parallel_mesh(None, hybrid=True)


@pytest.mark.usefixtures("two_machines")
@pytest.mark.parametrize("size", ["3", "0", "16", "four"])
def test_a_local_world_size_that_does_not_divide_is_named(size):
    with (
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=size),
        pytest.raises(ParallelConfigError, match=f"LOCAL_WORLD_SIZE is '{size}'"),
    ):
        data_parallel_mesh(None, hybrid=True)


def test_units_by_size_are_found_from_the_inside_out():
    model = Net()
    sizes = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules()}
    assert sizes["layers.0"] == 83 and sizes["layers"] == 166
    named = {module: name for name, module in model.named_modules()}
    assert [named[m] for m in units_by_size(model, 70)] == ["embedding", "layers.0", "layers.1", "head"]
    assert [named[m] for m in units_by_size(model, 78)] == ["layers.0", "layers.1"]
    assert units_by_size(model, 100) == []  # no container is a unit, and the model itself is one anyway


def test_units_by_class():
    model = Net()
    assert [c.__name__ for c in units_by_class(model, "Block, torch.nn.Embedding", "x")] == ["Block", "Embedding"]
    assert [c.__name__ for c in units_by_class(model, None, "x")] == ["Block"]
    with pytest.raises(WrapError, match=r"x names the class 'Blok'.*did you mean 'Block'"):
        units_by_class(model, "Blok", "x")
    with pytest.raises(WrapError, match="has no list of layers"):
        units_by_class(nn.Linear(2, 2), None, "x")


def test_paths_and_classes_give_classes():
    assert import_classes_from_paths(["torch.nn.Linear", nn.Embedding]) == [nn.Linear, nn.Embedding]
    assert import_classes_from_paths([]) == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.nn.Linaer", r"'torch.nn.Linaer' does not import.*did you mean 'Linear'"),
        ("torch.optin.Adam", "there is no module torch.optin; correct its name"),
        ("no_such_package.Layer", "there is no module no_such_package; .*install its package"),
        ("Linear", "not a dotted one"),
        ("torch.nn.init", "has init as a module, not a module class"),
        ("torch.nn.functional.linear", "not a module class"),
    ],
)
def test_a_path_that_does_not_import_is_named_with_the_nearest(path, message):
    with pytest.raises(WrapError, match=message):
        import_classes_from_paths([path])


def test_one_string_is_not_a_list():
    with pytest.raises(WrapError, match="list of dotted paths"):
        import_classes_from_paths("torch.nn.Linear")


def test_an_absent_class_is_named_with_the_models_classes():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    check_classes_are_in(model, [nn.Linear], "units")
    with pytest.raises(WrapError, match=r"units names the class torch\.nn.*Bilinear.*takes one of Linear, Lay"):
        check_classes_are_in(model, [nn.Bilinear], "units")
