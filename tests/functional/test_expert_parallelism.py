"""Experts cut over ranks, under every wrapper: the numbers of one process, and bit by bit those of replicas."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.parameters import local_part
from core.dist_checkpointing.global_view import whole_view
from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from examples.gpt.run_model import load_run_model
from tests.functional._equality import assert_bitwise, assert_close, curves_of, serial
from tests.functional.test_experts import BALANCING, RECOMPUTED, SAME_SUMS, SGD, experts
from tests.unit._gpt import Training, ddp_config, in_precision, micro_batches
from tests.unit._program import TINY, run_program
from tests.unit._quick import quick
from tests.unit._runs import Curve
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole

_FIELDS = {
    "vocab": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "num_moe_experts": 4,
    "ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": None,  # context-parallel ranks have one of their own
}
OVER_TWO = {"expert_model_parallel_size": 2}
Layout = tuple[int, int, int, int]
"""Sizes of data, expert, tensor and context parallelism."""
LAYOUTS: list[Layout] = [(2, 2, 1, 1), (4, 2, 1, 1), (4, 4, 1, 1), (2, 2, 2, 1), (1, 1, 1, 2), (2, 2, 1, 2)]
WRAPPERS = ["zero1, overlapped", "zero2", "zero2, every micro-batch", "zero3", "fsdp2"]


def _training(balancing: str, per_token: bool, groups: Mapping[str, int] | None = None, **fields: Any) -> Training:
    training = experts(balancing, per_token, **_FIELDS | fields)
    return replace(training, groups=groups or {}, length=12)


def _runs(
    layout: Layout, wrapper: str, balancing: str, per_token: bool, sizes: Any = None, **fields: Any
) -> list[Curve]:
    dp, ep, tp, cp = layout
    groups = {"expert_model_parallel_size": ep, "tensor_model_parallel_size": tp, "context_parallel_size": cp}
    return curves_of(wrapper, _training(balancing, per_token, groups | (sizes or {}), **fields), dp * tp * cp)


def _serial(replicas: int, balancing: str, per_token: bool) -> Curve:
    return serial(_training(balancing, per_token), replicas)


_CASES = [(layout, b, t) for layout in LAYOUTS for b in BALANCING for t in (False, True)]
_QUICK = [((2, 2, 1, 1), "bias", False), ((2, 2, 2, 1), "aux", False), ((2, 2, 1, 2), "bias", True)]


@pytest.mark.parametrize(("layout", "balancing", "per_token"), quick(_CASES, lambda case: case in _QUICK))
def test_replicas_equal_one_process(layout, balancing, per_token):
    expected = _serial(layout[0], balancing, per_token)
    for curve in _runs(layout, "ddp", balancing, per_token):
        assert_close(curve, expected, SAME_SUMS)


_WRAPPED = [((4, 2, 1, 1), wrapper) for wrapper in WRAPPERS] + [((2, 2, 2, 1), "fsdp2")]


@pytest.mark.parametrize(
    ("layout", "wrapper"), quick(_WRAPPED, lambda case: case in (_WRAPPED[-1], ((4, 2, 1, 1), "zero3")))
)
def test_every_wrapper_equals_replicas(layout, wrapper):
    """Where each expert is on two ranks, or cut; the sample of compositions has it on one, under every wrapper."""
    expected = _runs(layout, "ddp", "aux", False)[0]
    for curve in _runs(layout, wrapper, "aux", False):
        if "every micro-batch" in wrapper:
            assert_close(curve, expected, SAME_SUMS)
        else:
            assert_bitwise(curve, expected)


def test_the_other_dispatcher_equals_one_process():
    fields = {"moe_token_dispatcher_type": "allgather", "moe_grouped_gemm": False}
    for curve in _runs((2, 2, 1, 1), "zero3", "aux", True, None, **fields):
        assert_close(curve, _serial(2, "aux", True), SAME_SUMS)


_RANKS_OF_EXPERTS: list[tuple[Layout, dict[str, int], str]] = [
    ((1, 1, 2, 1), {"expert_tensor_parallel_size": 1}, "zero3"),
    ((1, 1, 2, 1), {"expert_tensor_parallel_size": 1}, "zero1, overlapped"),
    ((1, 1, 2, 1), {"expert_tensor_parallel_size": 1}, "fsdp2"),
    ((1, 2, 2, 1), {"expert_tensor_parallel_size": 1}, "fsdp2"),
    ((2, 1, 1, 1), {"expert_tensor_parallel_size": 2}, "zero3"),
    ((4, 2, 1, 1), {"expert_tensor_parallel_size": 2}, "fsdp2"),
    ((4, 2, 1, 1), {"num_distributed_optimizer_instances": 2}, "hybrid zero1"),
    ((4, 2, 1, 1), {"num_distributed_optimizer_instances": 2}, "hybrid zero3"),
    ((4, 2, 1, 1), {"num_distributed_optimizer_instances": 2}, "hybrid fsdp2"),
]


@pytest.mark.parametrize(
    ("layout", "sizes", "wrapper"),
    quick(_RANKS_OF_EXPERTS, lambda case: case in (_RANKS_OF_EXPERTS[i] for i in (0, 3, 7))),
)
def test_experts_over_other_ranks_equal_one_process(layout, sizes, wrapper):
    per_token = "hybrid" not in wrapper
    expected = _serial(layout[0], "aux", per_token)
    for curve in _runs(layout, wrapper, "aux", per_token, sizes):
        assert_close(curve, expected, SAME_SUMS)


def test_recomputed_layers_exchange_tokens_again():
    expected = _runs((2, 2, 1, 1), "ddp", "bias", False)[0]
    for curve in _runs((2, 2, 1, 1), "fsdp2", "bias", False, None, **RECOMPUTED):
        assert_bitwise(curve, expected)


def _starts(wrapper: str, sizes: dict[str, int]) -> list[dict[str, torch.Tensor]]:
    """Returns the initial values of a model that was drawn on each rank, and of one that starts on the meta device."""
    found = []
    for on_meta in (False, True):
        parallel_state.initialize_model_parallel(**sizes)
        if not on_meta:
            torch.manual_seed(dist.get_rank())  # the first replica's values win, and each expert's own
        with torch.device("meta" if on_meta else "cpu"):
            module = _training("aux", False, **sizes).build()[0]
        wrap_model(module, module.config, ddp_config(wrapper))
        found.append(_whole_weights(module))
        parallel_state.destroy_model_parallel()
    return found


def _whole_weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(whole_view(p)).clone() for name, p in module.named_parameters()}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@functools.cache
def _starts_of_one_rank() -> list[list[dict[str, torch.Tensor]]]:
    return run_distributed(_starts, 1, "ddp", {})


@pytest.mark.parametrize("wrapper", ["ddp", "zero3", "fsdp2"])
def test_initial_values_are_the_same_over_any_ranks(wrapper):
    ((expected, _),) = _starts_of_one_rank()
    for world, of_world in ((2, OVER_TWO), (4, OVER_TWO | {"tensor_model_parallel_size": 2})):
        for of_rank in run_distributed(_starts, world, wrapper, of_world):
            for found in of_rank:
                _assert_equal(found, expected)


def _after_a_step(kind: str, config: Any) -> dict[str, torch.Tensor]:
    """Trains a step with all of the first layer frozen, its experts too, or with a parameter of the last layer that
    only the first rank uses."""
    parallel_state.initialize_model_parallel(**OVER_TWO)
    module = _training("aux", False, **OVER_TWO).build()[0]
    first, last = module.decoder.layers
    if kind == "frozen":
        first.requires_grad_(False)
    else:
        last.scale = torch.nn.Parameter(torch.ones(module.config.hidden_size))
        if dist.get_rank() == 0:
            last.register_forward_hook(lambda layer, args, output: output * layer.scale)
    model = wrap_model(module, module.config, config)
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD), [model])
    tokens, labels = micro_batches(0, parallel_state.get_data_parallel_rank(), False, 12)[-1]
    model(tokens, labels=labels).mean().backward()
    finalize_model_grads([model])
    optimizer.step()
    return _whole_weights(module)


def _assert_all_equal(kind: str, world: int, configs: list[Any]) -> None:
    expected = run_distributed(_after_a_step, world, kind, ddp_config("ddp"))[0]
    for config in configs:
        for found in run_distributed(_after_a_step, world, kind, config, limit_s=120):
            _assert_equal(found, expected)


def test_frozen_experts_are_sharded_over_their_own_ranks():
    _assert_all_equal("frozen", 4, [ddp_config("zero3"), ddp_config("fsdp2")])


def test_a_parameter_of_some_ranks_keeps_none_waiting():
    settings = {"data_parallel_sharding_strategy": "optim_grads", "bucket_size": 200}  # smaller than a matrix
    kinds = ({}, {"overlap_grad_reduce": True}, {"reduce_every_micro_batch": True})
    _assert_all_equal("used on one rank", 2, [DistributedDataParallelConfig(**settings, **fields) for fields in kinds])


@pytest.mark.parametrize("wrapper", ["zero1, overlapped", "fsdp2"])
@on_ranks(2)
def test_an_infinite_gradient_of_an_expert_skips_the_step(wrapper):
    parallel_state.initialize_model_parallel(**OVER_TWO)
    module = _training("aux", False, **OVER_TWO, fp16=True).build()[0]
    model = wrap_model(in_precision(module, wrapper), module.config, ddp_config(wrapper, grad_reduce_in_fp32=True))
    options = {"fp16": True, "initial_loss_scale": 1024.0}
    optimizer = get_megatron_optimizer(OptimizerConfig(**SGD, **options), [model])
    results = []
    for step in range(2):
        before = whole(whole_view(next(module.parameters()))).clone()
        model.zero_grad_buffer()
        tokens, labels = micro_batches(step, dist.get_rank(), False, 12)[0]
        optimizer.scale_loss(model(tokens, labels=labels).mean()).backward()
        finalize_model_grads([model])
        if step == 1 and dist.get_rank() == 1:
            experts = module.decoder.layers[0].mlp.experts.linear_fc1.weight
            local_part(model.local_gradient(experts)).view(-1)[:1] = torch.inf
        updated, _, _ = optimizer.step()
        results.append((updated, torch.equal(before, whole(whole_view(next(module.parameters()))))))
    assert results == [(True, False), (False, True)]


def test_a_run_takes_experts_over_ranks_as_flags(corpus, tmp_path):
    flags = ("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall")
    run = ("--data-path", corpus, "--lr", "1e-3", "--train-iters", "2", "--save", tmp_path / "run")
    ended = run_program("pretrain_gpt", *TINY, *run, *flags, folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.err
    config, model = load_run_model(tmp_path / "run" / "iter_0000002")
    assert (config.model.expert_model_parallel_size, model.config.expert_model_parallel_size) == (2, 1)
    again = ("--data-path", corpus, "--lr", "1e-3", "--train-iters", "3", "--load", tmp_path / "run")
    renewed = ("--override-opt_param-scheduler",)
    ended = run_program("pretrain_gpt", *TINY, *again, *flags[:2], "--use-torch-fsdp2", *renewed, folder=tmp_path)
    assert ended.status == 0, ended.err
    refused = run_program("pretrain_gpt", *TINY, *run, *flags[:2], *flags[2:3], "3", folder=tmp_path)
    assert refused.status == 2 and "which expert_model_parallel_size 3 does not divide" in refused.err
