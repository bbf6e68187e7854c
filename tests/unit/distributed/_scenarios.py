"""Models whose gradients arrive in ways that a wrapper on buffers must survive, and their serial oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.distributed import finalize_model_grads
from tests.unit.distributed._toys import Toy, batches, build, gradients, loss_of, synced_last, toy

STEPS = 2


class Called(Toy):
    """Every block runs twice, the first one through another module too, so that its weights are used three times."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embedding(tokens))
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Recomputed(Toy):
    """Blocks run again during backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Adapted(nn.Module):
    """A frozen linear layer with a trainable one of rank 2 next to it (LoRA, Hu et al., 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def _adapted() -> nn.Module:
    model = toy().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def _mixed() -> nn.Module:
    model = toy(tied=False)
    model.blocks[1].double()
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda x: forward(x.double()).float()
    return model


def _seeded(model_class: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return model_class()


def _skip_a_block(model: nn.Module, tokens: torch.Tensor, step: int, index: int, rank: int) -> torch.Tensor:
    """In step 0 the second block is used in the first micro-batch alone, in step 1 on rank 0 alone."""
    inner = getattr(model, "module", model)
    whole, is_used = inner.blocks, index == 0 if step == 0 else rank == 0
    inner.blocks = whole if is_used else whole[:1]
    try:
        return loss_of(model, tokens)
    finally:
        inner.blocks = whole


def _never_use_the_head(model: nn.Module, tokens: torch.Tensor, step: int, index: int, rank: int) -> torch.Tensor:
    inner = getattr(model, "module", model)
    return inner.blocks[0](inner.embedding(tokens)).square().mean()


Loss = Callable[[nn.Module, torch.Tensor, int, int, int], torch.Tensor]


@dataclass(frozen=True)
class Scenario:
    """A model, and the loss of one micro-batch of it by step, place in the step, and rank."""

    make: Callable[[], nn.Module]
    loss: Loss = lambda model, tokens, step, index, rank: loss_of(model, tokens)


SCENARIOS = {
    "called several times": Scenario(lambda: _seeded(Called)),
    "recomputed": Scenario(lambda: _seeded(Recomputed)),
    "frozen but for adapters": Scenario(_adapted),
    "unused in one step": Scenario(lambda: toy(tied=False), _skip_a_block),
    "never used": Scenario(lambda: toy(tied=False), _never_use_the_head),
    "double precision": Scenario(lambda: toy().double()),
    "mixed precisions": Scenario(_mixed),
    "nothing trainable but one": Scenario(
        lambda: (m := toy().requires_grad_(False), m.blocks[0].gain.requires_grad_())[0]
    ),
}


def serial_gradients(scenario: Scenario, step: int, world_size: int = 2) -> dict[str, torch.Tensor]:
    """Returns the mean over ranks of what each accumulates by itself, zeros where nothing arrives."""
    totals: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        model = scenario.make()
        for index, tokens in enumerate(batches(rank)):
            scenario.loss(model, tokens, step, index, rank).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                totals[name] = totals[name] + gradient if name in totals else gradient
    return {name: total / world_size for name, total in totals.items()}


def wrapped_gradients(kind: str, scenario: Scenario) -> list[dict[str, torch.Tensor]]:
    """Returns the gradients of this rank under a wrapper, step by step."""
    model = build(kind, scenario.make())
    found = []
    for step in range(STEPS):
        model.zero_grad_buffer()
        for index, tokens in synced_last(model, enumerate(batches(dist.get_rank()))):
            scenario.loss(model, tokens, step, index, dist.get_rank()).backward()
        finalize_model_grads([model])
        found.append(gradients(model))
    return found
