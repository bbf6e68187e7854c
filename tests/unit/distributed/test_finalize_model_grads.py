"""Gradients of parameters replicated over tensor-parallel ranks, finished under every wrapper; the rest of
`finalize_model_grads` is part of the contract in `test_data_parallel_base.py`."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from core import parallel_state
from core.base.errors import ShardstackError
from core.distributed import finalize_model_grads, wrap_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer, shard_optimizer
from tests.unit._gpt import build_gpt, ddp_config, loss_of, micro_batches
from tests.unit._runs import gradients
from tests.unit._spawn import on_ranks, run_distributed

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


def _shared_by_stages(wrapper: str) -> None:
    module = nn.Linear(2, 2, bias=False)
    module.weight.shared_embedding = True
    model = wrap_model(module, SimpleNamespace(), ddp_config(wrapper))
    for _ in range(2):
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        finalize_model_grads([model])


@on_ranks(2)
def test_gradients_that_two_stages_have_summed_do_not_add_up() -> None:
    """Over both stages they would be summed a second time with what is added."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for wrapper in ("ddp", "zero2", "fsdp2"):
        with pytest.raises(
            ShardstackError, match="a backward added gradients after those of the step had been reduced"
        ):
            _shared_by_stages(wrapper)


def _whole_gradients(wrapper: str, per_token: bool) -> dict[str, list[torch.Tensor]]:
    """Returns what ``main_grad`` has after each change of the gradients, on two replicas of two tensor-parallel
    ranks."""
    torch.manual_seed(1)
    module = nn.Linear(5, 3)
    module.bias.sequence_parallel = True
    model = wrap_model(module, SimpleNamespace(calculate_per_token_loss=per_token), ddp_config(wrapper))
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, clip_grad=0.5)
    found: dict[str, list[torch.Tensor]] = {"weight": [], "bias": []}

    def note() -> None:
        for name, parameter in module.named_parameters():
            found[name].append(parameter.main_grad.clone())

    for _ in range(2):
        model.zero_grad_buffer()
        model(torch.arange(10.0).view(2, 5) * (dist.get_rank() + 1)).square().sum().backward()
        finalize_model_grads([model], 16.0 if per_token else None, force_all_reduce=True)
        note()
        model.scale_gradients(0.25)
        note()
        optimizer.step()  # which clips in place
        note()
    return found


@on_ranks(4)
def test_whole_gradients_are_gathered_last() -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for per_token in (False, True):
        expected = _whole_gradients("ddp", per_token)
        assert not torch.equal(expected["bias"][1], expected["bias"][2])
        for name, gradients_ in _whole_gradients("zero1, overlapped", per_token).items():
            for found, whole in zip(gradients_, expected[name], strict=True):
                torch.testing.assert_close(found, whole)  # clipped by a norm that was summed in another order
