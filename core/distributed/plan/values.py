"""The plan of a wrapped model, as data: made once, before the model changes, and never changed.

`plan_model` makes the plan of any wrapper; a wrapper calls its own one of `plan_flat`, `plan_fully_sharded` and
`plan_fsdp2`.

A `ShardingPlan` has a `UnitPlan` for each unit of FSDP2 or bucket of a flat buffer, and a `UnitPlan` has a `ParamPlan`
for each parameter. Engines are built from a plan; reports, checks and error messages read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

import torch
from torch import nn

from ...micro_batch_tree import MicroBatchTree
from ..distributed_data_parallel_config import ActivationCheckpointing, shards_parameters
from ..groups import DataParallelGroups

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
    """One parameter; sizes and elements are those of this rank's part under tensor parallelism."""

    names: tuple[str, ...]
    """All names in the model; several for a tied parameter."""
    places: tuple[int, ...]
    """Index of each name in the model's list of parameter names, which is roughly the order of execution."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    cut: Cut
    bounds: tuple[int, ...]
    """Rank `i` of the ranks that share the update has elements ``[bounds[i], bounds[i + 1])`` of the flattened
    parameter."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return self.bounds[-1]

    @property
    def shard_numel(self) -> int:
        """Number of elements in a shard, including the padding that makes all shards equally long."""
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered and reduced together."""

    params: tuple[ParamPlan, ...]
    """The unit's parameters, except those of units before it."""

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def place(self) -> int:
        """The place of the unit's first parameter; see `ParamPlan.places`."""
        return min(param.places[0] for param in self.params)


@dataclass(frozen=True, kw_only=True)
class UnitTransform:
    """Recomputation and compilation of a unit's modules, applied before the model is wrapped."""

    modules: tuple[nn.Module, ...]
    recomputes: ActivationCheckpointing
    is_compiled: bool
    memory_budget: float | None = None
    """The share of activations that compiled code saves for backward: from 0, only its inputs, to 1, all that make
    backward fast. None takes torch's setting of the process, 1 by default."""

    @property
    def computes_again(self) -> bool:
        """Whether backward computes activations again, to save their memory."""
        return self.recomputes != "none" or (self.memory_budget is not None and self.memory_budget < 1.0)


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """The part of a plan that every engine needs."""

    asked_by: ClassVar[Mapping[str, str]] = {
        "recomputes": "activation_checkpointing='full'",
        "reduces_every_micro_batch": "reduce_every_micro_batch=True",
    }
    """Maps a property of a plan or unit to the setting that changes it, for advice in messages."""

    caller: str
    """The wrapper class or function that the user called, for messages."""
    strategy: str
    """``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``."""
    groups: DataParallelGroups
    reduction: GradientReduction
    reduces_every_micro_batch: bool
    """Gradients are reduced after each micro-batch, so that whole gradients never accumulate."""
    checks_for_nan: bool
    checks_for_large: bool
    broadcasts_buffers: bool | None = None
    """Buffers are rank 0's after each reduction; None: where the model has running statistics."""
    is_reproducible: bool = False
    """Sums over a global batch have one shape on any number of data-parallel ranks, that of `tree`."""
    frozen: tuple[ParamPlan, ...] = ()
    """Parameters that are in no unit; whole on every rank."""
    settings: tuple[tuple[str, str], ...] = ()
    """Names and values, as text, of all settings that must be equal on all ranks."""
    changed_settings: str = ""
    """The wrapper's settings that differ from their defaults, as text for reports."""
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    transforms: tuple[UnitTransform, ...] = ()
    """Recomputation and compilation of units, applied before parameters are sharded."""

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded too, and gathered before use."""
        return shards_parameters(self.strategy)

    @property
    def is_replicated(self) -> bool:
        """Whether nothing is sharded: every rank updates whole parameters."""
        return self.strategy == "no_shard"

    @property
    def casts_parameters(self) -> bool:
        """Whether parameters are cast to the dtype of computation when they are gathered."""
        return False

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes activations of some units."""
        return any(transform.computes_again for transform in self.transforms)

    @property
    def tree(self) -> MicroBatchTree | None:
        """Order in which a rank adds up its micro-batches' gradients; None unless `is_reproducible`."""
        if not self.is_reproducible:
            return None
        return MicroBatchTree(self.groups.whole.size() // self.context_parallel_size, self.reduces_every_micro_batch)

    @property
    def sum_order(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of a shard group, in groups that are added first; None if any order will do.

        Parts of a sequence, which are neighbours, are added before micro-batches, or after them: so that ranks join
        the tree where micro-batches of one rank would.
        """
        if not self.is_reproducible:
            return None
        parts = self.context_parallel_size
        size = (self.groups.whole if self.is_replicated else self.groups.shard).size()
        if self.reduces_every_micro_batch:
            return tuple(tuple(range(first, first + parts)) for first in range(0, size, parts))
        return tuple(tuple(range(part, size, parts)) for part in range(parts))

    @property
    def num_shards(self) -> int:
        """Number of ranks that shard a parameter, or its optimizer state; 1 if nothing is sharded."""
        return 1 if self.is_replicated else self.groups.shard.size()

    @property
    def shard_index(self) -> int:
        """Index of this rank among the ranks that shard a parameter, or its optimizer state."""
        return 0 if self.is_replicated else self.groups.shard.rank()

    @property
    def num_updated_parts(self) -> int:
        """Number of ranks that share the update of a parameter."""
        return self.num_shards

    @property
    def updated_part(self) -> int:
        """Index `i` of this rank's update: elements ``[bounds[i], bounds[i + 1])`` of each `ParamPlan`."""
        return self.shard_index


@dataclass(frozen=True, kw_only=True)
class GatheringPlan(ShardingPlan):
    """The plan of an engine that gathers units before use."""

    asked_by: ClassVar[Mapping[str, str]] = {
        **ShardingPlan.asked_by,
        "is_freed": "reshard_after_forward=True",
        "gathers_ahead": "forward_prefetch=0, backward_prefetch=0",
        "offloads": "cpu_offload=True",
    }

    forward_prefetch: int
    """Number of units to prefetch in forward."""
    backward_prefetch: int
    """Number of units to prefetch in backward."""
    offloads: bool
    """Shards are in the host's memory."""
    pins_memory: bool
    registers_memory: bool
    """Buffers of collectives are in memory that the backend allocates, if it can."""
    equalizes: bool
    """The first rank's values replace those of the others before sharding."""
    buffer_dtype: torch.dtype | None
    forward_methods: tuple[str, ...]
    """Names of methods that gather parameters as a forward does."""

    @property
    def gathers_ahead(self) -> bool:
        """Whether some units are prefetched."""
        return self.forward_prefetch + self.backward_prefetch > 0
