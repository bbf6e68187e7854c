"""Collects facts about a wrapped model, unit by unit, from this rank's plan; no communication."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..plan import (
    BucketPlan,
    BufferPlan,
    FlatPlan,
    FlatUnitPlan,
    FSDP2Plan,
    FSDP2UnitPlan,
    FullyShardedPlan,
    ParamPlan,
    ShardingPlan,
)
from .wire import StepPlan, Traffic, bucket_traffic, sharded_traffic

RANGE = " … "
"""Joins the names of the first and the last parameter of a bucket."""


@dataclass(frozen=True)
class Held:
    """Bytes and dtypes of one kind of memory."""

    nbytes: int
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class UnitFacts:
    """Parameters of one collective. Sizes are those of this rank, after the tensor-parallel split, with padding."""

    name: str
    """Names of its modules below the model, joined by " + "; empty for the root unit."""
    kind: str
    """Classes of its modules; for a bucket, its contents."""
    place: int
    """Index of its first parameter among those of the model, which are roughly in the order of execution."""
    num_parameters: int
    num_trainable: int
    kept: Held
    """Parameters that this rank always keeps."""
    gathered: Held | None
    """Parameters while they are gathered; None if they are always whole."""
    gradient: Held
    """This rank's part of the reduced gradient."""
    after_forward: str
    """What happens to gathered parameters between forward and backward."""
    traffic: tuple[Traffic, ...]
    is_offloaded: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether its parameters are always whole on every rank."""
        return self.gathered is None

    def like(self, other: UnitFacts) -> bool:
        """Returns whether two units are equal except for name and place."""
        return replace(self, name=other.name, place=other.place) == other


@dataclass(frozen=True)
class Tie:
    """A weight with several names."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    """Place of each name, see `UnitFacts.place`."""
    unit: int
    """Index of its unit."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a wrapped model."""

    wrapper: str
    num_ranks: int
    shard_size: int
    """Ranks that share a parameter, or the state of the optimizer; 1 without sharding."""
    num_replicas: int
    step: StepPlan
    units: tuple[UnitFacts, ...]
    """In the order of `UnitFacts.place`."""
    ties: tuple[Tie, ...]
    replicated: tuple[str, ...]
    """Names of single parameters that are whole on every rank."""
    num_buffers: int
    buffer_bytes: int
    settings: str
    """Settings of the wrapper that differ from their defaults."""
    tensor_parallel_size: int = 1
    """Ranks that share the layers; the facts are those of one rank's part."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""


def model_facts(plan: ShardingPlan, model: nn.Module, num_microbatches: int) -> ModelFacts:
    """Collects the facts about a plan and its model.

    Args:
        model: only its buffers are read.
        num_microbatches: micro-batches of a step.
    """
    step = StepPlan(num_microbatches, plan.reduces_every_micro_batch)
    units = _planned_units(plan, step)
    order = sorted(units, key=lambda pair: pair[0].place)
    buffers = list(model.buffers())
    return ModelFacts(
        wrapper=plan.caller,
        num_ranks=plan.groups.whole.size(),
        shard_size=plan.num_shards,
        num_replicas=plan.groups.whole.size() // plan.num_shards,
        step=step,
        units=tuple(unit for unit, _ in order),
        ties=tuple(
            Tie(param.names, param.places, index)
            for index, (_, params) in enumerate(order)
            for param in params
            if len(param.names) > 1
        ),
        replicated=tuple(param.name for param in plan.frozen),
        num_buffers=len(buffers),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        settings=plan.changed_settings,
        tensor_parallel_size=plan.tensor_parallel_size,
        context_parallel_size=plan.context_parallel_size,
    )


def _planned_units(plan: ShardingPlan, step: StepPlan) -> list[tuple[UnitFacts, Sequence[ParamPlan]]]:
    """Returns the units, and the parameters of each."""
    found: list[tuple[UnitFacts, Sequence[ParamPlan]]] = []
    if isinstance(plan, FSDP2Plan):
        units = [unit for unit in (*plan.units, plan.root) if unit.params]
        trained = [param.places[0] for unit in units for param in unit.params if param.is_trained]
        first_trained = min(trained, default=None)
        found += [(_module_unit(plan, unit, step, first_trained), unit.params) for unit in units]
    if isinstance(plan, FullyShardedPlan):
        for unit in plan.units:
            params = [param for _, bucket in plan.buckets_of(unit) for param in bucket.params]
            found += [(_flat_unit(plan, unit, step, params), params)] if params else []
    elif isinstance(plan, FlatPlan):
        found += [
            (_bucket_unit(plan, buffer, bucket, step), bucket.params)
            for buffer in plan.buffers
            for bucket in buffer.buckets
        ]
    if plan.frozen:
        found.append((_frozen_unit(plan.frozen), plan.frozen))
    return found


def _is_gathered_in_backward(plan: FSDP2Plan, unit: FSDP2UnitPlan, first_trained: int | None) -> bool:
    """Returns whether backward gathers the unit if it was freed.

    Backward begins with the root, and runs from the loss to the first trained weight.
    """
    reaches = first_trained is not None and max(param.places[0] for param in unit.params) >= first_trained
    return unit.is_needed_in_backward and (unit is plan.root or reaches)


def _module_unit(plan: FSDP2Plan, unit: FSDP2UnitPlan, step: StepPlan, first_trained: int | None) -> UnitFacts:
    trained = [param for param in unit.params if param.is_trained]
    compute = [_cast(param.dtype, unit.precision.param_dtype) for param in unit.params]
    whole = [param.shard_numel * plan.num_shards for param in unit.params]
    gathered_bytes = sum(n * dtype.itemsize for n, dtype in zip(whole, compute, strict=True))
    reduced_bytes = sum(
        n * _cast(dtype, unit.precision.reduce_dtype).itemsize
        for param, n, dtype in zip(unit.params, whole, compute, strict=True)
        if param.is_trained
    )
    stays = unit.stays_gathered or (unit.is_kept and not unit.is_needed_in_backward)
    in_backward = _is_gathered_in_backward(plan, unit, first_trained)
    again_over = unit.kept_among or plan.num_shards
    return UnitFacts(
        name=" + ".join(unit.names),
        kind=" + ".join(dict.fromkeys(_class_name(module) for module in unit.modules)),
        place=unit.place,
        num_parameters=unit.numel,
        num_trainable=sum(param.numel for param in trained),
        kept=Held(_shard_bytes(unit.params), _distinct(param.dtype for param in unit.params)),
        gathered=Held(gathered_bytes, _distinct(compute)),
        gradient=Held(_shard_bytes(trained), _distinct(param.dtype for param in trained)),
        after_forward="stays" if stays else "freed" if unit.is_freed else f"1/{unit.kept_among}",
        traffic=sharded_traffic(
            step,
            gathered_bytes=gathered_bytes,
            reduced_bytes=reduced_bytes,
            shard_size=plan.num_shards,
            num_replicas=plan.groups.num_replicas,
            gathered_again_over=0 if unit.stays_gathered or not in_backward else again_over,
            is_kept=unit.is_kept and (stays or in_backward),
        ),
        is_offloaded=plan.offloads,
    )


def _bucket_unit(plan: FlatPlan, buffer: BufferPlan, bucket: BucketPlan, step: StepPlan) -> UnitFacts:
    in_fp32 = [param for param in bucket.params if param.name in buffer.accumulated_in_fp32]
    length = bucket.elements if buffer.holds_params else bucket.numel
    param_bytes, grad_bytes = length * buffer.param_dtype.itemsize, bucket.elements * buffer.grad_dtype.itemsize
    if buffer.releases_grads:
        held_grad_bytes = grad_bytes // plan.num_shards
    else:
        held_grad_bytes = grad_bytes + sum(param.numel for param in in_fp32) * torch.float32.itemsize
    first, last = (pick(bucket.params, key=lambda param: param.places[0]).name for pick in (min, max))
    is_sharded = not plan.is_replicated
    return UnitFacts(
        name=first if first == last else f"{first}{RANGE}{last}",
        kind=_count(bucket.params),
        place=bucket.place,
        num_parameters=bucket.numel,
        num_trainable=bucket.numel,
        kept=Held(param_bytes, (buffer.param_dtype,)),
        gathered=None,
        gradient=Held(held_grad_bytes, _distinct([buffer.grad_dtype, *([torch.float32] if in_fp32 else [])])),
        after_forward="",
        traffic=bucket_traffic(
            step,
            param_bytes=param_bytes,
            grad_bytes=grad_bytes,
            shard_size=plan.num_shards if is_sharded else None,
            num_replicas=plan.groups.whole.size() // plan.num_shards,
        ),
    )


def _flat_unit(plan: FullyShardedPlan, unit: FlatUnitPlan, step: StepPlan, params: Sequence[ParamPlan]) -> UnitFacts:
    buckets = plan.buckets_of(unit)
    trained = [(buffer, bucket) for buffer, bucket in buckets if buffer.is_trained]
    kept = sum(bucket.elements * buffer.param_dtype.itemsize for buffer, bucket in buckets)
    gathered = sum(bucket.elements * buffer.gathered_dtype.itemsize for buffer, bucket in buckets)
    reduced = sum(bucket.elements * buffer.grad_dtype.itemsize for buffer, bucket in trained)
    whole_grads = sum(  # where one rank has all
        (0 if buffer.releases_grads else bucket.elements * buffer.grad_dtype.itemsize) for buffer, bucket in trained
    )
    of_slot = [other for other in plan.units if other.slot == unit.slot]
    is_last, is_first = of_slot[-1] is unit, of_slot[0] is unit
    stays, again_over = unit.slot is None or len(of_slot) == 1, unit.kept_among or plan.num_shards
    return UnitFacts(
        name=" + ".join(unit.names),
        kind=" + ".join(dict.fromkeys(_class_name(module) for module in unit.modules)),
        place=min(param.places[0] for param in params),
        num_parameters=sum(param.numel for param in params),
        num_trainable=sum(param.numel for param in params if param.is_trained),
        kept=Held(kept // plan.num_shards, _distinct(buffer.param_dtype for buffer, _ in buckets)),
        gathered=Held(gathered, _distinct(buffer.gathered_dtype for buffer, _ in buckets)),
        gradient=Held(
            whole_grads or reduced // plan.num_updated_parts, _distinct(buffer.grad_dtype for buffer, _ in trained)
        ),
        after_forward="stays" if stays else f"1/{unit.kept_among}" if unit.kept_among else "freed",
        traffic=sharded_traffic(
            step,
            gathered_bytes=gathered,
            reduced_bytes=reduced,
            shard_size=plan.num_shards,
            num_replicas=plan.groups.num_replicas,
            # The last unit of a slot is there when backward begins, and the first one when the next forward does.
            gathered_again_over=0 if is_last or not unit.is_needed_in_backward else again_over,
            is_kept=is_first,
            shared_update_bytes=kept // plan.num_shards if plan.shards_update_over_replicas and trained else 0,
        ),
        is_offloaded=plan.offloads,
    )


def _frozen_unit(params: Sequence[ParamPlan]) -> UnitFacts:
    held = Held(sum(param.numel * param.dtype.itemsize for param in params), _distinct(p.dtype for p in params))
    place, count = min(param.places[0] for param in params), sum(param.numel for param in params)
    return UnitFacts("frozen", _count(params), place, count, 0, held, None, Held(0, ()), "", ())


def _shard_bytes(params: Iterable[ParamPlan]) -> int:
    return sum(param.shard_numel * param.dtype.itemsize for param in params)


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _distinct(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(dtypes), key=str))


def _class_name(module: nn.Module) -> str:
    # fully_shard replaces a module's class by a subclass named FSDP...
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))


def _count(things: Sequence[object]) -> str:
    return f"{len(things)} parameter{'s' if len(things) != 1 else ''}"
