"""Gradients of parameters replicated over tensor-parallel ranks, finished under every wrapper; the rest of
`finalize_model_grads` is part of the contract in `test_data_parallel_base.py`."""

from __future__ import annotations

import functools

import pytest
import torch

from core import parallel_state
from core.distributed import finalize_model_grads, wrap_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.functional._runs import build_gpt, ddp_config, gradients, loss_of, micro_batches
from tests.unit._spawn import run_distributed

SIZES = {"hidden_size": 16, "ffn_hidden_size": 36, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6}
WRAPPERS = ("ddp", "zero1, overlapped", "zero2", "fsdp2")
SIZES |= {"qk_layernorm": True, "num_layers": 1, "vocab": 62}


def _gradients(wrapper: str, tp: int, sequence_parallel: bool, skip_the_sum: bool) -> dict[str, torch.Tensor]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    module = build_gpt(True, tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel, **SIZES)
    model = wrap_model(module, module.config, ddp_config(wrapper))
    tokens, labels = micro_batches(0, 0)[0]
    loss_of(model, (tokens[:, :12], labels[:, :12])).backward()  # 12 tokens, which two ranks share evenly
    if skip_the_sum:
        model.finish_grad_sync()
    else:
        finalize_model_grads([model])
    return gradients(get_megatron_optimizer(OptimizerConfig(lr=1.0), [model]))


def _wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> set[str]:
    """Returns the names of gradients that are off by more than the tolerance, relative to their L2 norm."""
    assert found.keys() == expected.keys()
    return {name for name, g in expected.items() if (found[name] - g).norm() > tolerance * g.norm()}


@functools.cache
def _serial() -> dict[str, torch.Tensor]:
    return run_distributed(_gradients, 1, "ddp", 1, False, False)[0]


@pytest.mark.parametrize(
    ("wrapper", "sequence_parallel"),
    [("ddp", True), ("ddp", False), ("zero1, overlapped", True), ("zero2", False), ("fsdp2", True), ("fsdp2", False)],
)
def test_tensor_parallel_gradients_equal_the_serial_ones(wrapper, sequence_parallel):
    for rank_gradients in run_distributed(_gradients, 2, wrapper, 2, sequence_parallel, False):
        assert not _wrong(rank_gradients, _serial(), 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_sharded_tensor_parallel_gradients_equal_the_serial_ones(wrapper):
    for rank_gradients in run_distributed(_gradients, 4, wrapper, 2, True, False):  # two replicas of two pieces
        assert not _wrong(rank_gradients, _serial(), 1e-5)


@pytest.mark.parametrize("wrapper", ["zero2", "fsdp2"])
def test_without_the_sum_over_tp_norms_and_biases_are_wrong(wrapper):
    partial = run_distributed(_gradients, 2, wrapper, 2, True, True)[0]
    replicated = {n for n in _serial() if "norm" in n or n.endswith(("linear_proj.bias", "linear_fc2.bias"))}
    assert _wrong(partial, _serial(), 1e-2) == replicated
