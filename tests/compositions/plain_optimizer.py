"""The update of the serial run: torch's own AdamW or SGD, and clipping and loss scale written out once more.

It shares nothing with `core.optimizer` but the constants, so that a fault there shows in a comparison with this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.compositions.composition import Composition
from tests.compositions.own_muon import OwnMuon
from tests.compositions.settings import DECAYS, is_matrix, optimizer_config, parameter_groups

SCHEDULE = ((0.25, 0.5), (1.0, 0.75), (0.7, 1.0))
"""Factors of the learning rate and of weight decay after so many updates, with a schedule: the rate rises from 1/4 in
one step and falls to 1/10 in three more, decay rises from 1/2 to 3/2 in four, all along lines."""


class PlainOptimizer:
    """Steps fp32 masters by ``main_grad``, and copies them into the parameters.

    Attributes:
        masters: by name, of each parameter that was trained when this was built; the parameter itself in fp32.
        scale: of the loss, 1 but in fp16.
    """

    def __init__(self, composition: Composition, module: nn.Module) -> None:
        self._config = config = optimizer_config(composition)
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.masters = {name: p.detach().float() for name, p in self._params.items()}
        # What was copied into parameters last: others have written what differs from it.
        self._published = {name: p.detach().clone() for name, p in self._params.items()}
        factor = parameter_groups(composition).get("lr_mult", 1.0)  # of the second layer
        groups = [
            {
                "params": [self.masters[name]],
                "peak": (config.lr or 0.0) * (factor if "layers.1" in name else 1.0),
                "decay": config.weight_decay if composition.decay == "all" or is_matrix(name, p) else 0.0,
            }
            for name, p in self._params.items()
        ]
        self._rule: torch.optim.Optimizer | OwnMuon
        if config.optimizer == "muon":
            self._rule = OwnMuon(composition, module)
        elif config.optimizer == "adam":
            betas = (config.adam_beta1, config.adam_beta2)
            self._rule = torch.optim.AdamW(groups, betas=betas, eps=config.adam_eps, foreach=False)
        else:
            self._rule = torch.optim.SGD(groups, lr=0.0, momentum=config.sgd_momentum, foreach=False)
        self.scale = (config.initial_loss_scale or 1.0) if config.fp16 else 1.0
        self._finite_steps = 0
        self._clips_in_place = composition.steps_by_torch  # what gradients that nothing zeroes are added to
        self._is_constant = composition.schedule == "constant"
        self._updates = 0
        self._decay = None if composition.averaged == "no" else DECAYS[composition.averaged]
        self.averages = {} if composition.averaged == "no" else {n: m.clone() for n, m in self.masters.items()}

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Leaves gradients: they are kept in ``main_grad``, which the training clears."""

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, None]:
        self._take_written()
        for name, p in self._params.items():
            gradient = getattr(p, "main_grad", None)
            self.masters[name].grad = None if gradient is None else gradient.double().div(self.scale).float()
        gradients = [m.grad for m in self.masters.values() if m.grad is not None]
        norm = math.sqrt(sum(g.double().pow(2).sum().item() for g in gradients))
        if self._config.fp16:
            self._adapt_scale(math.isfinite(norm))
        if not math.isfinite(norm):
            return False, None, None
        if norm > self._config.clip_grad > 0.0:
            for gradient in gradients:
                gradient.mul_(self._config.clip_grad / norm)
        rate, decay = (1.0, 1.0) if self._is_constant else SCHEDULE[self._updates]
        for group in self._rule.param_groups:
            group["lr"], group["weight_decay"] = rate * group["peak"], decay * group["decay"]
        unclipped = [getattr(p, "main_grad", None) for p in self._params.values()]
        for name, p in self._params.items():
            p.main_grad = self.masters[name].grad  # type: ignore[attr-defined]  # which `OwnMuon` reads
        self._rule.step()
        for p, gradient in zip(self._params.values(), unclipped, strict=True):
            if not self._clips_in_place:
                p.main_grad = gradient  # type: ignore[attr-defined]
        self._updates += 1
        self._publish(self.masters)
        for name, average in self.averages.items():
            share = 1.0 / self._updates if self._decay is None or self._updates == 1 else 1.0 - self._decay
            average.copy_(average.double() * (1.0 - share) + self.masters[name].double() * share)
        return True, norm, None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Makes the parameters the averages of masters over updates."""
        with torch.no_grad():
            self._take_written()
            weights = {name: master.clone() for name, master in self.masters.items()}  # in fp32 the parameters
            self._publish(self.averages)
            yield
            self._publish(weights)

    def _publish(self, values: dict[str, Tensor]) -> None:
        for name, p in self._params.items():
            p.copy_(values[name])
            self._published[name].copy_(p)

    def _take_written(self) -> None:
        for name, p in self._params.items():
            if not torch.equal(p, self._published[name]):
                self.masters[name].copy_(p)

    def _adapt_scale(self, is_finite: bool) -> None:
        """Doubles the scale after `loss_scale_window` finite steps in a row, and halves it at an overflow (hysteresis
        of one)."""
        self._finite_steps = self._finite_steps + 1 if is_finite else 0
        if not is_finite:
            self.scale /= 2
        elif self._finite_steps == self._config.loss_scale_window:
            self._finite_steps, self.scale = 0, self.scale * 2
