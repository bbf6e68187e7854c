"""Megatron-LM's helpers of tensor parallelism: batches, marks, chunks, its layers' arguments, and its initialisers."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import DataError, ParallelConfigError, warn_once
from core.model_parallel_config import ModelParallelConfig
from core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, broadcast_data
from core.transformer.transformer_config import init_method_normal
from tests.unit._spawn import on_ranks, run_distributed

CONFIG = ModelParallelConfig()


@pytest.mark.parametrize("tp", [1, 2])
@on_ranks(2)
def test_broadcast_data_from_first_rank(tp):
    parallel_state.initialize_model_parallel(tp)
    group = parallel_state.get_tensor_model_parallel_group()
    first = dist.get_process_group_ranks(group)[0]
    expected = {
        "tokens": torch.arange(6).view(2, 3) + first,
        "one": torch.tensor(first),
        "none": torch.empty(2, 0).long(),
    }
    is_source = dist.get_rank() == first
    actual = broadcast_data(list(expected), expected if is_source else {}, torch.int64)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    if is_source:
        with pytest.raises(DataError, match=r"data 'one' is torch.int64, and datatype is torch.float32"):
            broadcast_data(["one"], expected, torch.float32)
        with pytest.raises(DataError, match="asked for 'labels'"):
            broadcast_data(["labels"], expected, torch.int64)


INIT_METHODS = {
    "zeros_": nn.init.zeros_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "init_method_normal": init_method_normal(0.02),
    "partial": functools.partial(nn.init.normal_, mean=1.0, std=0.1),
    "lambda": lambda tensor: tensor.uniform_(-1.0, 1.0),
}


def _parts(tp: int) -> dict[str, list[torch.Tensor]]:
    parallel_state.initialize_model_parallel(tp)
    config, parts = ModelParallelConfig(tp), {}
    for name, init_method in INIT_METHODS.items():
        torch.manual_seed(3)
        column = ColumnParallelLinear(4, 6, config=config, init_method=init_method)
        row = RowParallelLinear(4, 6, config=config, init_method=init_method, bias=False)
        parts[name] = [column.weight.detach(), row.weight.detach(), torch.rand(2)]
    return parts


def test_initialiser_values_do_not_depend_on_tp():
    (serial,), cut = run_distributed(_parts, 1, 1), run_distributed(_parts, 2, 2)
    for name, (column, row, after) in serial.items():
        assert torch.equal(torch.cat([part[name][0] for part in cut]), column)
        assert torch.equal(torch.cat([part[name][1] for part in cut], dim=1), row)
        assert all(torch.equal(part[name][2], after) for part in cut)  # torch's stream went on as if nothing was drawn
        if name != "zeros_":
            assert not torch.equal(column, row) and column.std() > 0


def test_initialisers_serve_a_caller_with_one_tensor():
    torch.manual_seed(0)
    actual = init_method_normal(0.5)(torch.empty(1000))
    assert actual.std().item() == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (ColumnParallelLinear, {"stride": 2}, "ColumnParallelLinear: stride is 2"),
        (ColumnParallelLinear, {"is_expert": True}, "the matrices of experts are one GroupedLinear"),
        (ColumnParallelLinear, {"disable_grad_reduce": True}, "disable_grad_reduce"),
        (ColumnParallelLinear, {"grad_output_buffer": []}, "grad_output_buffer"),
        (RowParallelLinear, {"keep_master_weight_for_test": True}, "RowParallelLinear: keep_master_weight_for_test"),
    ],
)
def test_arguments_of_layers_that_are_refused(kind, given, message):
    with pytest.raises(ParallelConfigError, match=message):
        kind(2, 2, config=CONFIG, init_method=nn.init.zeros_, **given)


def test_foreign_layer_arguments():
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match="ColumnParallelLinear ignores tp_comm_buffer_name"):
        layer = ColumnParallelLinear(
            2, 2, config=CONFIG, init_method=nn.init.zeros_, tp_comm_buffer_name="qkv", name="linear"
        )
    assert layer(torch.ones(1, 2), None, True)[0].shape == (1, 2)
