"""The cases of the equality contract: what each wrapper's training is compared with, and how exactly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.unit._gpt import HYBRIDS, WRAPPERS, Training
from tests.unit._runs import Curve, run_serial, run_wrapped
from tests.unit._spawn import run_distributed

ADAMW = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 1.0}
SGD = {"optimizer": "sgd", "lr": 0.1, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 1.0}
# Each is as long as it takes to halve the loss, and until clipping has bitten in some steps and not in others.
TRAININGS = {
    "adamw": Training(ADAMW, steps=25),
    "sgd, untied": Training(SGD, steps=28, tied=False),
    "bf16": Training(ADAMW, steps=25, precision="bf16"),
    "fp16": Training(ADAMW, steps=30, precision="fp16"),
    "per token": Training(ADAMW, steps=36, tied=False, per_token=True),
}
# SGD: AdamW would turn rounding noise in a tiny gradient into a step of the size of the learning rate.
SERIAL_TRAININGS = {
    "sgd, tied": Training(SGD, steps=25),
    "sgd, untied": TRAININGS["sgd, untied"],
    "sgd, per token": Training(SGD, steps=45, tied=False, per_token=True),
}
BRIEF_STEPS, BRIEF_FP16_STEPS, BRIEF_CLIP = 8, 18, 1.3
"""What runs each time is shorter, and its clipping bites in some of these steps; in fp16 the scale falls, grows and
falls again."""
BRIEF = {
    "adamw": ("ddp, overlapped", "zero1, overlapped", "zero2", "zero3", "fsdp2"),
    "sgd, untied": (),
    "bf16": ("fsdp2",),
    "fp16": ("zero2",),
    "per token": (),
}
"""What runs each time on two ranks, by training. The sample of compositions has the other settings too."""
BRIEF_HYBRIDS = ("hybrid fsdp2",)
BRIEF_SERIAL: dict[str, tuple[str, ...]] = {"sgd, tied": ("zero3",), "sgd, untied": (), "sgd, per token": ()}
"""Likewise of those that are compared with one process, as each composition of the sample is."""


@dataclass(frozen=True)
class Case:
    """One training under one wrapper, compared with replicas without overlap, or with one process."""

    training: str
    wrapper: str
    ranks: int = 2
    is_serial: bool = False
    """Compared with one process that goes through the micro-batches of all ranks."""

    def __str__(self) -> str:
        return f"{self.training}-{self.wrapper}-{'serial' if self.is_serial else self.ranks}"

    @property
    def is_long(self) -> bool:
        """Whether it belongs to the long set, which trains for longer."""
        if self.ranks > 2:
            return not (self.training == "adamw" and self.wrapper in BRIEF_HYBRIDS)
        return self.wrapper not in (BRIEF_SERIAL if self.is_serial else BRIEF)[self.training]

    @property
    def settings(self) -> Training:
        training = (TRAININGS | SERIAL_TRAININGS)[self.training]
        if self.is_long:
            return training
        steps = BRIEF_FP16_STEPS if training.precision == "fp16" else BRIEF_STEPS
        return dataclasses.replace(training, steps=steps, optimizer={**training.optimizer, "clip_grad": BRIEF_CLIP})

    def expected(self, steps: int | None = None) -> Curve:
        """Returns the curve that the wrapper has to match, after `steps` in place of the training's own number."""
        training = dataclasses.replace(self.settings, steps=steps or self.settings.steps)
        return (serial if self.is_serial else replicated)(training, self.ranks)

    def compare(self, curves: Sequence[Curve], expected: Curve) -> None:
        """Raises AssertionError unless every rank's curve is as expected."""
        for curve in curves[:1] if self.is_serial else curves:
            (assert_bitwise if self._adds_in_one_order else assert_close)(curve, expected)

    @property
    def _adds_in_one_order(self) -> bool:
        """Two ranks have one order. At four our own collectives add in a tree, of hybrids too; torch's do not.

        Micro-batches that are reduced one by one are added after ranks; else ranks after micro-batches.
        """
        if self.is_serial or "every micro-batch" in self.wrapper:
            return False
        return self.ranks == 2 or "torch's" not in self.wrapper


TWO_RANKS = [Case(training, wrapper) for training in TRAININGS for wrapper in WRAPPERS if wrapper != "ddp"]
FOUR_RANKS = [
    Case(training, wrapper, 4) for training in TRAININGS for wrapper in WRAPPERS | HYBRIDS if wrapper != "ddp"
]
SERIAL = [
    Case(training, wrapper, is_serial=True)
    for training in SERIAL_TRAININGS
    for wrapper in ("ddp", "zero2", "zero3", "fsdp2")
]


_curves: dict[tuple[str, str, int], list[Curve]] = {}
"""What `curves_of` and `serial` have trained, for cases that compare one training with several others."""


def curves_of(wrapper: str, training: Training, ranks: int) -> list[Curve]:
    """Returns each rank's curve of a training under a wrapper, which runs once."""
    key = (wrapper, repr(training), ranks)
    if key not in _curves:
        _curves[key] = run_distributed(run_wrapped, ranks, wrapper, training)
    return _curves[key]


def replicated(training: Training, ranks: int) -> Curve:
    """Replicas, which all have to agree."""
    curves = curves_of("ddp", training, ranks)
    for curve in curves[1:]:
        assert_bitwise(curve, curves[0])
    return curves[0]


def serial(training: Training, ranks: int) -> Curve:
    """One process, the same for each way to cut the model."""
    alone = training.alone
    key = ("serial", repr(alone), ranks)
    if key not in _curves:
        _curves[key] = [run_serial(alone, ranks)]
    return _curves[key][0]


def assert_bitwise(found: Curve, expected: Curve) -> None:
    assert found.losses == expected.losses
    assert found.grad_norms == expected.grad_norms
    assert found.skipped == expected.skipped
    for kind in ("gradients", "weights", "masters"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        wrong = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert not wrong, f"{kind} differ: {wrong}"


@dataclass(frozen=True)
class Tolerance:
    """How far one run may be from another, relative to that."""

    losses: float = 1e-6
    grad_norms: float = 1e-5
    gradients: float = 1e-5
    """Of the last step, all of them together: the L2 norm of the difference."""
    masters: float = 1e-5
    """Weights after the last step, likewise."""
    each_gradient: float = math.inf
    """Of the last step, each parameter's by itself, so that a small one cannot hide among others."""


def assert_close(found: Curve, expected: Curve, tolerance: Tolerance = Tolerance()) -> None:
    assert found.skipped == expected.skipped
    for what in ("losses", "grad_norms"):
        limit = getattr(tolerance, what)
        for step, (ours, theirs) in enumerate(zip(getattr(found, what), getattr(expected, what), strict=True)):
            assert abs(ours - theirs) <= limit * abs(theirs), f"{what} of step {step}: {ours} against {theirs}"
    for kind in ("gradients", "masters"):
        off = _distance(getattr(found, kind), getattr(expected, kind))
        assert off <= getattr(tolerance, kind), f"{kind} are off by {off:.1e} of their norm"
    for name, gradient in expected.gradients.items():
        off = _distance({name: found.gradients[name]}, {name: gradient})
        assert off <= tolerance.each_gradient, f"the gradient of {name} is off by {off:.1e} of its norm"


def _distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    difference = sum((found[name] - value).double().square().sum().item() for name, value in expected.items())
    return math.sqrt(difference / sum(value.double().square().sum().item() for value in expected.values()))
