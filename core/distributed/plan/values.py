"""The plan of a wrapped model, as data: made once by `plan_model`, before anything is touched, and then kept.

A `ShardingPlan` has a `UnitPlan` for all that travels together, that is, a unit of FSDP2 or a bucket of a flat buffer,
and that has a `ParamPlan` for each parameter. Engines are built from a plan; what describes, compares or explains a
wrapped model reads the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...micro_batch_tree import MicroBatchTree
from ..distributed_data_parallel_config import shards_parameters
from ..groups import DataParallelGroups
from .layout import BucketLayout, FullParamLayout

Cut = Literal["whole", "flat", "rows", "tensor", "block"]
"""How a parameter is divided: not at all; between any elements; by its first dimension, as DTensors are; not at all,
but held by one rank; or between blocks of elements."""


class GradientReduction(Enum):
    """How the gradients of replicas are reduced."""

    MEAN = "mean"
    SUM = "sum"
    """``calculate_per_token_loss``: `finalize_model_grads` divides by the number of tokens."""


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One parameter; its elements are those of this rank's part under tensor parallelism."""

    names: tuple[str, ...]
    """Every name below the model: several where it is tied."""
    places: tuple[int, ...]
    """Of each name among those of the model's parameters, which is roughly the order of execution."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    cut: Cut
    bounds: tuple[int, ...]
    """Rank `i` of those that share the update has elements ``[bounds[i], bounds[i + 1])`` of the flattened
    parameter."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    @property
    def shard_numel(self) -> int:
        """Elements of a shard, the padding included that makes those of all ranks equally long."""
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered and reduced together."""

    params: tuple[ParamPlan, ...]
    """Those in no unit before this one."""

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def place(self) -> int:
        """Of its first parameter; see `ParamPlan.places`."""
        return min(param.places[0] for param in self.params)


@dataclass(frozen=True, kw_only=True)
class BucketPlan(UnitPlan):
    """A part of a flat buffer, which one collective reduces, and one gathers."""

    layout: BucketLayout

    @property
    def elements(self) -> int:
        """Padding included."""
        return self.layout.end - self.layout.start

    def places_in_shard(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Returns ``[start, end)`` of what a shard holds of each parameter, counted from the shard's beginning."""
        first = self.elements // (len(self.params[0].bounds) - 1) * shard
        places = []
        for param, (begin, _) in zip(self.params, self.layout.ranges, strict=True):
            start, end = (begin + bound - first for bound in param.bounds[shard : shard + 2])
            places.append((start, end) if start < end else (0, 0))
        return tuple(places)


@dataclass(frozen=True, kw_only=True)
class BufferPlan:
    """Flat memory for parameters of one dtype and device, and their gradients."""

    param_dtype: torch.dtype
    """Of what a rank keeps of parameters, which its optimizer updates."""
    gathered_dtype: torch.dtype
    """Of whole parameters, in which the model computes; another where they are cast to be gathered."""
    grad_dtype: torch.dtype
    """In which gradients add up and are reduced."""
    shard_grad_dtype: torch.dtype
    """Of the reduced gradient that a rank keeps; it may be wider where whole gradients are released."""
    holds_params: bool
    """Parameters are views of it; otherwise it holds gradients alone."""
    releases_grads: bool
    """Whole gradients are allocated by the bucket when they arrive, and freed when they are reduced."""
    holds_experts: bool
    """Its parameters carry Megatron-LM's mark ``allreduce=False``."""
    accumulated_in_fp32: frozenset[str]
    """Names of parameters whose gradients add up over micro-batches in fp32 memory of their own."""
    is_trained: bool = True
    """False: frozen parameters, without gradients."""
    buckets: tuple[BucketPlan, ...]
    """In the order in which backward is expected to finish them."""


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The part of a plan that every engine needs."""

    asked_by: ClassVar[Mapping[str, str]] = {
        "recomputes": "activation_checkpointing='full'",
        "reduces_every_micro_batch": "reduce_every_micro_batch=True",
    }
    """Properties of a plan or a unit, with the settings by which people ask for them; for advice."""

    caller: str
    """What the user called: a wrapper's class, or a function."""
    strategy: str
    """``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``."""
    groups: DataParallelGroups
    reduction: GradientReduction
    reduces_every_micro_batch: bool
    """Whole gradients never add up: each micro-batch's are reduced."""
    checks_for_nan: bool
    checks_for_large: bool
    is_reproducible: bool = False
    """Sums over a global batch have one shape on any number of data-parallel ranks, that of `tree`."""
    frozen: tuple[ParamPlan, ...] = ()
    """Parameters in no unit, whole on every rank."""
    settings: tuple[tuple[str, str], ...] = ()
    """Name and value, as text, of everything that must be equal on all ranks."""
    changed_settings: str = ""
    """The wrapper's settings that differ from their defaults, for people."""
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    @property
    def shards_parameters(self) -> bool:
        """Parameters are cut too, and gathered for their use."""
        return shards_parameters(self.strategy)

    @property
    def casts_parameters(self) -> bool:
        """Parameters are cast when they are gathered, to the dtype of computation."""
        return False

    @property
    def recomputes(self) -> bool:
        """The wrapper computes activations of some units again in backward."""
        return False

    @property
    def tree(self) -> MicroBatchTree | None:
        """What a rank adds up of a step; None unless `is_reproducible`."""
        if not self.is_reproducible:
            return None
        return MicroBatchTree(self.groups.whole.size() // self.context_parallel_size, self.reduces_every_micro_batch)

    @property
    def sum_order(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of a shard group, by the groups of them that are added first; None where any order will do.

        Parts of a sequence, which are neighbours, are added before micro-batches, or after them: so that ranks join
        the tree where micro-batches of one rank would.
        """
        if not self.is_reproducible:
            return None
        parts = self.context_parallel_size
        size = (self.groups.whole if self.strategy == "no_shard" else self.groups.shard).size()
        if self.reduces_every_micro_batch:
            return tuple(tuple(range(first, first + parts)) for first in range(0, size, parts))
        return tuple(tuple(range(part, size, parts)) for part in range(parts))

    @property
    def num_shards(self) -> int:
        """Ranks that share a parameter, or the state of its optimizer; 1 where nothing is cut."""
        return 1 if self.strategy == "no_shard" else self.groups.shard.size()

    @property
    def shard_index(self) -> int:
        """Index of this rank among those that share a parameter, or the state of its optimizer."""
        return 0 if self.strategy == "no_shard" else self.groups.shard.rank()

    @property
    def num_updated_parts(self) -> int:
        """Ranks that share the update of a parameter."""
        return self.num_shards

    @property
    def updated_part(self) -> int:
        """Index `i` of what this rank updates: elements ``[bounds[i], bounds[i + 1])`` of each `ParamPlan`."""
        return self.shard_index


@dataclass(frozen=True, kw_only=True)
class FlatUnitPlan:
    """A unit on flat buffers: modules whose parameters are whole while one of them runs."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    """Of each module below the model, whose own is empty."""
    buckets: tuple[tuple[int, int], ...]
    """Buffer and bucket of its memory, one for each kind of its parameters."""
    slot: int | None
    """The memory that it is gathered into, which units of its size use in turn; None where one rank has all."""
    is_freed: bool
    """Between its forward and backward another unit may be gathered into the same memory."""
    kept_among: int | None
    """Neighbouring ranks that then have all of it together, and gather it from each other; None where all ranks do."""
    is_needed_in_backward: bool
    """False where no backward of the unit reads a weight, as in an embedding."""
    recomputes: Literal["none", "full", "selective"] = "none"
    is_compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class UnitTransform:
    """What is done to the forward of a unit's modules before the model is wrapped."""

    modules: tuple[nn.Module, ...]
    recomputes: Literal["none", "full", "selective"]
    is_compiled: bool


@dataclass(frozen=True, kw_only=True)
class FlatPlan(ShardingPlan):
    """The plan that `core.distributed.buffers` carries out."""

    transforms: tuple[UnitTransform, ...] = ()
    buffers: tuple[BufferPlan, ...]
    leaves: tuple[tuple[int, int], ...]
    """Buffer and bucket, in the order in which buckets are reduced, equal on all ranks."""
    reduces_during_backward: bool
    """Buckets leave when their gradients are complete, rather than all at the end."""
    overlaps_grads: bool
    """Reductions run while backward goes on."""
    overlaps_params: bool
    """Parameters are gathered while forward runs."""
    averages_in_collective: bool
    adds_in_fp32: bool
    """Gradients travel in their own precision and are added in fp32."""

    @property
    def recomputes(self) -> bool:
        return any(transform.recomputes != "none" for transform in self.transforms)

    @property
    def trained(self) -> dict[str, ParamPlan]:
        """The parameters with gradients in buffers, by name."""
        buckets = (bucket for buffer in self.buffers if buffer.is_trained for bucket in buffer.buckets)
        return {param.name: param for bucket in buckets for param in bucket.params}

    @property
    def layout(self) -> FullParamLayout:
        """The places of parameters alone."""
        return FullParamLayout(tuple(tuple(bucket.layout for bucket in buffer.buckets) for buffer in self.buffers))


@dataclass(frozen=True, kw_only=True)
class FullyShardedPlan(FlatPlan):
    """The plan that `core.distributed.fully_sharded` carries out."""

    asked_by: ClassVar[Mapping[str, str]] = {
        **ShardingPlan.asked_by,
        "is_freed": "reshard_after_forward=True",
        "gathers_ahead": "forward_prefetch=0, backward_prefetch=0",
        "offloads": "cpu_offload=True",
    }

    units: tuple[FlatUnitPlan, ...]
    """Children before parents; last the model, with what is in no unit before it."""
    shards_update_over_replicas: bool
    """Each optimizer instance updates a part of the shards, and gathers the others'."""
    precision: MixedPrecisionPolicy
    """Of the model; units cast their inputs too, its outputs are cast alone."""
    forward_prefetch: int
    """Units that are gathered ahead in forward."""
    backward_prefetch: int
    """The same in backward."""
    offloads: bool
    """Shards are in the host's memory."""
    pins_memory: bool
    registers_memory: bool
    """Slots and gradients are in memory of the backend, where it can allocate."""
    equalizes: bool
    """The first rank's values replace those of the others before sharding."""
    buffer_dtype: torch.dtype | None
    forward_methods: tuple[str, ...]

    @property
    def num_updated_parts(self) -> int:
        return self.num_shards * (self.groups.num_replicas if self.shards_update_over_replicas else 1)

    @property
    def updated_part(self) -> int:
        if self.groups.replicate is None or not self.shards_update_over_replicas:
            return self.shard_index
        return self.shard_index * self.groups.num_replicas + self.groups.replicate.rank()

    @property
    def casts_parameters(self) -> bool:
        return self.precision.param_dtype is not None

    @property
    def recomputes(self) -> bool:
        return any(unit.recomputes != "none" for unit in self.units)

    @property
    def gathers_ahead(self) -> bool:
        """Some units are gathered before they are reached."""
        return self.forward_prefetch + self.backward_prefetch > 0

    def buckets_of(self, unit: FlatUnitPlan) -> tuple[tuple[BufferPlan, BucketPlan], ...]:
        """Returns a unit's buckets, each with its buffer."""
        return tuple((self.buffers[index], self.buffers[index].buckets[number]) for index, number in unit.buckets)
