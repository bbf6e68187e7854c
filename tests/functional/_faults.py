"""Faults planted in `core`, one at a time, that a comparison of runs has to see."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import core.optimizer.optimizer
from core.comm.lane import CommLane
from core.distributed import TorchFullyShardedDataParallel, _BaseDataParallel, finalize_model_grads
from core.distributed.engine.buffer import BucketReduction
from core.distributed.engine.unit import Unit
from core.distributed.fsdp2.unit_collectives import UnitAllGather, UnitReduceScatter
from core.optimizer.distrib_optimizer import MainRange
from core.optimizer.grad_scaler import DynamicGradScaler
from core.optimizer.main_params import MainParam
from tests.functional._runs import Curve, Training, run_wrapped

SKIPPED, DOUBLED, STALE, OTHER = "skipped reduction", "doubled scale", "stale parameter", "other"

Reached = Callable[[], None]
"""Called by what is planted whenever it does wrong."""


@dataclass(frozen=True)
class Fault:
    """A fault that replaces functions of `core`."""

    kind: str
    places: tuple[tuple[Any, str], ...]
    """Classes or modules, and the names in them that are patched."""

    corrupt: Callable[[Callable[..., Any], Reached], Callable[..., Any]]
    """Makes of the function that is there the one that is planted."""

    @contextmanager
    def planted(self) -> Iterator[list[None]]:
        """Yields a list that grows whenever the fault does wrong; a name that is not there is an AttributeError."""
        times: list[None] = []
        with ExitStack() as stack:
            for owner, name in self.places:
                planted = self.corrupt(getattr(owner, name), lambda: times.append(None))
                stack.enter_context(mock.patch.object(owner, name, planted))
            yield times


FAULTS: dict[str, Fault] = {}


def run_with_fault(fault: str, wrapper: str, training: Training) -> Curve:
    """Calls `run_wrapped` with the named fault planted; every rank calls it.

    Raises:
        RuntimeError: the fault did nothing on this rank, so that the comparison shows nothing.
    """
    with FAULTS[fault].planted() as times:
        curve = run_wrapped(wrapper, training)
    if not times:
        raise RuntimeError(f"the fault {fault!r} was planted and not reached under {wrapper!r}")
    return curve


def _fault(kind: str, *places: tuple[Any, str]) -> Callable[[Any], Any]:
    def name(corrupt: Any) -> Any:
        FAULTS[corrupt.__name__.strip("_")] = Fault(kind, places, corrupt)
        return corrupt

    return name


# ---- a skipped reduction


@_fault(SKIPPED, (BucketReduction, "reduce"))
def _skipped_bucket(reduce: Any, reached: Reached) -> Any:
    """Flat buffers: the second bucket to be reduced, and every third after it, is skipped."""
    calls = itertools.count()

    def patched(self: BucketReduction, whole: torch.Tensor, kept: torch.Tensor, accumulate: bool, what: str) -> None:
        if next(calls) % 3 != 1:
            reduce(self, whole, kept, accumulate, what)
            return
        reached()
        if self.shard_group is not None and not accumulate:
            kept.copy_(whole.chunk(self.shard_group.size())[self.shard_group.rank()])

    return patched


@_fault(SKIPPED, (BucketReduction, "reduce"))
def _one_instance_only(reduce: Any, reached: Reached) -> Any:
    """Flat buffers, hybrid: gradients are not summed over instances."""

    def patched(self: BucketReduction, *args: Any) -> None:
        if self.replica_group is not None:
            reached()
        of_instance = copy(self)
        of_instance.replica_group = None
        reduce(of_instance, *args)

    return patched


@_fault(SKIPPED, (UnitReduceScatter, "__call__"))
def _skipped_unit(reduce: Any, reached: Reached) -> Any:
    """FSDP2: the second unit to be reduced, and every third after it, keeps this rank's own gradient."""
    calls = itertools.count()

    def patched(
        self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, **options: Any
    ) -> Any:
        if next(calls) % 3 != 1:
            return reduce(self, output_tensor=output_tensor, input_tensor=input_tensor, group=group, **options)
        reached()
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None

    return patched


# ---- a doubled scale


def _scaled_by(factor: float) -> Callable[[Any, Reached], Any]:
    def corrupt(finish: Any, reached: Reached) -> Any:
        def patched(self: _BaseDataParallel, *args: Any, **kwargs: Any) -> None:
            finish(self, *args, **kwargs)
            self.scale_gradients(factor)
            reached()

        return patched

    return corrupt


FAULTS["doubled_gradients"] = Fault(DOUBLED, ((_BaseDataParallel, "finish_grad_sync"),), _scaled_by(2.0))
FAULTS["gradients_off_by_a_millionth"] = Fault(
    OTHER, ((_BaseDataParallel, "finish_grad_sync"),), _scaled_by(1.0 + 1e-6)
)


# ---- a stale parameter


@_fault(STALE, (core.optimizer.optimizer.MegatronOptimizer, "step"))
def _stale_replica(step: Any, reached: Reached) -> Any:
    """Replicas: the optimizer's update of the first parameter is not copied into the model."""

    def patched(self: core.optimizer.optimizer.MegatronOptimizer) -> Any:
        parameter = self._params[0].local()
        before = parameter.clone()
        result = step(self)
        if not torch.equal(parameter, before):
            reached()
            parameter.copy_(before)
        return result

    return patched


@_fault(STALE, (core.optimizer.optimizer, "refresh_parameters"))
def _stale_low_precision(refresh: Any, reached: Reached) -> Any:
    """Flat buffers: masters are updated, the parameters that the model computes with are not."""

    def patched(params: list[MainParam]) -> None:
        if any(p.is_low_precision and not torch.equal(p.main.to(p.param.dtype), p.local()) for p in params):
            reached()

    return patched


@_fault(STALE, (Unit, "start_gather"))
def _stale_parameter(start: Any, reached: Reached) -> Any:
    """Flat buffers, sharded state: one bucket's parameters are not gathered after an update."""

    def patched(self: Unit, lane: CommLane, *, waits: bool) -> None:
        if self.slot is not None or self.buckets[0].offset != 0:
            start(self, lane, waits=waits)
        else:
            reached()

    return patched


@_fault(STALE, (Unit, "_gather"))
def _stale_slot(gather: Any, reached: Reached) -> Any:
    """Sharded flat buffers: the second gather, and every third after it, leaves what another unit had in the slot."""
    calls = itertools.count()

    def patched(self: Unit, *arguments: Any) -> None:
        if next(calls) % 3 != 1:
            gather(self, *arguments)
        else:
            reached()

    return patched


@_fault(STALE, (UnitAllGather, "__call__"))
def _stale_unit(gather: Any, reached: Reached) -> Any:
    """FSDP2: one unit is gathered as it was when it was first used, not from its current shards."""
    first: dict[str, torch.Tensor] = {}

    def patched(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        if not first:
            first[self.unit] = input_tensor.clone()
        old = first.get(self.unit, input_tensor)
        if not torch.equal(old, input_tensor):
            reached()
        return gather(self, output_tensor=output_tensor, input_tensor=old, **options)

    return patched


# ---- what only some trainings or wrappers have


_finalize_module = sys.modules[finalize_model_grads.__module__]  # whose name in the package is its function's


@_fault(OTHER, (_finalize_module, "_one_over_global_tokens"))
def _own_tokens(unused: Any, reached: Reached) -> Any:
    """Per-token loss: each rank divides by its own count."""

    def patched(num_tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        reached()
        return 1.0 / num_tokens / group.size()

    return patched


@_fault(OTHER, (MainParam, "shard_groups"), (MainRange, "shard_groups"))
def _norm_of_one_shard(groups: Any, reached: Reached) -> Any:
    """Each rank clips by the norm of its own shard."""

    def patched(self: MainParam) -> tuple[()]:
        if groups(self):
            reached()
        return ()

    return patched


@_fault(OTHER, (core.optimizer.optimizer, "clip_coefficient"))
def _clip_of_its_own(coefficient: Any, reached: Reached) -> Any:
    """Clipping by a norm that is off by one part in ten thousand."""

    def patched(norm: float, max_norm: float) -> float:
        wrong: float = coefficient(norm * 1.0001, max_norm)
        if wrong != coefficient(norm, max_norm):
            reached()
        return wrong

    return patched


@_fault(OTHER, (TorchFullyShardedDataParallel, "_set_gradient_sync"))
def _without_no_sync(unused: Any, reached: Reached) -> Any:
    """FSDP2 reduces every micro-batch, as Megatron-LM's wrapper of it does."""

    def patched(self: TorchFullyShardedDataParallel, enabled: bool) -> None:
        reached()

    return patched


@_fault(OTHER, (DynamicGradScaler, "update"))
def _overflow_forgiven(update: Any, reached: Reached) -> Any:
    """The loss scale does not react to an overflow."""

    def patched(self: DynamicGradScaler, found_inf: bool) -> None:
        if found_inf:
            reached()

    return patched
