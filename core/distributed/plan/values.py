"""The plan of a wrapped model, as data: made once, before the model changes, and never changed.

A `Plan` has a `UnitPlan` for everything that is gathered or reduced together, a `UnitPlan` has a `PiecePlan` for each
dtype and place of its parameters, and a `PiecePlan` has a `ParamPlan` for each parameter, whatever the engine. Engines
are built from a plan, and keep it. Reports, checks and error messages read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...micro_batch_tree import MicroBatchTree
from ..distributed_data_parallel_config import ActivationCheckpointing, shards_parameters
from ..engine import Engine
from ..groups import DataParallelGroups
from .layout import BucketLayout, FullParamLayout
from .traffic import Traffic, unit_traffic

Cut = Literal["whole", "flat", "rows", "tensor", "block"]
"""How a parameter is divided: not at all; between any elements; by its first dimension, as DTensors are; not at all,
but held by one rank; or between blocks of elements."""


_NO_CASTS = MixedPrecisionPolicy()
_NO_LAYOUT = BucketLayout(0, 0, (), ())


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
    accumulates_in_fp32: bool = False
    """Its gradient accumulates over micro-batches in an fp32 tensor of its own."""
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
    def num_parts(self) -> int:
        """Number of ranks that share the update."""
        return len(self.bounds) - 1

    @property
    def shard_numel(self) -> int:
        """Number of elements in a shard, including the padding that makes all shards equally long."""
        return max(end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class PieceKind:
    """What the parameters of one piece, and of one buffer, have in common."""

    is_trained: bool
    """False if the parameters are frozen and have no gradients."""
    holds_experts: bool = False
    """Its parameters carry Megatron-LM's mark ``allreduce=False``."""
    param_dtype: torch.dtype
    """Dtype of the parameters that a rank keeps and its optimizer updates."""
    gathered_dtype: torch.dtype
    """Dtype of gathered parameters, in which the model computes. Differs from `param_dtype` if they are cast."""
    grad_dtype: torch.dtype
    """Dtype in which gradients are accumulated and reduced."""
    shard_grad_dtype: torch.dtype
    """Dtype of the reduced gradient that a rank keeps; may be wider than `grad_dtype` if whole gradients are freed."""
    device: torch.device
    num_param_shards: int = 1
    """Number of ranks that share each parameter; 1 where every rank keeps whole ones."""
    holds_params: bool = True
    """Parameters have the piece's padding, as views of a buffer have; else only gradients have it."""
    releases_grads: bool = True
    """A whole gradient is allocated when a gradient arrives, and freed when it is reduced."""


@dataclass(frozen=True, kw_only=True)
class PiecePlan(PieceKind):
    """Parameters of one kind: one message reduces their gradients, and one gathers them.

    A bucket of a flat buffer, a unit's part of a buffer, or the parameters of one dtype in a unit of FSDP2.
    """

    params: tuple[ParamPlan, ...]
    layout: BucketLayout = _NO_LAYOUT
    """Its place in a flat buffer; empty where torch places it, or where nothing moves."""

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def place(self) -> int:
        """The place of the first parameter; see `ParamPlan.places`."""
        return min(param.places[0] for param in self.params)

    @property
    def elements(self) -> int:
        """Number of elements, padding included."""
        if self.layout.members:
            return self.layout.end - self.layout.start
        return sum(param.shard_numel * param.num_parts for param in self.params)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parameters that this rank always keeps."""
        length = self.elements if self.holds_params else self.numel
        return length * self.param_dtype.itemsize // self.num_param_shards

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters."""
        return self.elements * self.gathered_dtype.itemsize

    @property
    def reduced_bytes(self) -> int:
        """Bytes of the whole gradients, as they are reduced."""
        return self.elements * self.grad_dtype.itemsize if self.is_trained else 0

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's gradients after the reduction."""
        if not self.is_trained:
            return 0
        if self.releases_grads:
            return self.elements * self.shard_grad_dtype.itemsize // self.params[0].num_parts
        in_fp32 = sum(param.numel for param in self.params if param.accumulates_in_fp32)
        return self.reduced_bytes + in_fp32 * torch.float32.itemsize

    @property
    def gradient_dtypes(self) -> frozenset[torch.dtype]:
        """Dtypes of this rank's gradients after the reduction."""
        if not self.is_trained:
            return frozenset()
        in_fp32 = any(param.accumulates_in_fp32 for param in self.params) and not self.releases_grads
        dtype = self.shard_grad_dtype if self.releases_grads else self.grad_dtype
        return frozenset((dtype, torch.float32) if in_fp32 else (dtype,))

    def places_in_shard(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Returns each parameter's elements in a shard, ``[start, end)``, counted from the shard's beginning."""
        first = self.elements // self.params[0].num_parts * shard
        places = []
        for param, (begin, _) in zip(self.params, self.layout.ranges, strict=True):
            start, end = (begin + bound - first for bound in param.bounds[shard : shard + 2])
            places.append((start, end) if start < end else (0, 0))
        return tuple(places)


@dataclass(frozen=True, kw_only=True)
class BufferPlan(PieceKind):
    """Flat memory for parameters of one kind, and their gradients."""

    buckets: tuple[PiecePlan, ...]
    """In the order in which backward is expected to finish them."""

    @property
    def accumulated_in_fp32(self) -> frozenset[str]:
        """Names of parameters whose gradients accumulate over micro-batches in separate fp32 tensors."""
        params = (param for bucket in self.buckets for param in bucket.params)
        return frozenset(param.name for param in params if param.accumulates_in_fp32)


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered and reduced together: of modules, or a bucket of parameters that are always whole.

    The last unit of a plan is the model, with the parameters that are in no unit before it.
    """

    modules: tuple[nn.Module, ...] = ()
    """Its parameters are whole while one of them runs; empty for a bucket."""
    names: tuple[str, ...] = ()
    """Name of each module in the model; empty for the model itself."""
    pieces: tuple[PiecePlan, ...]
    """The unit's parameters, except those of units before it."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Indices of buffer and bucket of each piece; empty where torch has the memory."""
    precision: MixedPrecisionPolicy = _NO_CASTS
    """Dtypes of the modules. Units cast their inputs; only the model casts outputs."""
    is_gathered: bool = False
    """Its parameters are gathered before use; else they are always whole."""
    slot: int | None = None
    """Index of the slot that the unit is gathered into; units of equal size take turns with a slot. None if a single
    rank has all parameters, or torch has the memory."""
    is_freed: bool = False
    """Gathered parameters are freed after forward, or may be: another unit may be gathered into its slot."""
    kept_among: int | None = None
    """Number of neighbouring ranks that together keep the whole unit between forward and backward, and gather it from
    each other; None for one or all."""
    is_needed_in_backward: bool = True
    """False if the unit's backward reads no weight, as in an embedding: the unit is gathered only once."""
    stays_whole: bool = True
    """Each rank keeps the whole unit between forward and backward."""
    gathered_again_over: int = 0
    """Number of ranks among which backward gathers the unit again; 0 if it is whole, or no backward reads it."""
    is_kept: bool = False
    """The unit stays gathered from one micro-batch of a step to the next, if it is gathered when one ends."""

    @property
    def params(self) -> tuple[ParamPlan, ...]:
        return tuple(param for piece in self.pieces for param in piece.params)

    @property
    def reshard_after_forward(self) -> bool | int:
        """`is_freed` and `kept_among` as torch's `fully_shard` takes them."""
        return self.kept_among or self.is_freed


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
class Plan:
    """Everything that a wrapper does to a model, and in a step. `plan_model` makes it."""

    caller: str
    """The wrapper class or function that the user called, for messages."""
    engine: Engine
    strategy: str
    """``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``."""
    groups: DataParallelGroups
    settings: tuple[tuple[str, str], ...] = ()
    """Names and values, as text, of all settings that must be equal on all ranks."""
    changed_settings: str = ""
    """The wrapper's settings that differ from their defaults, as text for reports."""
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    units: tuple[UnitPlan, ...]
    """Children before parents; the last one is the model, with the parameters that are in no other unit."""
    transforms: tuple[UnitTransform, ...] = ()
    """Recomputation and compilation of units, applied before parameters are sharded."""
    broadcasts_buffers: bool | None = None
    """Buffers are rank 0's after each reduction; None: where the model has running statistics."""
    equalizes: bool = False
    """The first rank's values replace those of the others before sharding."""
    buffer_dtype: torch.dtype | None = None
    """Dtype that the model's buffers are cast to; None leaves them."""
    forward_methods: tuple[str, ...] = ()
    """Names of methods that gather parameters as a forward does."""

    reduction: GradientReduction
    is_reproducible: bool = False
    """Sums over a global batch have one shape on any number of data-parallel ranks, that of `tree`."""
    reduces_every_micro_batch: bool
    """Gradients are reduced after each micro-batch, so that whole gradients never accumulate."""
    checks_for_nan: bool
    checks_for_large: bool

    forward_prefetch: int = 0
    """Number of units to prefetch in forward."""
    backward_prefetch: int = 0
    """Number of units to prefetch in backward."""
    offloads: bool = False
    """Shards are in the host's memory."""
    pins_memory: bool = False
    registers_memory: bool = False
    """Buffers of collectives are in memory that the backend allocates, if it can."""

    # On flat buffers:
    buffers: tuple[BufferPlan, ...] = ()
    reduction_order: tuple[tuple[int, int], ...] = ()
    """Buffer and bucket, in the order in which buckets are reduced, equal on all ranks."""
    reduces_during_backward: bool = True
    """Buckets are sent when their gradients are complete, instead of all at the end."""
    overlaps_grads: bool = True
    """Reductions run while backward goes on."""
    overlaps_params: bool = True
    """Parameters are gathered while forward runs."""
    averages_in_collective: bool = False
    lends_gradients: bool = False
    """Layers compute gradients in the memory of buckets (`GradSlot.lend`)."""
    layers_add_gradients: bool = False
    """Layers add to ``main_grad`` themselves, as Megatron-LM's do with their fused kernel."""
    adds_in_fp32: bool = False
    """Gradients are sent in their own dtype and added in fp32."""
    shards_update_over_replicas: bool = False
    """Each optimizer instance updates a part of the shards, and gathers the other parts."""

    # On FSDP2:
    collectives: Literal["auto", "torch"] = "auto"
    adds_gradient_rows: bool = False
    """Embeddings add gradients row by row, in place."""

    @property
    def root(self) -> UnitPlan:
        """The model, as a unit."""
        return self.units[-1]

    @property
    def trained(self) -> dict[str, ParamPlan]:
        """The parameters with gradients, by name."""
        return {param.name: param for unit in self.units for param in unit.params if param.is_trained}

    @property
    def layout(self) -> FullParamLayout:
        """The layout of all buffers."""
        return FullParamLayout(tuple(tuple(bucket.layout for bucket in buffer.buckets) for buffer in self.buffers))

    def buckets_of(self, unit: UnitPlan) -> tuple[tuple[BufferPlan, PiecePlan], ...]:
        """Returns a unit's buckets, each with its buffer."""
        return tuple((self.buffers[index], self.buffers[index].buckets[number]) for index, number in unit.buckets)

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
        return self.root.precision.param_dtype is not None

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes activations of some units."""
        return any(transform.computes_again for transform in self.transforms)

    @property
    def gathers_ahead(self) -> bool:
        """Whether some units are prefetched."""
        return self.forward_prefetch + self.backward_prefetch > 0

    @property
    def asked_by(self) -> Mapping[str, str]:
        """Maps a property of the plan or a unit to the setting that changes it, for advice in messages."""
        asked = {
            "recomputes": "activation_checkpointing='full'",
            "reduces_every_micro_batch": "reduce_every_micro_batch=True",
        }
        if self.shards_parameters:
            kept = ", keep_gathered_between_micro_batches='none'" if self.engine is Engine.FSDP2 else ""
            asked["is_freed"] = f"reshard_after_forward=True{kept}"
            asked["gathers_ahead"] = "forward_prefetch=0, backward_prefetch=0"
            asked["offloads"] = "cpu_offload=True"
        return asked

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
    def num_replicas(self) -> int:
        """Number of ranks with the same shard; with the same whole parameters if nothing is sharded."""
        return self.groups.whole.size() // self.num_shards

    @property
    def num_updated_parts(self) -> int:
        """Number of ranks that share the update of a parameter."""
        return self.num_shards * (self.groups.num_replicas if self.shards_update_over_replicas else 1)

    @property
    def updated_part(self) -> int:
        """Index `i` of this rank's update: elements ``[bounds[i], bounds[i + 1])`` of each `ParamPlan`."""
        if self.groups.replicate is None or not self.shards_update_over_replicas:
            return self.shard_index
        return self.shard_index * self.groups.num_replicas + self.groups.replicate.rank()

    def kept_bytes(self) -> int:
        """Returns the bytes of the parameters that this rank always keeps."""
        return sum(piece.kept_bytes for piece in self._pieces())

    def gathered_bytes(self) -> int:
        """Returns the bytes of all whole parameters that are gathered before use, as if all were at once."""
        return sum(piece.gathered_bytes for unit in self.units if unit.is_gathered for piece in unit.pieces)

    def gradient_bytes(self) -> int:
        """Returns the bytes of this rank's gradients after a step's reduction."""
        return sum(piece.gradient_bytes for piece in self._pieces())

    def traffic(self, num_microbatches: int = 1, unit: UnitPlan | None = None) -> tuple[Traffic, ...]:
        """Returns the collectives of a step, of one unit or of all of them."""
        if unit is None:
            return tuple(entry for unit in self.units for entry in self.traffic(num_microbatches, unit))
        trained = [piece for piece in unit.pieces if piece.is_trained]
        kept_bytes = sum(piece.kept_bytes for piece in unit.pieces)
        # Between micro-batches a unit is gathered if it never was freed, or since backward gathered it.
        stays_in_step = unit.is_kept and bool(unit.stays_whole or unit.gathered_again_over)
        if unit.is_gathered:
            gathered_bytes = sum(piece.gathered_bytes for piece in unit.pieces)
        else:  # an update of whole parameters is gathered once, where ranks share it
            gathered_bytes = sum(piece.kept_bytes for piece in trained)
        return unit_traffic(
            gathers=1 if stays_in_step or not unit.is_gathered else num_microbatches,
            gathers_again=num_microbatches if unit.gathered_again_over else 0,
            reductions=num_microbatches if self.reduces_every_micro_batch else 1,
            gathered_bytes=gathered_bytes,
            reduced_bytes=sum(piece.reduced_bytes for piece in trained),
            num_shards=self.num_shards,
            gathered_again_over=unit.gathered_again_over,
            num_replicas=self.num_replicas,
            shared_update_bytes=kept_bytes if self.shards_update_over_replicas and trained else 0,
        )

    def _pieces(self) -> Iterable[PiecePlan]:
        return (piece for unit in self.units for piece in unit.pieces)
