"""Axes by their names, in every combination that users build."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import init_device_mesh

from core.adapters.bridge.meshes import axis_sizes, mesh_axes
from core.base.errors import ParallelConfigError
from tests.unit._ranks import fake_world

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
