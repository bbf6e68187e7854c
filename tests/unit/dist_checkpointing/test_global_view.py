"""Views of the whole tensor: every rank's piece has its place in it, for every layout, and flat ranges theirs."""

import gc
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from core import parallel_state
from core.base.errors import CheckpointError, ParallelConfigError
from core.dist_checkpointing import flat_range_view, global_shape, global_view, load, local_slices, local_tensor, save
from core.dist_checkpointing.global_view import boxes_of_range
from tests.unit._ranks import fake_world
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole as gathered
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


@on_ranks(2)
def test_tp_is_the_outer_axis_and_parallel_state_owns_meshes():
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


@on_ranks(2)
def test_a_view_needs_no_other_rank():
    parallel_state.initialize_model_parallel(2)
    param = _fsdp_piece(_whole(6, 4), 0, parallel_state.get_data_parallel_mesh())
    if dist.get_rank() == 1:  # the other rank never comes: a collective here would wait for it
        global_view(param)
        local_slices(param)
    dist.barrier()
    gc.collect()


@on_ranks(2)
def test_cuts_that_no_view_describes_are_refused():
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
    stride, dim, shape = messages
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


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3), (2, 2, 2, 3)], ids=str
)
def test_boxes_hold_the_run_in_its_order(shape):
    elements = torch.arange(math.prod(shape)).view(shape)
    for start in range(elements.numel() + 1):
        for end in range(start, elements.numel() + 1):
            boxes = boxes_of_range(shape, start, end)
            cut = [elements[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in boxes]
            assert [int(e) for piece in cut for e in piece.flatten()] == list(range(start, end))
            assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_the_view_is_the_whole_tensor_and_shares_storage():
    param, values = torch.nn.Parameter(torch.zeros(3, 4)), torch.arange(7.0)
    view = flat_range_view(param, values, 3)
    assert isinstance(view, torch.Tensor) and view.shape == (3, 4) and view.dtype == torch.float32
    assert view.detach().elements.data_ptr() == values.data_ptr()
    assert repr(view) == "FlatRange(shape=[3, 4], dtype=torch.float32, 7 elements here)"
    with pytest.raises(CheckpointError, match=r"aten.add.Tensor was called on a tensor .* flat range"):
        view + 1
    for wrong, start in [(torch.zeros(7), 6), (torch.zeros(7), -1), (torch.zeros(2, 2), 0), (torch.zeros(6)[::2], 0)]:
        with pytest.raises(CheckpointError, match=r"no run of a parameter of shape \[3, 4\]"):
            flat_range_view(param, wrong, start)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@on_ranks(3)
def test_a_range_is_gathered_bit_by_bit_with_replicas(dtype):
    """Three ranks: the first two have a part each, and the last is a replica of the second."""
    values = torch.tensor([[4e4, -0.0, 0.1], [float("nan"), float("inf"), -1.0]]).to(dtype)
    start, end = [(0, 2), (2, 6), (2, 6)][dist.get_rank()]
    for shape in ((2, 3), (6,), (1, 6, 1)):
        param = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        found = gathered(flat_range_view(param, values.view(-1)[start:end].clone(), start))
        assert found.shape == shape and torch.equal(
            found.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)
        )
    empty, scalar = (torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((0, 3), ()))
    assert gathered(flat_range_view(empty, torch.zeros(0, dtype=dtype), 0)).shape == (0, 3)
    kept = torch.full((int(end > 2),), 0.1, dtype=dtype)
    assert torch.equal(gathered(flat_range_view(scalar, kept, 0)), torch.tensor(0.1, dtype=dtype))


def test_a_tensor_without_elements_keeps_its_name(tmp_path: Path):
    param = torch.nn.Parameter(torch.zeros(0, 3))
    save({"none": flat_range_view(param, torch.zeros(0), 0), "one": torch.ones(1)}, tmp_path / "it", metadata={})
    load({"none": torch.zeros(0, 3), "one": torch.zeros(1)}, tmp_path / "it")
