"""What there is to say of a wrapped model, unit by unit: arithmetic of this rank, which talks to no other."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...tensor_parallel.layers import ColumnParallelLinear
from ..buffers.bucket import Bucket
from ..fsdp2.torch_private import ShardedGroup, sharded_groups
from .wire import StepPlan, Traffic, bucket_traffic, sharded_traffic

if TYPE_CHECKING:  # the wrappers describe themselves by what is here
    from ..data_parallel_base import _BaseDataParallel
    from ..distributed_data_parallel import DistributedDataParallel


RANGE = " … "
"""Between the first and the last name of what a bucket holds."""


@dataclass(frozen=True)
class Held:
    """Memory of one kind."""

    nbytes: int
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class UnitFacts:
    """Parameters that travel together; all sizes are those of this rank, tensor-parallel cut and padding included."""

    name: str
    """Of its modules below the model, joined by " + "; empty for what is left to the model itself."""
    kind: str
    """Classes of its modules; what a bucket holds."""
    place: int
    """Of its first parameter among those of the model, which is roughly the order of execution."""
    num_parameters: int
    num_trainable: int
    kept: Held
    """Parameters that this rank keeps at all times."""
    gathered: Held | None
    """Parameters while they are gathered; None where they are always whole."""
    gradient: Held
    """What this rank keeps of the gradient once it is reduced."""
    after_forward: str
    """What becomes of gathered parameters until backward."""
    traffic: tuple[Traffic, ...]
    is_offloaded: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whole on every rank at all times."""
        return self.gathered is None

    def like(self, other: UnitFacts) -> bool:
        """Equal but for its name and place."""
        return replace(self, name=other.name, place=other.place) == other


@dataclass(frozen=True)
class Tie:
    """One weight in several places."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    """Of each name among those of the model's parameters; see `UnitFacts.place`."""
    unit: int
    """Index of the unit that holds it."""


@dataclass(frozen=True)
class ModelFacts:
    """A wrapped model."""

    wrapper: str
    num_ranks: int
    shard_size: int
    """Ranks that share a parameter, or the state of the optimizer; 1 where nothing is cut."""
    num_replicas: int
    step: StepPlan
    units: tuple[UnitFacts, ...]
    """In the order of `UnitFacts.place`."""
    ties: tuple[Tie, ...]
    replicated: tuple[str, ...]
    """Names of single parameters that are whole on every rank, beside units that are."""
    num_buffers: int
    buffer_bytes: int
    settings: str
    """Those of the wrapper that differ from their defaults."""
    tensor_parallel_size: int = 1
    """Ranks that share the layers underneath; the facts are those of one's part."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""


@dataclass(frozen=True)
class Names:
    """Every name of every parameter of a model, with its place in it."""

    of: Mapping[nn.Parameter, tuple[str, ...]]
    place: Mapping[str, int]

    @staticmethod
    def within(model: nn.Module) -> Names:
        """Of a model; the weight that a GPT's output projection is given by its embedding has that name too."""
        named = list(model.named_parameters(remove_duplicate=False))
        of: dict[nn.Parameter, tuple[str, ...]] = {}
        for name, parameter in named:
            of[parameter] = (*of.get(parameter, ()), name)
        names = [name for name, _ in named]
        borrowers = [
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, ColumnParallelLinear) and module.weight is None
        ]
        for parameter in of:
            if getattr(parameter, "shared_embedding", False):
                of[parameter] = (*of[parameter], *borrowers)
        return Names(of, {name: place for place, name in enumerate([*names, *borrowers])})


def sharded_units(
    model: nn.Module, step: StepPlan, kept: Container[nn.Module]
) -> tuple[list[UnitFacts], list[Tie], int]:
    """Units, tied weights and ranks that share a parameter, of a model that FSDP2 has sharded.

    Args:
        kept: modules that stay gathered between micro-batches.
    """
    names = Names.within(model)
    groups = sharded_groups(model)
    module_names = {module: name for name, module in model.named_modules()}
    in_backward = _gathered_in_backward(model, groups, names)
    units = [
        _sharded_unit(group, step, names, module_names, index in in_backward, group.modules[0] in kept)
        for index, group in enumerate(groups)
    ]
    order = sorted(range(len(units)), key=lambda index: units[index].place)
    # While a unit is gathered the model holds other parameters under the same names: compare these.
    marked = {all_names[0]: all_names for all_names in names.of.values()}
    ties = [
        Tie(all_names, tuple(names.place[name] for name in all_names), position)
        for position, index in enumerate(order)
        for p in groups[index].parameters
        if len(all_names := marked[p.names[0]]) > 1
    ]
    return [units[index] for index in order], ties, max((group.shard_size for group in groups), default=1)


def _gathered_in_backward(root: nn.Module, groups: Sequence[ShardedGroup], names: Names) -> set[int]:
    """Indices of the groups that backward gathers where they were freed.

    Backward begins with the root, and runs from the loss to the first weight that is trained and no further.
    """
    first_trained = min(
        (names.place[p.names[0]] for group in groups for p in group.parameters if p.parameter.requires_grad),
        default=len(names.place),
    )
    return {
        index
        for index, group in enumerate(groups)
        if group.is_read_in_backward
        and (root in group.modules or max(names.place[p.names[0]] for p in group.parameters) >= first_trained)
    }


def _sharded_unit(
    group: ShardedGroup,
    step: StepPlan,
    names: Names,
    module_names: Mapping[nn.Module, str],
    in_backward: bool,
    is_kept: bool,
) -> UnitFacts:
    trained = [p for p in group.parameters if p.parameter.requires_grad]
    places = [names.place[p.names[0]] for p in group.parameters]
    compute = [_cast(p.dtype, group.param_dtype) for p in group.parameters]
    whole = [p.shard_numel * group.shard_size for p in group.parameters]
    gathered_bytes = sum(n * dtype.itemsize for n, dtype in zip(whole, compute, strict=True))
    reduced_bytes = sum(
        n * _cast(dtype, group.reduce_dtype).itemsize
        for p, n, dtype in zip(group.parameters, whole, compute, strict=True)
        if p.parameter.requires_grad
    )
    reshard = group.reshard_after_forward
    stays = reshard is False or (is_kept and not group.is_read_in_backward)
    return UnitFacts(
        name=" + ".join(module_names[module] for module in group.modules),
        kind=" + ".join(dict.fromkeys(_class_name(module) for module in group.modules)),
        place=min(places),
        num_parameters=sum(p.numel for p in group.parameters),
        num_trainable=sum(p.numel for p in trained),
        kept=Held(
            sum(p.shard_numel * p.dtype.itemsize for p in group.parameters),
            _distinct(p.dtype for p in group.parameters),
        ),
        gathered=Held(gathered_bytes, _distinct(compute)),
        gradient=Held(sum(p.shard_numel * p.dtype.itemsize for p in trained), _distinct(p.dtype for p in trained)),
        after_forward="stays" if stays else "freed" if reshard is True else f"1/{reshard}",
        traffic=sharded_traffic(
            step,
            gathered_bytes=gathered_bytes,
            reduced_bytes=reduced_bytes,
            shard_size=group.shard_size,
            num_replicas=group.num_replicas,
            reshard_after_forward=reshard,
            is_gathered_in_backward=in_backward,
            is_kept=is_kept and (stays or in_backward),
        ),
        is_offloaded=group.is_offloaded,
    )


def bucket_units(
    model: nn.Module,
    buckets: Iterable[Bucket],
    step: StepPlan,
    *,
    shard_size: int | None,
    num_replicas: int,
) -> tuple[list[UnitFacts], list[Tie], list[str]]:
    """Units, tied weights and parameters outside any bucket, of a model on flat buffers.

    Args:
        shard_size: ranks among which optimizer state is cut; None where nothing is.
        num_replicas: ranks that hold the same, whole or shard.
    """
    names = Names.within(model)
    buckets = sorted(buckets, key=lambda bucket: min(names.place[slot.name] for slot in bucket.slots))
    units = [_bucket_unit(bucket, step, names, shard_size, num_replicas) for bucket in buckets]
    unit_of = {param: index for index, bucket in enumerate(buckets) for param in bucket.params}
    frozen = [p for p in names.of if p not in unit_of]
    if frozen:
        held = Held(sum(p.numel() * p.element_size() for p in frozen), _distinct(p.dtype for p in frozen))
        place = min(names.place[names.of[p][0]] for p in frozen)
        count = sum(p.numel() for p in frozen)
        units.append(UnitFacts("frozen", _count(frozen), place, count, 0, held, None, Held(0, ()), "", ()))
        unit_of |= dict.fromkeys(frozen, len(units) - 1)
    ties = [
        Tie(all_names, tuple(names.place[name] for name in all_names), unit_of[p])
        for p, all_names in names.of.items()
        if len(all_names) > 1
    ]
    return units, ties, [names.of[p][0] for p in frozen]


def _bucket_unit(bucket: Bucket, step: StepPlan, names: Names, shard_size: int | None, num_replicas: int) -> UnitFacts:
    buffer, slots = bucket.buffer, bucket.slots
    holds_params = bucket.param_data is not None
    length = bucket.numel if holds_params else sum(slot.param.numel() for slot in slots)
    param_bytes, grad_bytes = length * buffer.param_dtype.itemsize, bucket.numel * buffer.grad_dtype.itemsize
    held_grad_bytes = grad_bytes // buffer.num_shards if bucket.releases_grads else grad_bytes
    if not bucket.releases_grads:
        held_grad_bytes += sum(param.numel() for param in bucket.params_with_extra_main_grads) * torch.float32.itemsize
    grad_dtypes = _distinct({buffer.grad_dtype, *map(bucket.main_grad_dtype, bucket.params)})
    first, last = (pick(slots, key=lambda slot: names.place[slot.name]).name for pick in (min, max))
    return UnitFacts(
        name=first if first == last else f"{first}{RANGE}{last}",
        kind=_count(slots),
        place=names.place[first],
        num_parameters=(count := sum(slot.param.numel() for slot in slots)),
        num_trainable=count,
        kept=Held(param_bytes, (buffer.param_dtype,)),
        gathered=None,
        gradient=Held(held_grad_bytes, grad_dtypes),
        after_forward="",
        traffic=bucket_traffic(
            step, param_bytes=param_bytes, grad_bytes=grad_bytes, shard_size=shard_size, num_replicas=num_replicas
        ),
    )


def _cast(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _distinct(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(dtypes), key=str))


def _class_name(module: nn.Module) -> str:
    # fully_shard puts a class of its own, named FSDP..., in front of a module's.
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))


def _count(things: Sequence[object]) -> str:
    return f"{len(things)} parameter{'s' if len(things) != 1 else ''}"


def sharded_facts(wrapper: _BaseDataParallel, num_microbatches: int, kept: Container[nn.Module]) -> ModelFacts:
    """Of a wrapper whose module FSDP2 has sharded, of which `kept` stay gathered between micro-batches."""
    model = wrapper.module
    step = StepPlan(num_microbatches, wrapper.ddp_config.reduce_every_micro_batch)
    units, ties, shard_size = sharded_units(model, step, kept)
    return _model_facts(wrapper, model, step, units, ties, [], shard_size, wrapper.process_group.size() // shard_size)


def bucket_facts(wrapper: DistributedDataParallel, model: nn.Module, num_microbatches: int) -> ModelFacts:
    """Of a wrapper of `model` on flat buffers."""
    shard_size, num_ranks = wrapper.intra_instance_group.size(), wrapper.process_group.size()
    is_sharded = wrapper.ddp_config.sharding_strategy != "no_shard"
    step = StepPlan(num_microbatches, wrapper.ddp_config.reduce_every_micro_batch and shard_size > 1)
    units, ties, frozen = bucket_units(
        model,
        [group.bucket for group in (*wrapper.bucket_groups, *wrapper.expert_parallel_bucket_groups)],
        step,
        shard_size=shard_size if is_sharded else None,
        num_replicas=num_ranks // shard_size if is_sharded else num_ranks,
    )
    shards = shard_size if is_sharded else 1
    return _model_facts(wrapper, model, step, units, ties, frozen, shards, num_ranks // shards)


def _model_facts(
    wrapper: _BaseDataParallel,
    model: nn.Module,
    step: StepPlan,
    units: Sequence[UnitFacts],
    ties: Sequence[Tie],
    replicated: Sequence[str],
    shard_size: int,
    num_replicas: int,
) -> ModelFacts:
    buffers = list(model.buffers())
    config = wrapper.ddp_config
    changed = {f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default}
    return ModelFacts(
        wrapper=type(wrapper).__name__,
        num_ranks=wrapper.process_group.size(),
        shard_size=shard_size,
        num_replicas=num_replicas,
        step=step,
        units=tuple(units),
        ties=tuple(ties),
        replicated=tuple(replicated),
        num_buffers=len(buffers),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        settings=", ".join(f"{name}={value}" for name, value in changed.items()),
        tensor_parallel_size=getattr(wrapper.config, "tensor_model_parallel_size", 1),
        context_parallel_size=getattr(wrapper.config, "context_parallel_size", 1),
    )
