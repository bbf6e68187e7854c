"""The loop of a training, with what a composition puts between its calls."""

from __future__ import annotations

import re
from contextlib import nullcontext

import torch
from torch import Tensor

from tests.compositions.data import STEPS
from tests.compositions.failures import fail_in_backward, overflowing
from tests.compositions.mistakes import make_mistake
from tests.compositions.model import layers_of
from tests.compositions.traffic import gathering_slowly, reductions_as_planned
from tests.compositions.training import Training
from tests.compositions.wrapped import Wrapped
from tests.unit.distributed.outside_the_loop.scenario import failing

NORM = re.compile(r"final_layernorm\.(inner\.)?weight$")
"""The parameter whose gradient is set to None."""


def train(training: Training, first: int = 0, last: int = STEPS) -> None:
    """Makes the steps from `first` to before `last`."""
    overlaps = isinstance(training, Wrapped) and training.part.overlap == "both"
    with gathering_slowly() if overlaps else nullcontext():
        _train(training, first, last)


def _train(training: Training, first: int, last: int) -> None:
    composition, between = training.composition, _Between(training)
    if first == 0 and composition.evaluates == "in inference mode":
        with torch.inference_mode():
            training.evaluate(0)
    for step in range(first, last):
        between.before_step(step)
        training.begin_step()
        if composition.fails == "backward" and step == 1:
            fail_in_backward(training, step, training.together(1)[-1] if training.number > 1 else 0)
            training.zero()
        overflows = composition.fails == "overflow" and step == 1
        is_counted = isinstance(training, Wrapped) and step == last - 1
        with (
            overflowing(training.model) if overflows else nullcontext(),
            reductions_as_planned(training) if is_counted else nullcontext(),
        ):
            training.make_step(step, between)
        between.after_update(step)
    if composition.averaged != "no" and last == STEPS:
        with training.averaged():
            between.evaluate(last)


class _Between:
    def __init__(self, training: Training) -> None:
        self.training, self.composition = training, training.composition
        self.held = [p for p in training.module.parameters() if p.dtype.is_floating_point]
        self.average: list[Tensor] = []

    def before_step(self, step: int) -> None:
        if self.composition.trained == "a layer at times":
            for layer in layers_of(self.training.module, 0):
                for parameter in layer.parameters():
                    if parameter.dtype.is_floating_point:
                        parameter.requires_grad_(step != 1)
        if self.composition.evaluates in ("between steps", "in inference mode"):
            self.evaluate(step)
        if isinstance(self.training, Wrapped) and step == 1:
            make_mistake(self.training, step)

    def before_micro_batch(self, step: int, index: int) -> None:
        is_last = index == self.training.number - 1
        if self.composition.evaluates == "between micro-batches" and is_last:
            self.evaluate(step)
        if self.composition.fails == "forward" and step == 1 and is_last:
            (layer,) = layers_of(self.training.module, 1)
            with failing(layer.register_forward_pre_hook):
                self.training.backward(step, index)

    def before_update(self, step: int) -> None:
        if self.composition.evaluates == "before the update":
            self.training.evaluate(step)  # with a graph that no backward uses
        if self.composition.gradients != "kept" and step == 1:
            is_halved = self.composition.gradients == "halved"
            for name, parameter in self.training.module.named_parameters():
                if is_halved or NORM.search(name):
                    self.training.change_gradient(parameter, 0.5 if is_halved else None)

    def after_update(self, step: int) -> None:
        evaluates = self.composition.evaluates == "after the update"
        if evaluates:
            self.training.evaluate(step)  # likewise, and what it has gathered is old after a write
        if self.composition.evaluates == "the average inside whole_parameters":
            with self.training.averaged_inside():
                self.evaluate(step)
        if self.composition.writes != "nothing":
            with self.training.whole_parameters():
                self._write(step)
            if evaluates:
                self.training.evaluate(step)

    def _write(self, step: int) -> None:
        writes = self.composition.writes
        if writes == "clamps":
            with torch.no_grad():
                for parameter in self.held:
                    parameter.clamp_(-0.4, 0.4)
        elif writes == "clamps data":
            for parameter in self.held:
                parameter.data.clamp_(-0.4, 0.4)
        elif writes == "averages":
            self._average(step)
        elif writes == "loads" and step == 0:
            values = {name: tensor.detach() for name, tensor in self.training.module.state_dict().items()}
            self.training.load_values({n: t * 0.5 if t.is_floating_point() else t for n, t in values.items()})

    def _average(self, step: int) -> None:
        """Averages the weights over steps, and loads the average after the second step."""
        with torch.no_grad():
            if not self.average:
                self.average = [parameter.detach().clone() for parameter in self.held]
            torch._foreach_lerp_(self.average, self.held, 0.5)
            if step == 1:
                for parameter, mean in zip(self.held, self.average, strict=True):
                    parameter.copy_(mean)

    def evaluate(self, step: int) -> None:
        """Evaluates one micro-batch without gradients."""
        for model in self.training.models:
            model.eval()
        with torch.inference_mode() if self.composition.evaluates == "in inference mode" else torch.no_grad():
            self.training.evaluate(step)
        for model in self.training.models:
            model.train()
