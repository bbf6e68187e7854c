"""Checks that the numbers of a model are equal under every wrapper: ``python -m shardstack.verify my_module:build``.

Trains a model under every wrapper in turn, in lockstep with plain replicas, which are themselves compared with one
process that runs the micro-batches of all ranks. Names the first difference: the step, and the parameter whose
gradient or weight differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import parallel_state
from ..base.errors import ConfigError, ShardstackError, WrapError, check_range
from ..base.text import choices
from ..distributed import DistributedDataParallelConfig
from ..distributed.fully_sharded_data_parallel_config import config_of
from ..optimizer import OptimizerConfig
from .model_under_test import ModelUnderTest, Training, load_model_under_test

__all__ = ["Options", "FirstDifference", "ModelUnderTest", "Verdict", "load_model_under_test", "verify"]

REPLICAS = "ddp"
"""The reference of every other wrapper. It is itself compared with one process."""

WRAPPERS: dict[str, Mapping[str, Any]] = json.loads(Path(__file__).with_name("wrappers.json").read_text("utf-8"))
"""Settings to verify, in this order. Hybrids, with two groups that shard, need an even number of ranks from four."""


_MAY_NOT_APPLY = ("fsdp2, recomputed",)
"""Settings that need blocks of several layers: for other models they are reported as inapplicable."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the trainings."""

    steps: int = 10
    micro_batches: int = 2
    """Micro-batches of a step on each rank."""
    optimizer: str = "sgd"
    """``sgd`` with momentum, or ``adam``, which turns rounding in a tiny gradient into a step of the whole rate."""
    lr: float = 0.05
    """Learning rate. The gradient's norm is clipped to one, so that this is about the length of a step."""

    def __post_init__(self) -> None:
        check_range(self, "steps", "micro_batches", least=1)


@dataclass(frozen=True)
class FirstDifference:
    """The first difference between two trainings: the smallest step, in it loss, gradients, weights, then buffers."""

    step: int
    what: str
    """``loss``, ``gradient``, ``weight`` or ``buffer``."""
    parameter: str
    """The name of the parameter or buffer. Empty for the loss."""
    off: float
    """Difference relative to the norm of the reference. NaN if a side is not finite."""
    rank: int = 0
    """The first rank that sees it."""

    def __str__(self) -> str:
        of = f" of {self.parameter}" if self.parameter else ""
        by = f"off by {self.off:.1e}" if math.isfinite(self.off) else "not finite"
        return f"parts at step {self.step}: the {self.what}{of} is {by} (rank {self.rank})"


@dataclass(frozen=True)
class Verdict:
    """The result for one wrapper."""

    wrapper: str
    reference: str
    """Name of the reference."""
    tolerance: float
    """Relative tolerance of the comparison. 0 means bitwise."""
    parting: FirstDifference | None = None
    failure: str = ""
    """Why it could not run. Empty if it did."""
    inapplicable: str = ""
    """Why the settings do not apply to the model. Empty if they do."""

    @property
    def is_equal(self) -> bool:
        """Whether the numbers are equal."""
        return self.parting is None and not self.failure

    def __str__(self) -> str:
        if self.failure or self.inapplicable:
            outcome = f"cannot run: {self.failure}" if self.failure else f"not run: {self.inapplicable}"
        elif self.parting is not None:
            outcome = str(self.parting)
        else:
            outcome = "equal, bit by bit" if self.tolerance == 0.0 else f"equal within {self.tolerance:g}"
        return f"{self.wrapper:26}{outcome}"


def names_of_wrappers(world_size: int) -> list[str]:
    """Returns the wrappers that this number of ranks can run."""
    can_be_hybrid = world_size >= 4 and world_size % 2 == 0
    return [name for name in WRAPPERS if can_be_hybrid or not name.startswith("hybrid")]


def verify(under_test: ModelUnderTest, options: Options, wrappers: Sequence[str] | None = None) -> Iterator[Verdict]:
    """Compares every wrapper, and yields a verdict for each. All ranks of the default group call it together.

    Plain replicas are compared with one process, and every other wrapper with plain replicas: bitwise at two ranks,
    because two numbers add in one order only; with more ranks, or with micro-batches reduced one by one, within the
    tolerance of rounding.

    Args:
        wrappers: names of :data:`WRAPPERS`; None means all that the ranks can run.

    Raises:
        ConfigError: the model cannot be trained, or is not built equally twice; or a wrapper is unknown.
    """
    all_names = names_of_wrappers(dist.get_world_size())
    names = all_names if wrappers is None else list(wrappers)
    if strays := [name for name in names if name not in all_names]:
        raise ConfigError(
            f"wrapper {strays[0]!r} is unknown on {dist.get_world_size()} ranks; {choices(strays[0], all_names)}"
        )
    model = under_test.check()
    rounding = _rounding(model.parameters())
    size = sum(parameter.numel() for parameter in model.parameters())
    rate = OptimizerConfig(optimizer=options.optimizer, lr=options.lr, weight_decay=0.0, clip_grad=1.0)
    del model

    for name in names:
        if name == REPLICAS:
            reference, tolerance = "one process", rounding
        else:
            adds_in_another_order = dist.get_world_size() > 2 or "every micro-batch" in name
            reference, tolerance = REPLICAS, rounding if adds_in_another_order else 0.0
        try:
            serial_or_replicas = None if name == REPLICAS else _config(REPLICAS, size)
            theirs = Training(under_test, serial_or_replicas, rate, options.micro_batches)
            ours = Training(under_test, _config(name, size), rate, options.micro_batches)
            comparisons = (_compare_step(ours, theirs, step, tolerance) for step in range(options.steps))
            yield Verdict(name, reference, tolerance, next(filter(None, map(_of_all_ranks, comparisons)), None))
        except ShardstackError as error:
            if isinstance(error, ConfigError) and under_test.name in str(error):
                raise  # an error of the model, not of a wrapper
            does_not_apply = name in _MAY_NOT_APPLY and isinstance(error, (WrapError, ConfigError))
            reason = " ".join(str(error).split())
            failure, inapplicable = ("", reason) if does_not_apply else (reason, "")
            yield Verdict(name, reference, tolerance, failure=failure, inapplicable=inapplicable)
        finally:
            parallel_state.destroy_model_parallel()


def _config(wrapper: str, num_elements: int) -> DistributedDataParallelConfig:
    """Returns the settings of an entry of `WRAPPERS`, whose ``buckets`` share the model's elements equally."""
    fields = dict(WRAPPERS[wrapper])
    if buckets := fields.pop("buckets", None):
        fields["bucket_size"] = max(1, num_elements // buckets)
    return config_of(**fields)


def _rounding(parameters: Iterator[Tensor]) -> float:
    """Returns the relative change of a loss or gradient by another order of additions, for the least precise dtype."""
    eps = max(torch.finfo(p.dtype).eps for p in parameters if p.is_floating_point())
    return 8 * eps if eps > 1e-4 else 64 * eps  # in bf16 64 would be half of everything


def _compare_step(ours: Training, theirs: Training, step: int, tolerance: float) -> FirstDifference | None:
    """Runs one step of both trainings and compares them. Calls the same collectives in every case."""
    loss, their_loss = ours.backward(step), theirs.backward(step)
    difference: FirstDifference | None = None
    off = abs(loss - their_loss) / max(abs(their_loss), 1e-30) if loss != their_loss else 0.0
    if not off <= tolerance or not math.isfinite(loss):
        difference = FirstDifference(step, "loss", "", off, dist.get_rank())
    gradients = _first_difference(step, "gradient", ours.gradients(), theirs.gradients(), tolerance)
    ours.optimizer.step()
    theirs.optimizer.step()
    weights = _first_difference(step, "weight", ours.weights(), theirs.weights(), tolerance)
    buffers = _first_difference(step, "buffer", ours.buffers(), theirs.buffers(), tolerance)
    return difference or gradients or weights or buffers


def _first_difference(
    step: int, what: str, ours: Iterator[tuple[str, Tensor]], theirs: Iterator[tuple[str, Tensor]], tolerance: float
) -> FirstDifference | None:
    differing: list[tuple[str, float, float]] = []
    total = 0.0
    for (name, value), (other, their_value) in zip(ours, theirs, strict=True):
        if name != other:
            raise ConfigError(
                f"the parameter {other} is named {name} under a wrapper, because its module renames parameters; keep "
                "their names as they are when the model is built"
            )
        norm = float(their_value.double().norm())
        total += norm * norm
        if not bool(torch.equal(value, their_value)) or not math.isfinite(norm):
            differing.append((name, float((value.double() - their_value.double()).norm()), norm))
    # A gradient that should be zero, but for rounding, is compared with the norm of all gradients.
    least = 0.01 * math.sqrt(total) if tolerance else 0.0
    for name, distance, norm in differing:
        off = distance / max(norm, least, 1e-30)
        if not off <= tolerance:
            return FirstDifference(step, what, name, off, dist.get_rank())
    return None


def _of_all_ranks(own: FirstDifference | None) -> FirstDifference | None:
    """Returns the difference of the first rank that found one: a replica may be wrong on one rank only."""
    of_ranks: list[FirstDifference | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    order = {"loss": 0, "gradient": 1, "weight": 2, "buffer": 3}
    return min((p for p in of_ranks if p is not None), key=lambda p: (order[p.what], p.rank), default=None)
