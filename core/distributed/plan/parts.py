"""The parts of a plan, as data: units, their pieces and parameters, and what these keep and send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...comm.message_formats import message_bytes
from ..distributed_data_parallel_config import ActivationCheckpointing
from ..groups import ParameterKind
from .layout import BucketLayout

NO_CASTS = MixedPrecisionPolicy()
_NO_LAYOUT = BucketLayout(0, 0, (), ())


@dataclass(frozen=True, kw_only=True)
class ParamPlan:
    """One parameter. Sizes and elements are those of this rank's part under tensor parallelism."""

    names: tuple[str, ...]
    """All names in the model. A tied parameter has several."""
    places: tuple[int, ...]
    """Index of each name in the model's list of parameter names, which is roughly the order of execution."""
    shape: tuple[int, ...]
    accumulates_in_fp32: bool = False
    """The gradient accumulates over micro-batches in a separate fp32 tensor."""
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


def bounds_by_rows(shape: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Returns where `torch.chunk` cuts the first dimension of a parameter: see `ParamPlan.bounds`."""
    rows = shape[0] if shape else 1
    row, chunk = math.prod(shape[1:]), -(-rows // num_parts)
    return tuple(min(part * chunk, rows) * row for part in range(num_parts + 1))


@dataclass(frozen=True, kw_only=True)
class PieceKind:
    """What the parameters of one piece, and of all pieces of a flat buffer, have in common."""

    is_trained: bool
    """False if the parameters are frozen and have no gradients."""
    kind: ParameterKind = "dense"
    """Decides the ranks that share its parameters."""
    param_dtype: torch.dtype
    """Dtype of the parameters that a rank keeps and its optimizer updates."""
    gathered_dtype: torch.dtype
    """Dtype of gathered parameters, in which the model computes. Differs from `param_dtype` if they are cast."""
    grad_dtype: torch.dtype
    """Dtype in which gradients are accumulated and reduced."""
    shard_grad_dtype: torch.dtype
    """Dtype of the reduced gradient that a rank keeps. May be wider than `grad_dtype` if whole gradients are freed."""
    device: torch.device
    num_param_shards: int = 1
    """Number of ranks that share each parameter, 1 where every rank keeps whole ones."""
    holds_params: bool = True
    """Parameters have the piece's padding, as views of a buffer have. Otherwise only gradients have it."""
    releases_grads: bool = True
    """A whole gradient is allocated when a gradient arrives, and freed when it is reduced."""
    param_format: str | None = None
    """Format in which parameters are gathered (`MessageFormat`), None for `gathered_dtype`."""
    grad_format: str | None = None
    """Format in which gradients are reduced, None for `grad_dtype`."""


@dataclass(frozen=True, kw_only=True)
class PiecePlan(PieceKind):
    """Parameters of one kind: one message reduces their gradients, and one gathers them.

    A bucket of a flat buffer, a unit's part of a buffer, or the parameters of one dtype in a unit of FSDP2.
    """

    params: tuple[ParamPlan, ...]
    bucket: tuple[int, int] | None = None
    """Index of the flat buffer, and of this piece in it. None if torch has the memory, or nothing moves.
    Pieces of one kind share a buffer, in the order in which backward is expected to finish them."""
    layout: BucketLayout = _NO_LAYOUT
    """Layout of the piece in the flat buffer. Empty if it is in none."""

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def place(self) -> int:
        """The place of the first parameter, as in `ParamPlan.places`."""
        return min(param.places[0] for param in self.params)

    @property
    def elements(self) -> int:
        """Number of elements, padding included."""
        if self.bucket is not None:
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
    def sent_param_bytes(self) -> int:
        """Bytes of the whole parameters, as they travel."""
        return message_bytes(self.param_format, self.elements, self.gathered_dtype)

    @property
    def sent_grad_bytes(self) -> int:
        """Bytes of the whole gradients, as they travel."""
        return message_bytes(self.grad_format, self.elements, self.grad_dtype) if self.is_trained else 0

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
        if self.releases_grads:
            return frozenset({self.shard_grad_dtype})
        return frozenset({self.grad_dtype, *(torch.float32 for p in self.params if p.accumulates_in_fp32)})

    def places_in_shard(self, shard: int) -> tuple[tuple[int, int], ...]:
        """Returns each parameter's elements in a shard, ``[start, end)``, counted from the shard's beginning."""
        first = self.elements // self.params[0].num_parts * shard
        places = []
        for param, (begin, _) in zip(self.params, self.layout.ranges, strict=True):
            start, end = (begin + bound - first for bound in param.bounds[shard : shard + 2])
            places.append((start, end) if start < end else (0, 0))
        return tuple(places)


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Parameters that are gathered and reduced together: of modules, or a bucket of parameters that are always whole.

    The last unit of a plan is the model, with the parameters that are in no unit before it.
    """

    modules: tuple[nn.Module, ...] = ()
    """Usually one module. The unit's parameters are whole while one of them runs. A bucket has none."""
    names: tuple[str, ...] = ()
    """Name of each module in the model. The name of the model itself is empty."""
    is_minority: bool = False
    """Split off from another unit, or the model, because of its dtype."""
    pieces: tuple[PiecePlan, ...] = ()
    """The unit's parameters, except those of units before it."""
    precision: MixedPrecisionPolicy = NO_CASTS
    """Dtypes of the modules. Units cast their inputs. Only the model casts outputs."""
    is_gathered: bool = False
    """The unit's parameters are gathered before use. Otherwise they are always whole."""
    slot: int | None = None
    """Index of the slot that the unit is gathered into. Units of equal size take turns with a slot. None if a single
    rank has all parameters, or torch has the memory."""
    is_freed: bool = False
    """Gathered parameters are freed after forward, or may be: another unit may be gathered into its slot."""
    kept_among: int | None = None
    """Number of neighbouring ranks that together keep the whole unit between forward and backward, and gather it from
    each other. None for one or all."""
    is_needed_in_backward: bool = True
    """False if the unit's backward reads no weight, as in an embedding: the unit is gathered only once."""
    stays_whole: bool = True
    """Each rank keeps the whole unit between forward and backward."""
    gathered_again_over: int = 0
    """Number of ranks among which backward gathers the unit again, 0 if it is whole, or no backward reads it."""
    is_kept: bool = False
    """The unit stays gathered from one micro-batch of a step to the next, if it is gathered when one ends."""

    @property
    def params(self) -> tuple[ParamPlan, ...]:
        return tuple(param for piece in self.pieces for param in piece.params)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the parameters that this rank always keeps."""
        return sum(piece.kept_bytes for piece in self.pieces)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters."""
        return sum(piece.gathered_bytes for piece in self.pieces)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of this rank's gradients after the reduction."""
        return sum(piece.gradient_bytes for piece in self.pieces)

    @property
    def kind(self) -> ParameterKind:
        """The kind of the unit's parameters, ``dense`` if the unit has several."""
        kinds = {piece.kind for piece in self.pieces}
        return kinds.pop() if len(kinds) == 1 else "dense"


@dataclass(frozen=True, kw_only=True)
class UnitTransform:
    """Recomputation and compilation of a unit's modules, applied before the model is wrapped, and where it saves."""

    modules: tuple[nn.Module, ...]
    recomputes: ActivationCheckpointing
    is_compiled: bool
    offloads: bool = False
    """Activations that its forward saves are in host memory until backward is near."""


Kind = Literal["all-gather", "reduce-scatter", "all-reduce"]


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and size that a unit starts in a step."""

    kind: Kind
    calls: int
    nbytes: int
    """Bytes of the whole tensor of one call: the output of an all-gather, the input of a reduction."""
    ranks: int

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in all calls."""
        return sent_bytes(self.kind, self.calls * self.nbytes, self.ranks)


def sent_bytes(kind: str, nbytes: int, ranks: int) -> int:
    """Returns the bytes that a rank sends in a collective, with an algorithm that sends nothing twice, such as a ring.

    ``(n - 1) / n`` of the whole tensor to gather, scatter or exchange it, and twice that to all-reduce it.
    """
    passes = 2 if kind == "all-reduce" else 1
    return passes * nbytes * (ranks - 1) // ranks
