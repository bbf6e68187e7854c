"""Training in fp8 has the same bits under every wrapper, for models of torch, of torchao and of ours, and learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import finalize_model_grads, wrap_model
from core.fp8 import use_fp8_products
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.functional._equality import ADAMW, assert_bitwise
from tests.unit._gpt import Training, ddp_config
from tests.unit._quick import needs
from tests.unit._runs import run_wrapped
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import full
from tests.unit.test_fp8 import RECIPES, SIZES, rows_on_cpu

WRAPPERS = ("zero1, overlapped", "zero2", "zero3", "fsdp2")
MOST_OFF = 0.04
"""How far the mean loss of 20 steps may be from that in fp32, relative to it: half a step of e4m3 is 2^-4 = 6 %."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class _Plain(nn.Module):
    """A model of torch's modules alone, whose head has a size that fp8 does not take."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _train_plain(
    wrapper: str, recipe: str | None, by: Any, steps: int, fields: dict[str, Any]
) -> tuple[list[float], Any]:
    """Returns losses, and whole weights after the steps."""
    torch.manual_seed(3)
    plain = _Plain()
    if recipe is not None:
        names = use_fp8_products(plain, recipe, layers=("blocks.*",), by=by)
        assert names == [f"blocks.{index}.{name}" for index in range(2) for name in ("up", "down")]
    model = wrap_model(plain, None, ddp_config(wrapper, **fields), process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=1.0), [model])
    draws, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        model.zero_grad_buffer()
        total = torch.zeros(())
        for index in range(2):
            first = torch.randint(40, (4, 1), generator=draws)
            tokens = (first + 3 * torch.arange(8)) % 40
            with model.no_sync() if index == 0 else nullcontext():
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            total += loss.detach()
        finalize_model_grads([model])
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item())
    optimizer.finish_step()
    return losses, {name: full(parameter) for name, parameter in model.module.named_parameters()}


def _assert_same_bits(recipe: str, by: str, wrappers: Sequence[str] = WRAPPERS, **fields: Any) -> None:
    losses, weights = run_distributed(_train_plain, 2, "ddp", recipe, by, 3, {})[0]
    for wrapper in wrappers:
        for found, whole in run_distributed(_train_plain, 2, wrapper, recipe, by, 3, fields):
            assert found == losses and whole.keys() == weights.keys()
            assert [name for name, weight in weights.items() if not torch.equal(whole[name], weight)] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plain_model_has_the_same_bits_in_any_wrapper(recipe):
    _assert_same_bits(recipe, "torch")


def test_recomputed_blocks_have_the_same_bits():
    _assert_same_bits("tensorwise", "torch", ("zero3", "fsdp2"), activation_checkpointing="full")


@needs("torchao")
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=rows_on_cpu)])
def test_layers_of_torchao_have_the_same_bits_in_any_wrapper(recipe):
    _assert_same_bits(recipe, "torchao")


def _gpt(precision: str = "fp32", steps: int = 4, **fields: Any) -> Training:
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    return Training(ADAMW, steps, precision=precision, fields={**SIZES, **fp8, **fields})


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.long)])
def test_a_gpt_has_the_same_bits_in_any_wrapper(precision):
    training = _gpt(precision, 4 if precision == "bf16" else 18)
    expected = run_distributed(run_wrapped, 2, "ddp", training)[0]
    assert (0 in expected.skipped) == (precision == "fp16")  # its first loss scales are too large
    assert len(expected.skipped) < training.steps / 2
    for wrapper in WRAPPERS if precision == "bf16" else ("zero2", "fsdp2"):
        for curve in run_distributed(run_wrapped, 2, wrapper, training):
            assert_bitwise(curve, expected)


CUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tensor": {"groups": {"tensor_model_parallel_size": 2}},
    "sequence": {"groups": {"tensor_model_parallel_size": 2}, "cut": {"sequence_parallel": True}},
    "pipeline": {"groups": {"pipeline_model_parallel_size": 2}},
    "zero bubble": {
        "groups": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "cut": {"pipeline_parallel_schedule": "ZBVZeroBubble"},
    },
}


@pytest.mark.parametrize(
    "cut", [name if name in ("whole", "pipeline") else pytest.param(name, marks=pytest.mark.long) for name in CUTS]
)
def test_twenty_steps_are_near_those_in_fp32(cut):
    training = dataclasses.replace(_gpt(steps=20, vocab=64, num_layers=4), tied=False, length=12, **CUTS[cut])
    means = {}
    for fp8 in ("hybrid", None):
        curves = run_distributed(
            run_wrapped, 2, "ddp", dataclasses.replace(training, fields={**training.fields, "fp8": fp8})
        )
        means[fp8] = torch.tensor(max(curve.losses for curve in curves)).mean().item()
    assert 0 < abs(means["hybrid"] - means[None]) <= MOST_OFF * means[None], means


def test_twenty_steps_of_a_plain_model_are_near_those_in_fp32():
    in_fp8, in_fp32 = (
        run_distributed(_train_plain, 2, "ddp", recipe, "torch", 20, {})[0][0] for recipe in ("tensorwise", None)
    )
    assert in_fp8[-1] < 0.7 * in_fp8[0]
    assert 0 < abs(sum(in_fp8) - sum(in_fp32)) <= MOST_OFF * sum(in_fp32)
