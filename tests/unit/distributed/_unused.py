"""Training with parameters that a backward does not reach, under a wrapper and in one process, which is the oracle.

One rule makes a wrapper differ from a plain module: `give_unused_zero_gradients`. Oracles apply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit.distributed._toys import synced_last

Numbers = tuple[list[float], dict[str, Tensor]]
"""Gradient norms of the steps, and weights after them."""
UseOf = Callable[[int, int], Any]
"""Returns which parts of a model of these tests run in a step on a rank."""


def give_unused_zero_gradients(parameters: Iterable[nn.Parameter], attribute: str = "grad") -> None:
    """Gives zeros to parameters that are trainable when gradients are finalized, and that no backward has reached.

    Momentum and weight decay move them, which an optimizer of torch would leave out. The same under every wrapper, as
    in Megatron-LM; `test_unused_parameters` checks it by numbers.
    """
    for parameter in parameters:
        if parameter.requires_grad and getattr(parameter, attribute, None) is None:
            setattr(parameter, attribute, torch.zeros_like(parameter))


def batches(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(4, 7, generator=generator) for _ in range(2)]


def optimizer_of(model: nn.Module) -> Any:
    return get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.5, weight_decay=0.1), [model])


def train_in_one_process(model: nn.Module, use_of: UseOf, steps: int = 3, scale: float = 1 / 2) -> Numbers:
    """Adds the gradients of two ranks in their order, and scales them."""
    optimizer, norms = optimizer_of(model), []
    for step in range(steps):
        totals: dict[nn.Parameter, Tensor] = {}
        for rank in range(2):
            optimizer.zero_grad()
            for batch in batches(step, rank):
                model(batch, use_of(step, rank)).backward()
            give_unused_zero_gradients(model.parameters())
            totals = {p: totals[p] + p.grad if totals else p.grad for p in model.parameters()}
        for p, total in totals.items():
            p.grad = total * scale
        norms.append(float(optimizer.step()[1]))
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def train_on_ranks(
    model: Any, use_of: UseOf, steps: int = 3, num_tokens: int | None = None
) -> tuple[Any, list[float]]:
    """Trains a wrapped model, with a forward for evaluation after each step. Returns the optimizer, and norms."""
    optimizer, norms, rank = optimizer_of(model), [], dist.get_rank()
    for step in range(steps):
        model.zero_grad_buffer()
        for batch in synced_last(model, batches(step, rank)):
            model(batch, use_of(step, rank)).backward()
        finalize_model_grads([model], num_tokens)
        norms.append(float(optimizer.step()[1]))
        with torch.no_grad():
            model(batch, use_of(step, rank))
    return optimizer, norms
