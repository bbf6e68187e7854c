"""A trainable parameter that a step does not use has a gradient of zeros, under every wrapper: docs/contract.md.

The numbers are written out here, because oracles of other tests apply the same rule.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import finalize_model_grads
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import WRAPPERS, build, full
from tests.unit.distributed._unused import give_unused_zero_gradients

PLAIN = "a plain module by the rule of the oracles"


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(4, 3))
        self.spare = nn.Parameter(torch.full((4, 3), 2.0))
        self.frozen = nn.Parameter(torch.full((4, 3), 3.0))

    def forward(self, uses_spare: bool) -> Tensor:
        """Returns a scalar whose gradients are ones."""
        return self.used.sum() + self.frozen.sum() + (self.spare.sum() if uses_spare else 0.0)


def _made(kind: str, **config: object) -> tuple[nn.Module, nn.Module, MegatronOptimizer]:
    module = Spare()
    model = module if kind == PLAIN else build(kind, module, config=SimpleNamespace())
    return model, module, get_megatron_optimizer(OptimizerConfig(clip_grad=0.0, **config), [model])


def _step(model: nn.Module, module: nn.Module, optimizer: MegatronOptimizer, uses_spare: bool) -> None:
    optimizer.zero_grad()
    model(uses_spare).backward()
    if model is module:
        give_unused_zero_gradients(module.parameters())
    else:
        finalize_model_grads([model])
    optimizer.step()


def _decays(kind: str) -> None:
    model, module, optimizer = _made(kind, lr=0.5, weight_decay=0.25)
    module.frozen.requires_grad_(False)
    _step(model, module, optimizer, False)
    weights = module.state_dict()
    assert torch.equal(full(weights["spare"]), torch.full((4, 3), 2.0 * (1 - 0.5 * 0.25)))
    assert torch.equal(full(weights["frozen"]), torch.full((4, 3), 3.0))


def _moves_on(kind: str) -> None:
    model, module, optimizer = _made(kind, optimizer="sgd", lr=1.0, weight_decay=0.0, sgd_momentum=0.5)
    third_gradient = 0.0 if kind == PLAIN else 0.5  # of one rank, and the mean over two
    uses_third = kind != PLAIN and dist.get_rank() == 0
    for uses, step in ((True, 1.0), (False, 0.5), (uses_third, 0.25 + third_gradient)):
        before = full(module.state_dict()["spare"])
        _step(model, module, optimizer, uses)
        assert torch.equal(full(module.state_dict()["spare"]), before - step)


@pytest.mark.parametrize("kind", WRAPPERS)
@on_ranks(2)
def test_decay_and_momentum_move_unused_parameters(kind: str) -> None:
    _decays(kind)
    _moves_on(kind)


def test_the_rule_of_the_oracles_moves_them_too() -> None:
    _decays(PLAIN)
    _moves_on(PLAIN)
