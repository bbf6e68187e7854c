"""Muon in one process: our own, for which torch has no oracle that takes a whole model.

`tests/unit/optimizer` compares its updates with those of `torch.optim.Muon`. Here it shows what ranks change.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from core.optimizer import get_megatron_optimizer
from tests.compositions.composition import Composition
from tests.compositions.settings import optimizer_config, parameter_groups, scheduler_of


class OwnMuon:
    """An update rule of `PlainOptimizer`, of fp32 parameters by the clipped gradients in their masters.

    Attributes:
        param_groups: none that a schedule may set, because it has a schedule of its own.
    """

    def __init__(self, composition: Composition, module: nn.Module) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        config = replace(optimizer_config(composition), clip_grad=0.0)
        self._optimizer = get_megatron_optimizer(config, [module], **parameter_groups(composition))
        self._scheduler = scheduler_of(composition, self._optimizer)

    def step(self) -> None:
        """Updates the parameters by their ``main_grad``, which is clipped."""
        self._optimizer.step()
        self._scheduler.step(1)
