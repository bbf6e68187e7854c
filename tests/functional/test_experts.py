"""Experts under every wrapper: the numbers of one process, for losses and biases, means and sums of tokens."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core import parallel_state
from core.distributed import finalize_model_grads, wrap_model
from core.transformer.moe.experts import GroupedLinear
from core.transformer.sequences import own_chunks
from tests.functional._equality import SGD as FAST_SGD
from tests.functional._equality import Tolerance, assert_bitwise, assert_close, curves_of, replicated, serial
from tests.unit._gpt import Training, ddp_config, in_precision, micro_batches
from tests.unit._program import TINY, log, run_program
from tests.unit._spawn import on_ranks, run_distributed

SGD = FAST_SGD | {"lr": 0.05}
_EXPERTS = {
    "num_moe_experts": 5,
    "moe_ffn_hidden_size": 16,
    "hidden_size": 24,
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
}
BALANCING: dict[str, dict[str, Any]] = {
    "aux": {
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.05, 0.05],
        "moe_z_loss_coeff": 0.01,
        "moe_grouped_gemm": True,
    },
    "bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.02,
        "moe_expert_capacity_factor": 1.5,
        # By position: tokens of equal probability, which these data have, change places by a rounding of weights.
        "moe_token_drop_policy": "position",
    },
}
STEPS = 3
"""Warm-up begins at zero: the third step is the first to show what the first got wrong in the weights."""
LONGEST_SUMS = 2 * (2 * (3 * 24 + 2 * 16 + 13 + 6) + 24 + 4 * 4 * 2 * 13)
"""Additions behind an element of a gradient, in forward and as many in backward: inner sizes of the products of two
layers (projections and the router of width 24, heads, experts) and of the output, and the tokens of a step."""
ROUNDING = LONGEST_SUMS**0.5 * torch.finfo(torch.float32).eps
"""Relative: roundings of n additions in another order add up like sqrt(n) (Higham and Mary, 2019)."""
SAME_SUMS = Tolerance(losses=ROUNDING, grad_norms=ROUNDING, gradients=ROUNDING, masters=ROUNDING)


def experts(balancing: str, per_token: bool, **fields: Any) -> Training:
    """Returns a training of a GPT with experts; ``fields`` override its config."""
    settings = {**_EXPERTS, **BALANCING[balancing], **fields}
    return Training(SGD, steps=STEPS, tied=False, per_token=per_token, fields=settings)


@pytest.mark.parametrize(("balancing", "per_token"), [("aux", True), ("bias", False)])
def test_replicas_equal_one_process(balancing, per_token):
    training = experts(balancing, per_token)
    expected, found = serial(training, 2), replicated(training, 2)
    assert_close(found, expected, SAME_SUMS)
    if balancing == "bias":
        biases = [name for name in expected.masters if name.endswith("expert_bias")]
        assert len(biases) == 2
        assert all(torch.equal(found.masters[name], expected.masters[name]) for name in biases)
        assert all(expected.masters[name].abs().max() > 0.01 for name in biases)


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("wrapper", "fields"), [("zero1, overlapped", {}), ("zero2", {}), ("zero3", RECOMPUTED), ("fsdp2", RECOMPUTED)]
)
def test_every_wrapper_equals_replicas(wrapper, fields):
    """Where tokens are dropped; the sample of compositions has the other ways to balance under every wrapper."""
    for curve in curves_of(wrapper, experts("bias", False, **fields), 2):
        assert_bitwise(curve, replicated(experts("bias", False), 2))


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("wrapper", ["ddp", "zero1, overlapped", "zero2", "zero3", "fsdp2"])
@on_ranks(2)
def test_matrices_of_experts_begin_at_16_bytes(wrapper, bf16):
    """CUDA's grouped product refuses others. The CPU's takes them."""
    # Biases of an odd number of bytes, which follow each other in a buffer without a gap, move all that is after them.
    module = experts("aux", False, add_qkv_bias=True, bf16=bf16).build()[0]
    config = ddp_config(wrapper, grad_reduce_in_fp32=bf16)
    model = wrap_model(in_precision(module, wrapper), module.config, config, process_group=dist.group.WORLD)
    found: dict[str, list[int]] = {"forward": [], "backward": [], "kernel": []}
    for layer in (layer for layer in module.modules() if isinstance(layer, GroupedLinear)):
        layer.register_forward_pre_hook(lambda layer, _: found["forward"].append(layer.weight.data_ptr()))
        layer.register_full_backward_pre_hook(lambda layer, _: found["backward"].append(layer.weight.data_ptr()))
    multiply = F.grouped_mm

    def noted(rows: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        found["kernel"] += [rows.data_ptr(), weight.data_ptr()]
        return multiply(rows, weight, **options)

    ((tokens, labels), *_) = micro_batches(0, dist.get_rank())
    with mock.patch.object(F, "grouped_mm", noted):
        model(tokens, labels=labels).mean().backward()
    finalize_model_grads([model])
    assert [len(addresses) for addresses in found.values()] == [4, 4, 8]
    assert [address % 16 for addresses in found.values() for address in addresses] == [0] * 16


# Two ranks of one model: one step of one micro-batch, whose masked tokens are all in one half of the sequences.

_KINDS: dict[str, dict[str, Any]] = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp": {"context_parallel_size": 2},
}
_EVEN = {"vocab": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 16, "add_bias_linear": True}


def _one_step(kind: str, balancing: str, per_token: bool) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Returns the gradient of each parameter, this rank's part, and the biases after the step."""
    sizes = _KINDS.get(kind, {})
    parallel_state.initialize_model_parallel(**{n: size for n, size in sizes.items() if n != "sequence_parallel"})
    module = experts(balancing, per_token, **_EVEN, **sizes).build()[0]
    model = wrap_model(module, module.config, ddp_config("ddp"))
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, 61, (2, 3, 12), generator=generator)
    mask = torch.ones(3, 12)
    mask[:, 1:5] = 0
    num_tokens = mask.sum() / sizes.get("context_parallel_size", 1)
    tokens, labels, mask = own_chunks(tokens), own_chunks(labels), own_chunks(mask)
    model.zero_grad_buffer()
    loss = (model(tokens, labels=labels) * mask).sum()
    (loss if per_token else loss / num_tokens).backward()
    finalize_model_grads([model], mask.sum() if per_token else None)
    biases = [value.clone() for name, value in module.named_buffers() if name.endswith("expert_bias")]
    return {name: parameter.main_grad.clone() for name, parameter in module.named_parameters()}, biases


def _alone(balancing: str, per_token: bool) -> dict[str, torch.Tensor]:
    gradients, biases = _one_step("", balancing, per_token)
    return {**gradients, **{f"bias {i}": bias for i, bias in enumerate(biases)}}


def _pairs(
    kinds: list[str], balancing: str, per_token: bool, whole: dict[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns what this rank has under each kind of parallelism, and the part of the whole that it has to equal."""
    pairs = {}
    for kind in kinds:
        found, biases = _one_step(kind, balancing, per_token)
        rank, size = (get() for get in _TENSOR_PARALLEL)
        for name, parameter in experts(balancing, per_token, **_EVEN, **_KINDS[kind]).build()[0].named_parameters():
            is_cut = parameter.tensor_model_parallel
            expected = whole[name].chunk(size, parameter.partition_dim)[rank] if is_cut else whole[name]
            pairs[f"{kind}: {name}"] = found[name], expected
        pairs |= {f"{kind}: bias {i}": (bias, whole[f"bias {i}"]) for i, bias in enumerate(biases)}
        parallel_state.destroy_model_parallel()
    return pairs


_TENSOR_PARALLEL = (parallel_state.get_tensor_model_parallel_rank, parallel_state.get_tensor_model_parallel_world_size)


@pytest.mark.parametrize(("balancing", "per_token"), [("aux", False), ("aux", True), ("bias", True)])
def test_ranks_of_one_model_equal_one_process(balancing, per_token):
    # Each context-parallel rank has a capacity of its own.
    kinds = [kind for kind in _KINDS if (kind, balancing) != ("cp", "bias")]
    (whole,) = run_distributed(_alone, 1, balancing, per_token)
    for pairs in run_distributed(_pairs, 2, kinds, balancing, per_token, whole):
        for name, (found, expected) in pairs.items():
            assert (found - expected).abs().max() <= ROUNDING * expected.abs().max(), name


def test_a_run_logs_the_balance_of_each_layer(corpus, tmp_path):
    flags = ("--num-experts", "4", "--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss")
    flags += ("--moe-aux-loss-coeff", "0.01", "0.01", "--moe-layer-freq", "([0]+[1])", "--moe-per-layer-logging")
    run = ("--data-path", corpus, "--lr", "1e-3", "--train-iters", "3", "--save", tmp_path / "run")
    ended = run_program("pretrain_gpt", *TINY, *run, *flags, "--tensorboard-dir", tmp_path / "tb", folder=tmp_path)
    assert ended.status == 0, ended.err
    steps = [line for line in log(tmp_path / "run") if "loss" in line]
    assert len(steps) == 3
    for line in steps:
        loads = [line[f"moe/layer_2/expert_{index}/load"] for index in range(4)]
        assert sum(loads) == pytest.approx(4) and line["moe/load_max"] == max(loads)
        assert line["moe/balance_loss"] > 1.8 and 0 < line["moe/entropy"] < 1.4 and line["moe/dropped_share"] == 0
    assert [*(tmp_path / "tb").rglob("events.*")]
    (line,) = (line for line in ended.out.splitlines() if line.startswith("tokens of experts"))
    counts, where = line.removeprefix("tokens of experts").split(" in ")
    shares = [int(count) / (2 * 32 * 2) for count in counts.split()]  # 2 samples of 32 tokens with 2 experts each
    assert where == "layer 2"
    assert [4 * share for share in shares] == pytest.approx(
        [steps[-1][f"moe/layer_2/expert_{index}/load"] for index in range(4)]
    )
    refused = run_program("pretrain_gpt", *TINY, *run, "--num-experts", "4", "--moe-router-topk", "5", folder=tmp_path)
    assert refused.status == 2 and "moe_router_topk 5 is above num_moe_experts 4" in refused.err
