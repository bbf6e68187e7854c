"""The norm counts every element of the model once, and does not depend on the layout or the rank."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from core import parallel_state
from core.base.errors import OptimizerError
from core.distributed import finalize_model_grads, wrap_model
from core.optimizer.clip_grads import (
    GradientStatistics,
    _sum_on_device,
    _sum_on_host,
    clip_coefficient,
    merge_contiguous,
)
from core.optimizer.main_ranges import collect_main_params
from core.process_groups_config import ProcessGroupCollection, groups_in_effect
from tests.unit._gpt import build_gpt, ddp_config, micro_batches
from tests.unit._spawn import on_ranks, run_distributed


def _model(tensors: dict[str, Tensor]) -> nn.Module:
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def _measure(model: nn.Module, tp_group: dist.ProcessGroup | None = None) -> tuple[float, int | None]:
    """Measures norm, rounded, and zeros of gradients that equal the parameters."""
    params = collect_main_params([model])
    groups = groups_in_effect() if tp_group is None else ProcessGroupCollection(tp=tp_group)
    norm, zeros = GradientStatistics(params, groups).measure([p.main for p in params], count_zeros=True).tolist()
    return round_to_fp32(norm), int(zeros)


def round_to_fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def _gradients() -> dict[str, Tensor]:
    """Shapes that two ranks do not divide, one row, one element; magnitudes far apart; some zeros."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (301, 257), "b": (7, 5), "c": (1, 9), "d": (33,), "e": (1,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["b"] *= 1e3
    for tensor in tensors.values():
        tensor.masked_fill_(tensor.abs() < 0.05 * tensor.std(correction=0), 0.0)
    return tensors


def _exact_norm(tensors: dict[str, Tensor]) -> float:
    return round_to_fp32(math.sqrt(math.fsum(x * x for t in tensors.values() for x in t.flatten().tolist())))


def _zeros(tensors: dict[str, Tensor]) -> int:
    return sum(int((tensor == 0).sum()) for tensor in tensors.values())


def test_norm_and_zeros_equal_exact_sum():
    tensors = _gradients()
    assert _zeros(tensors) > 0
    assert _measure(_model(tensors)) == (_exact_norm(tensors), _zeros(tensors))


def test_norm_does_not_depend_on_sharding():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(400_000, generator=generator)
    norm, _ = _measure(_model({"w": whole}))
    in_fp32 = set()
    for _ in range(50):
        cuts = torch.randint(0, len(whole), (3,), generator=generator).sort().values
        pieces = whole.tensor_split(cuts)
        assert _measure(_model({f"w{i}": piece for i, piece in enumerate(pieces)}))[0] == norm
        in_fp32.add(torch.stack([torch.linalg.vector_norm(piece) for piece in pieces]).norm().item())
    assert len(in_fp32) > 1  # the cuts do show in torch's fp32 norms


def test_squares_neither_overflow_nor_vanish():
    assert _measure(_model({"w": torch.tensor([3e30, 4e30])}))[0] == round_to_fp32(5e30)
    assert _measure(_model({"w": torch.tensor([3e-30, 4e-30])}))[0] == pytest.approx(5e-30, rel=1e-6)
    assert _measure(_model({"w": torch.tensor([1.0, math.inf])}))[0] == math.inf
    assert math.isnan(_measure(_model({"w": torch.tensor([1.0, math.nan])}))[0])


def test_missing_gradients_count_nothing():
    params = collect_main_params([_model({"a": torch.ones(4), "b": torch.ones(4)})])
    statistics = GradientStatistics(params, ProcessGroupCollection())
    assert statistics.measure([None, torch.full((4,), 2.0)]).tolist() == [4.0, 0.0]
    assert statistics.measure([None, None], count_zeros=True).tolist() == [0.0, 0.0]


def test_device_sums_equal_host_sums():
    grads = list(_gradients().values())
    device, host = _sum_on_device(grads, True, torch.device("cpu")), _sum_on_host(grads, True)
    assert device[0].item() == pytest.approx(host[0].item(), rel=1e-14) and device[1] == host[1] > 0
    assert not _sum_on_device(grads, False, torch.device("cpu"))[1]


def test_one_kernel_counts_the_zeros_of_neighbours():
    memory = torch.arange(100.0).remainder_(3.0)
    pieces = [memory[60:64].view(2, 2), memory[:10], memory[10:40].view(5, 6), memory[41:60]]  # 40 is padding
    strided, elsewhere, halves = torch.zeros(3, 4).t(), torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16)
    grads = [*pieces, strided, elsewhere, halves, torch.full((3,), math.nan)]
    with mock.patch.object(torch, "count_nonzero", side_effect=torch.count_nonzero) as counted:
        sums = _sum_on_device(grads, True, torch.device("cpu"))
    assert counted.call_count == 2 + 4
    assert sums[1].item() == sum((g == 0).sum().item() for g in grads) == 14 + 8 + 12 + 2 + 2


@pytest.mark.parametrize(("wrapper", "most"), [("ddp", 1), ("zero3", 3), ("fsdp2", 4)])
@on_ranks(2)
def test_gradients_of_a_wrapper_are_neighbours(wrapper: str, most: int):
    module = build_gpt(
        True, hidden_size=64, num_attention_heads=2, num_query_groups=2, kv_channels=32, ffn_hidden_size=64
    )
    model = wrap_model(module, module.config, ddp_config(wrapper), process_group=dist.group.WORLD)
    tokens, labels = micro_batches(0, dist.get_rank())[0]
    model(tokens, labels=labels).mean().backward()
    finalize_model_grads([model])
    grads = [g for p in model.module.parameters() if (g := model.local_gradient(p)) is not None and g.numel()]
    kernels, number = len(merge_contiguous(grads)), len(grads)
    assert kernels <= most < number


def test_clip_coefficient():
    for norm, most, expected in ((4.0, 1.0, 1.0 / (4.0 + 1e-6)), (0.5, 1.0, 1.0), (100.0, 0.0, 1.0)):
        assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), most).item() == expected


def _shard(tensor: Tensor, mesh: Any, placements: list[Any]) -> DTensor:
    """Returns this rank's part without communication, each shard cut as by `torch.chunk`."""
    local = tensor
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            pieces = list(local.chunk(mesh.size(axis), placement.dim))
            pieces += [local.new_empty(0, *local.shape[1:])] * (mesh.size(axis) - len(pieces))
            local = pieces[mesh.get_local_rank(axis)]
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


def _sharded_on_two() -> list[tuple[float, int | None]]:
    mesh = init_device_mesh("cpu", (2,))
    tensors = _gradients()
    mixed = {name: _shard(t, mesh, [Shard(0) if name in "abce" else Replicate()]) for name, t in tensors.items()}
    plain = dict(tensors)
    return [_measure(_model(mixed)), _measure(_model(plain))]


def test_shards_sum_over_their_axis_and_replicas_count_once():
    tensors = _gradients()
    expected = (_exact_norm(tensors), _zeros(tensors))
    assert run_distributed(_sharded_on_two, 2) == [[expected, expected]] * 2


def _tensor_parallel(explicit_group: bool) -> tuple[float, int | None]:
    tensors = _gradients()
    group = dist.group.WORLD if explicit_group else None
    if group is None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensors["a"] = tensors["a"].tensor_split([150])[dist.get_rank()]
    model = _model(tensors | {"tied": torch.ones(3)})
    model.a.tensor_model_parallel = model.tied.shared = True
    return _measure(model, group)


@pytest.mark.parametrize("explicit_group", [False, True])
def test_tp_ranks_count_replicas_once_and_tied_copies_not(explicit_group: bool):
    tensors = _gradients()
    expected = (_exact_norm(tensors), _zeros(tensors))
    assert run_distributed(_tensor_parallel, 2, explicit_group) == [expected] * 2


def _tensor_parallel_and_sharded() -> tuple[float, int | None]:
    """tp 2 x dp 2: `a` is cut by both along dim 0, the others by dp; `d` is replicated everywhere."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    mesh = parallel_state.get_data_parallel_mesh()
    tensors = _gradients()
    tensors["a"] = tensors["a"].tensor_split([150])[parallel_state.get_tensor_model_parallel_rank()]
    model = _model({name: t if name == "d" else _shard(t, mesh, [Shard(0)]) for name, t in tensors.items()})
    model.a.tensor_model_parallel = True
    return _measure(model)


def _hybrid() -> tuple[float, int | None]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    placements = [Replicate(), Shard(0)]
    return _measure(_model({name: _shard(t, mesh, placements) for name, t in _gradients().items()}))


def _sharded_on_both_axes() -> tuple[float, int | None]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensors = _gradients()
    both = {name: _shard(t, mesh, [Shard(0), Shard(1)]) for name, t in tensors.items() if name in "ab"}
    one = {name: _shard(t, mesh, [Shard(0), Replicate()]) for name, t in tensors.items() if name not in "ab"}
    return _measure(_model(both | one))


@pytest.mark.parametrize("layout", [_tensor_parallel_and_sharded, _hybrid, _sharded_on_both_axes])
def test_four_ranks_in_two_dimensions(layout):
    tensors = _gradients()
    assert run_distributed(layout, 4) == [(_exact_norm(tensors), _zeros(tensors))] * 4


@on_ranks(2)
def test_partial_sums_are_refused():
    param = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)
    with pytest.raises(OptimizerError, match="parameter w is a partial sum over axis 0"):
        GradientStatistics(collect_main_params([_model({"w": param})]), ProcessGroupCollection())
