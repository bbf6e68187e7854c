"""The update of a wrapped run by an optimizer of torch, as a program writes it out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.compositions.composition import Composition
from tests.compositions.settings import is_matrix, optimizer_config


class TorchOptimizer:
    """Torch's SGD and `clip_grad_norm_` on ``param.grad``, with the calls of `MegatronOptimizer` that a loop makes."""

    def __init__(self, composition: Composition, module: nn.Module) -> None:
        self._config = config = optimizer_config(composition)
        named = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._params = list(named.values())
        is_decayed = {name: composition.decay == "all" or is_matrix(name, p) for name, p in named.items()}
        groups = [
            {"params": [p], "weight_decay": config.weight_decay if is_decayed[name] else 0.0}
            for name, p in named.items()
        ]
        self._rule = torch.optim.SGD(groups, lr=config.lr or 0.0, momentum=config.sgd_momentum)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss

    def get_loss_scale(self) -> Tensor:
        return torch.ones(())

    def state_tensors(self) -> Mapping[str, Tensor]:
        return {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._rule.zero_grad(set_to_none)

    def step(self) -> tuple[bool, float, None]:
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for p in self._params if (g := p.grad) is not None]
        norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in whole))
        if self._config.clip_grad > 0.0:
            torch.nn.utils.clip_grad_norm_(self._params, self._config.clip_grad)
        self._rule.step()
        return True, norm, None
