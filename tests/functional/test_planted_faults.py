"""The comparisons of `test_equality_of_wrappers` can fail: a fault in `core` makes them fail.

Here is one for each comparison and kind of fault; `docs/mutations.md` lists faults in all of `core`, and what sees
them. Warm-up begins at zero, so the third step is the first to show what the first got wrong in the weights. A rank
that crashes is no AssertionError, and so no fault that was seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.comm.lane import CommLane
from core.distributed import _BaseDataParallel, finalize_model_grads
from core.distributed.engine.gradients import BucketReduction
from core.distributed.flat.unit import Unit
from core.distributed.fsdp2.unit_collectives import UnitAllGather
from core.optimizer.grad_scaler import DynamicGradScaler
from core.optimizer.main_params import MainParam
from core.optimizer.main_ranges import MainRange
from tests.functional._equality import Case
from tests.unit._gpt import Training
from tests.unit._runs import Curve, run_wrapped
from tests.unit._spawn import run_distributed

Reached = Callable[[], None]
"""Called by what is planted whenever it does wrong."""


def _skipped_bucket(reduce: Any, reached: Reached) -> Any:
    """Skips the second bucket to be reduced, and every third after it."""
    calls = itertools.count()

    def patched(self: BucketReduction, whole: torch.Tensor, kept: torch.Tensor, accumulate: bool, *how: Any) -> None:
        if next(calls) % 3 != 1:
            reduce(self, whole, kept, accumulate, *how)
            return
        reached()
        if self.shard_group is not None and not accumulate:
            kept.copy_(whole.chunk(self.shard_group.size())[self.shard_group.rank()])

    return patched


def _gradients_off_by_a_millionth(finish: Any, reached: Reached) -> Any:
    def patched(self: _BaseDataParallel, *args: Any, **kwargs: Any) -> None:
        finish(self, *args, **kwargs)
        self.scale_gradients(1.0 + 1e-6)
        reached()

    return patched


def _stale_parameter(start: Any, reached: Reached) -> Any:
    """Does not gather one bucket's parameters after an update."""

    def patched(self: Unit, lane: CommLane, *, waits: bool) -> None:
        if self.slot is not None or self.buckets[0].offset != 0:
            start(self, lane, waits=waits)
        else:
            reached()

    return patched


def _stale_slot(gather: Any, reached: Reached) -> Any:
    """Leaves in the second gather, and every third after it, what another unit had in the slot."""
    calls = itertools.count()

    def patched(self: Unit, *arguments: Any) -> None:
        if next(calls) % 3 != 1:
            gather(self, *arguments)
        else:
            reached()

    return patched


def _stale_unit(gather: Any, reached: Reached) -> Any:
    """Gathers one unit of FSDP2 as it was when it was first used, not from its current shards."""
    first: dict[str, torch.Tensor] = {}

    def patched(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        if not first:
            first[self.unit] = input_tensor.clone()
        old = first.get(self.unit, input_tensor)
        if not torch.equal(old, input_tensor):
            reached()
        return gather(self, output_tensor=output_tensor, input_tensor=old, **options)

    return patched


def _own_tokens(unused: Any, reached: Reached) -> Any:
    """Divides the loss of each rank by its own number of tokens."""

    def patched(num_tokens: torch.Tensor, chunks: Any) -> torch.Tensor:
        reached()
        return 1.0 / num_tokens / dist.get_world_size()

    return patched


def _norm_of_one_shard(groups: Any, reached: Reached) -> Any:
    def patched(self: MainParam) -> tuple[()]:
        if groups(self):
            reached()
        return ()

    return patched


def _overflow_forgiven(update: Any, reached: Reached) -> Any:
    def patched(self: DynamicGradScaler, found_inf: bool) -> None:
        if found_inf:
            reached()

    return patched


_finalize_module = sys.modules[finalize_model_grads.__module__]  # whose name in the package is its function's
PLACES: dict[Any, tuple[tuple[Any, str], ...]] = {
    _skipped_bucket: ((BucketReduction, "reduce"),),
    _gradients_off_by_a_millionth: ((_BaseDataParallel, "finish_grad_sync"),),
    _stale_parameter: ((Unit, "start_gather"),),
    _stale_slot: ((Unit, "_gather"),),
    _stale_unit: ((UnitAllGather, "__call__"),),
    _own_tokens: ((_finalize_module, "_one_over_global_tokens"),),
    _norm_of_one_shard: ((MainParam, "shard_groups"), (MainRange, "shard_groups")),
    _overflow_forgiven: ((DynamicGradScaler, "update"),),
}
"""What each fault takes the place of: a class or module, and a name in it."""


def run_with_fault(fault: Any, wrapper: str, training: Training) -> Curve:
    """Calls `run_wrapped` with a fault planted; every rank calls it.

    Raises:
        RuntimeError: the fault did nothing on this rank, so that the comparison shows nothing.
    """
    times: list[None] = []
    with ExitStack() as stack:
        for owner, name in PLACES[fault]:
            planted = fault(getattr(owner, name), lambda: times.append(None))
            stack.enter_context(mock.patch.object(owner, name, planted))
        curve = run_wrapped(wrapper, training)
    if not times:
        raise RuntimeError(f"{fault.__name__} was planted and not reached under {wrapper!r}")
    return curve


@pytest.mark.parametrize(
    ("case", "fault"),
    [
        (Case("adamw", "zero2"), _skipped_bucket),
        (Case("adamw", "zero1, overlapped"), _stale_parameter),
        (Case("adamw", "zero3"), _gradients_off_by_a_millionth),
        (Case("adamw", "fsdp2"), _stale_unit),
        (Case("fp16", "zero2"), _overflow_forgiven),
        (Case("adamw", "hybrid fsdp2", 4), _norm_of_one_shard),
        (Case("sgd, tied", "zero3", is_serial=True), _stale_slot),
        (Case("sgd, per token", "fsdp2", is_serial=True), _own_tokens),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else value.__name__,
)
def test_the_comparison_sees_a_planted_fault(case: Case, fault: Any):
    steps = 5 if case.settings.precision == "fp16" else 3  # in fp16 the first are skipped, until the loss scale fits
    expected = case.expected(steps)
    case.compare([expected] * case.ranks, expected)  # nothing in it, as what is not finite, that differs from itself
    settings = dataclasses.replace(case.settings, steps=steps)
    curves = run_distributed(run_with_fault, case.ranks, fault, case.wrapper, settings)
    with pytest.raises(AssertionError):
        case.compare(curves, expected)
