"""Adapters split over two ranks compared bitwise with the serial one; and what they do to a model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ConfigError
from core.base.parameters import copy_partition, whole_shape
from core.models.gpt import GPTModel
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from core.transformer import materialize
from core.transformer.lora import Adapter, add_lora, freeze_parameters, is_adapter, merge_lora
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.models._cases import CASES, batch, build, construct
from tests.unit.tensor_parallel._layers import all_gather, config, integer_tensor, integers, own

S, B, H, OUT, RANK = 6, 2, 4, 10, 3
CASE = CASES["swiglu-gqa-rope-rms"]


def _layer(kind: type[nn.Module], tp: int, sequence_parallel: bool) -> nn.Module:
    """Returns a layer with its adapter, every weight the part of the same whole integers."""
    torch.manual_seed(0)
    group = dist.group.WORLD if tp > 1 else None
    layer = kind(H, OUT, config=config(tp, sequence_parallel), init_method=integers, bias=False, tp_group=group)
    layer.weight.requires_grad_(False)
    layer.adapter = Adapter(layer, RANK, 2.0 * RANK)
    for seed, parameter in enumerate(layer.adapter.parameters()):
        with torch.no_grad():
            copy_partition(integer_tensor(*whole_shape(parameter, group), seed=seed), parameter, group)
    return layer


def _check(kind: type[nn.Module], sequence_parallel: bool) -> None:
    is_column = kind is ColumnParallelLinear
    serial, parallel = _layer(kind, 1, False), _layer(kind, 2, sequence_parallel)
    outer = 0 if sequence_parallel else None  # the cut outside of the pair of layers, and that between them
    cut_in, cut_out = (outer, -1) if is_column else (-1, outer)

    def part(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        return tensor if dim is None else own(tensor, dim)

    whole, upstream = integer_tensor(S, B, H), integer_tensor(S, B, OUT, seed=8)
    x, x_part = whole.clone().requires_grad_(), part(whole, cut_in).clone().requires_grad_()
    y, y_part = serial(x)[0], parallel(x_part)[0]
    update = 2.0 * whole @ serial.adapter.linear_in.weight.t() @ serial.adapter.linear_out.weight.t()
    assert torch.equal(y, whole @ serial.weight.t() + update)
    assert torch.equal(y_part, part(y, cut_out))
    y.backward(upstream)
    y_part.backward(part(upstream, cut_out))
    assert torch.equal(x_part.grad, part(x.grad, cut_in))
    for (name, expected), actual in zip(serial.adapter.named_parameters(), parallel.adapter.parameters(), strict=True):
        gradient = actual.grad
        if actual.tensor_model_parallel:
            gradient = all_gather(gradient, actual.partition_dim)
        assert actual.sequence_parallel is (sequence_parallel and not actual.tensor_model_parallel)
        if actual.sequence_parallel:  # as `finalize_model_grads` does
            assert not torch.equal(gradient, expected.grad), f"{name} is marked, and complete as it is"
            dist.all_reduce(gradient)
        assert torch.equal(gradient, expected.grad), name
    assert serial.weight.grad is None and parallel.weight.grad is None


@on_ranks(2)
def test_lora_on_two_tp_ranks_equals_serial():
    for kind in (ColumnParallelLinear, RowParallelLinear):
        for sequence_parallel in (False, True):
            _check(kind, sequence_parallel)


def _gpt(tp: int, on_meta: bool = False) -> GPTModel:
    with torch.device("meta" if on_meta else "cpu"):
        model = construct(CASE, tensor_model_parallel_size=tp)
    add_lora(model, RANK)
    return materialize(model) if on_meta else model


def _initial_values(on_meta: bool) -> dict[str, torch.Tensor]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return {
        name: all_gather(p.detach(), p.partition_dim) if p.tensor_model_parallel else p.detach()
        for name, p in _gpt(2, on_meta).named_parameters()
    }


@pytest.mark.parametrize("on_meta", [False, True])
def test_lora_initial_values_do_not_depend_on_tp(on_meta: bool):
    plain = construct(CASE)
    serial = dict(_gpt(1, on_meta).named_parameters())
    assert [name for name in serial if not is_adapter(name)] == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        assert torch.equal(serial[name], parameter), name
    for name, parameter in serial.items():
        assert parameter.requires_grad is is_adapter(name), name
        if is_adapter(name):
            assert bool(parameter.any()) is ("linear_in" in name), name
    first = serial["decoder.layers.0.mlp.linear_fc1.adapter.linear_in.weight"]
    assert 0.5 < first.abs().max() * first.shape[1] ** 0.5 <= 1.0
    assert not torch.equal(first, serial["decoder.layers.1.mlp.linear_fc1.adapter.linear_in.weight"])
    for rank in run_distributed(_initial_values, 2, on_meta):
        for name, parameter in serial.items():
            assert torch.equal(rank[name], parameter), name


def test_merged_model_equals_adapted_model():
    model, (ids, _) = build(CASE), batch()
    before, names = model(ids), list(model.state_dict())
    targets = ["linear_qkv", "linear_fc2"]
    adapted = add_lora(model, RANK, alpha=6.0, targets=targets)
    assert adapted == [
        f"decoder.layers.{layer}.{part}"
        for layer in range(CASE.config["num_layers"])
        for part in ("self_attention.linear_qkv", "mlp.linear_fc2")
    ]
    assert torch.equal(model(ids), before)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_(0.0, 0.3)
    adapting = model(ids)
    assert (adapting - before).abs().max() > 0.01
    merged = copy.deepcopy(model)
    merge_lora(merged)
    assert list(merged.state_dict()) == names
    assert all(parameter.requires_grad for parameter in merged.parameters())
    torch.testing.assert_close(merged(ids), adapting, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(ids), adapting)  # a copy has adapters of its own


def test_unadaptable_models_are_refused_unchanged():
    model = build(CASE)
    assert add_lora(model, None) == []
    with pytest.raises(ConfigError, match=r"'linear_q' names no linear layer of the model, which has linear_fc1, lin"):
        add_lora(model, RANK, targets=["linear_qkv", "linear_q"])
    with pytest.raises(ConfigError, match="requested without a target"):
        add_lora(model, RANK, targets=[])
    assert all(parameter.requires_grad for parameter in model.parameters())
    add_lora(model, RANK)
    with pytest.raises(ConfigError, match="has LoRA adapters"):
        add_lora(model, RANK)


def _three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))


def test_matching_parameters_are_frozen():
    actual = _three_layers()
    assert freeze_parameters(actual, ["0.*", "*.bias"]) == ["0.weight", "0.bias", "1.bias", "2.bias"]
    assert [name for name, p in actual.named_parameters() if p.requires_grad] == ["1.weight", "2.weight"]
    assert freeze_parameters(_three_layers(), []) == []


def test_patterns_matching_none_or_all_are_refused():
    with pytest.raises(ConfigError, match=r"freeze '3\.\*' matches no parameter; names are as 0\.weight and 2\.bias"):
        freeze_parameters(_three_layers(), ["0.*", "3.*"])
    with pytest.raises(ConfigError, match=r"freeze 0\.\* \[12\]\.\* matches all 6 parameters; leave some to train"):
        freeze_parameters(_three_layers(), ["0.*", "[12].*"])
