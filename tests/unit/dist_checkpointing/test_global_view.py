"""Views of the whole tensor: every rank's piece has its place in the whole tensor, for every layout."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from core import parallel_state
from core.base.errors import ParallelConfigError
from core.dist_checkpointing import global_shape, global_view, local_slices, local_tensor
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import mark, tp_piece


def _whole(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def _fsdp_piece(whole: torch.Tensor, dim: int | None, mesh: DeviceMesh) -> nn.Parameter:
    module = nn.Module()
    module.weight = tp_piece(whole, dim)
    fully_shard(module, mesh=mesh)
    return mark(module.weight, dim)  # torch drops the attributes; the wrapper puts them back


def _check(param: torch.Tensor, whole: torch.Tensor) -> None:
    """Checks that the view is the whole tensor, shares storage with the parameter, and that the slices say where the
    piece is."""
    view = global_view(param)
    assert not view.requires_grad
    assert view.shape == whole.shape == global_shape(param)
    assert torch.equal(whole[local_slices(param)], local_tensor(param))
    gathered = view.full_tensor() if isinstance(view, DTensor) else view
    assert torch.equal(gathered, whole)
    moment = torch.zeros_like(local_tensor(param), dtype=torch.float64)
    assert global_view(param, moment).shape == whole.shape
    local_tensor(global_view(param, moment)).add_(1)
    assert moment.sum() == moment.numel()
    local_tensor(view).fill_(-1.0)
    assert torch.equal(local_tensor(param), torch.full_like(local_tensor(param), -1.0))


def test_a_plain_tensor_is_its_own_whole():
    param = nn.Parameter(_whole(3, 2))
    assert not isinstance(global_view(param), DTensor)
    _check(param, _whole(3, 2))
    _check(nn.Parameter(torch.tensor(2.0)), torch.tensor(2.0))


def _check_layouts(tp_size: int, replicas: int) -> None:
    """Rows 6 and 10 over dp are uneven inside an even tp cut, rows 2 leave ranks empty."""
    parallel_state.initialize_model_parallel(tp_size, num_distributed_optimizer_instances=replicas)
    mesh = parallel_state.get_data_parallel_mesh()
    for shape in [(6, 4), (10, 3), (2, 2), (2 * tp_size,)]:
        for dim in [None, 0, 1] if tp_size > 1 and len(shape) == 2 and shape[1] % tp_size == 0 else [None, 0]:
            whole = _whole(*shape)
            if tp_size > 1:
                _check(tp_piece(whole, dim), whole)
            param = _fsdp_piece(whole, dim, mesh)
            _check(param, whole)
            moments = global_view(param, torch.zeros_like(param))  # a DTensor, as torch's optimizers make them
            assert moments.shape == whole.shape


@pytest.mark.parametrize(("world", "tp_size", "replicas"), [(2, 1, 1), (2, 2, 1)])
def test_pieces_lie_where_the_whole_tensor_has_them(world, tp_size, replicas):
    run_distributed(_check_layouts, world, tp_size, replicas)


@pytest.mark.long
@pytest.mark.parametrize(("tp_size", "replicas"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_pieces_are_at_their_global_offsets_on_four_ranks(tp_size, replicas):
    run_distributed(_check_layouts, 4, tp_size, replicas)


def _check_placements() -> None:
    parallel_state.initialize_model_parallel(2)
    param = _fsdp_piece(_whole(6, 4), 1, parallel_state.get_data_parallel_mesh())
    view = global_view(param)
    assert view.placements == (Shard(1), Shard(0))
    assert view.device_mesh.mesh_dim_names[0] == "tp"
    assert global_view(_fsdp_piece(_whole(6, 4), None, parallel_state.get_data_parallel_mesh())).placements == (
        Replicate(),
        Shard(0),
    )
    assert global_view(tp_piece(_whole(6, 4), 0)).placements == (Shard(0),)
    # one mesh for all parameters of one cut, and none kept when the state is gone
    assert global_view(param).device_mesh is view.device_mesh
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    again = _fsdp_piece(_whole(6, 4), 1, parallel_state.get_data_parallel_mesh())
    assert global_view(again).device_mesh is not view.device_mesh
    assert global_view(again).device_mesh.get_group("tp") is parallel_state.get_tensor_model_parallel_group()


def test_tp_is_the_outer_axis_and_parallel_state_owns_meshes():
    run_distributed(_check_placements, 2)


def _uses_no_collective() -> list[str]:
    parallel_state.initialize_model_parallel(2)
    param = _fsdp_piece(_whole(6, 4), 0, parallel_state.get_data_parallel_mesh())
    if dist.get_rank() == 1:  # the other rank never comes: a collective here would wait for it
        global_view(param)
        local_slices(param)
    dist.barrier()
    gc.collect()
    return []


def test_a_view_needs_no_other_rank():
    run_distributed(_uses_no_collective, 2)


def _refusals() -> list[str]:
    parallel_state.initialize_model_parallel(2)
    messages = []
    interleaved = tp_piece(_whole(4, 2), 0)
    interleaved.partition_stride = 2
    nowhere = tp_piece(_whole(4, 2), 0)
    nowhere.partition_dim = -1
    for param, tensor in [(interleaved, None), (nowhere, None), (tp_piece(_whole(4, 2), 0), torch.zeros(3))]:
        with pytest.raises(ParallelConfigError) as caught:
            global_view(param, tensor)
        messages.append(str(caught.value))
    return messages


def test_cuts_that_no_view_describes_are_refused():
    stride, dim, shape = run_distributed(_refusals, 2)[0]
    assert "partition_stride=2" in stride
    assert "partition_dim=-1" in dim
    assert "(3,)" in shape
    assert "(2, 2)" in shape


@pytest.mark.parametrize(
    ("order", "instances"),
    [
        ("tp-cp-ep-dp-pp", 1),
        ("tp-cp-ep-dp-pp", 2),
        ("cp-tp-ep-dp-pp", 1),
        ("cp-tp-ep-dp-pp", 2),
        ("dp-cp-tp-ep-pp", 1),
    ],
)
def test_every_rank_of_a_plane_builds_the_same_mesh(order, instances):
    """With context parallelism too, and for every position of tp in the order of ranks: no rank asks another."""
    planes: dict[int, list[list[int]]] = {}
    for rank in range(8):
        with fake_world(rank, 8):
            parallel_state.initialize_model_parallel(
                2, context_parallel_size=2, num_distributed_optimizer_instances=instances, order=order
            )
            mesh = parallel_state.get_data_parallel_mesh()
            placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
            rows = 8 // mesh.shape[-1]
            piece = DTensor.from_local(torch.zeros(rows, 3), mesh, placements, run_check=False)
            view = global_view(mark(nn.Parameter(piece), 1))
            assert view.shape == (8, 6)
            planes[rank] = view.device_mesh.mesh.tolist()
            assert list(view.device_mesh.get_coordinate()) == [
                parallel_state.get_tensor_model_parallel_rank(),
                *mesh.get_coordinate(),
            ]
    assert all(plane == planes[0] for plane in planes.values())
    assert sorted(torch.tensor(planes[0]).flatten().tolist()) == list(range(8))
