"""Contiguous memory for gradients, and where something is sharded for parameters. Collectives work in place on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ...base.host_memory import AS_HOST_MEMORY, ReusedMemory, transient_memory
from ...comm import collectives, streams
from ...comm.collectives import Allocate
from ...comm.message_formats import format_of_all
from ..plan import PieceKind, PiecePlan, Plan
from ..plan.layout import BucketLayout
from .grad_slot import GradSlot

_KEPT_GRADS = 2
"""Whole gradients kept per size, where units are reduced in turn: one is filled while the other is reduced."""


class FlatBuffer:
    """Owns the flat memory that a buffer of the plan asks for, as long as the wrapper exists.

    It has the parameters of one dtype, device and gradient dtype, in reverse order of construction, which is roughly
    the order in which backward finishes their gradients. Each of its `Bucket`s is reduced by one collective, and
    gathered by one. Nothing here decides when.

    Args:
        plan: the model's plan: which ranks cut the buffer, and this rank's part.
        buckets: the buffer's pieces of the plan, which are of one kind.
        device: that the model computes on.
        allocate: allocates whole gradients, where buckets release theirs.

    Attributes:
        kind: what all buckets have in common.
        numel: elements of all buckets, padding included.
        device: the device of `param_data` and whole gradients.
        shard_device: the device of `shards` and separate shards of gradients; the CPU if they are offloaded.
        plan: the model's plan, over the ranks that have the buffer's parameters.
        param_data: `[numel]`, whole parameters, which are views of it (ZeRO-1 and ZeRO-2); else None.
        shards: `[numel / num_shards]`, this rank's shards of the parameters of all buckets, one after the other
            (ZeRO-3); else None. A single tensor, so that its version counts every write to a shard.
        grad_data: `[numel]`; every bucket's ``grad_data`` is a view of it. None where buckets allocate and release
            theirs, and where parameters are frozen.
        grad_memory: memory of whole gradients that buckets release, or set aside in a tree of micro-batches.
    """

    def __init__(
        self, plan: Plan, buckets: Sequence[PiecePlan], device: torch.device, allocate: Allocate = transient_memory
    ) -> None:
        kind: PieceKind = buckets[0]
        self.kind, self.plan = kind, plan.over_ranks_of(kind.kind)
        self.numel, self.device = buckets[-1].layout.end, device
        self.shard_device = torch.device("cpu") if plan.settings.cpu_offload else device
        # The memory of whole parameters, of this rank's shards, and of gradients that are kept whole. The constructor
        # allocates what the plan holds; it lives as long as the buffer.
        self.param_data: Tensor | None = None
        self.shards: Tensor | None = None
        self.grad_data: Tensor | None = None
        if kind.holds_params and not plan.shards_parameters:
            self.param_data = torch.empty(self.numel, dtype=kind.param_dtype, device=device)
        if kind.is_trained and not kind.releases_grads:
            self.grad_data = torch.zeros(self.numel, dtype=kind.grad_dtype, device=device)
        reused = Counter[int]()
        if plan.shards_parameters:
            self.shards = self.zeros_for_shards(self.numel // self.plan.num_shards, kind.param_dtype)
            reused.update(bucket.elements for bucket in buckets)
        # Memory of gradients that buckets release. Buckets take and return it on the threads that run backward.
        most_kept = {size: _KEPT_GRADS for size, count in reused.items() if count > 1}
        self.grad_memory = ReusedMemory(kind.grad_dtype, device, most_kept=most_kept, allocate=allocate)

    def zeros_for_shards(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates `[numel]` on the device of shards."""
        if self.plan.settings.pins_memory:  # so that copies between host and device overlap with computation
            return streams.pinned([numel], dtype).zero_()
        shards = torch.zeros(numel, dtype=dtype, device=self.shard_device)
        return AS_HOST_MEMORY.value(shards) if self.plan.settings.cpu_offload else shards

    def cut_params(self, bucket: PiecePlan) -> tuple[Tensor, Tensor]:
        """Returns the whole parameters of a bucket and this rank's shard, both empty where the buffer has none.

        The whole parameters of a buffer of shards are the shard itself, until a unit gathers the bucket elsewhere.
        """
        start, end = bucket.layout.start, bucket.layout.end
        if self.shards is not None:
            shard = self.shards[start // self.plan.num_shards : end // self.plan.num_shards]
            return shard, shard
        if self.param_data is None:
            return torch.empty(0), torch.empty(0)
        whole = self.param_data[start:end]
        return whole, whole.chunk(self.plan.num_shards)[self.plan.shard_index]


def zero_padding(data: Tensor, layout: BucketLayout) -> None:
    """Zeros the gaps between parameters in a bucket's `data` `[numel]`, so that they change no sum, norm or update."""
    before, gaps = 0, []
    for start, end in (*layout.ranges, (len(data), 0)):
        if start > before:
            gaps.append(data[before:start])
        before = end
    if gaps:
        torch._foreach_zero_(gaps)


class PlacedParams:
    """Parameters of one bucket and their places in a flat buffer, which is cut evenly over ranks there.

    Parameters of a buffer with `param_data` are moved into it; their old memory is freed unless something else refers
    to it.

    Args:
        plan: the bucket's piece of the plan.
        slots: each parameter and its place, in the order of the places.

    Attributes:
        buffer: owns `param_data` or the shards.
        slots: the argument; fixed.
        offset: the bucket's first element in the buffer.
        numel: number of elements, padding included; a multiple of the number of shards.
        param_data: `[numel]`, the memory that parameters are views of; empty where they keep their own.
        local_param_shard: `[numel / shards]`, this rank's part of the parameters, which its optimizer updates; fixed.
        param_format, grad_format: of messages, as the plan has them; fixed.
    """

    def __init__(self, buffer: FlatBuffer, plan: PiecePlan, slots: Sequence[GradSlot]) -> None:
        self.buffer, self.offset, self.numel, self.slots = buffer, plan.layout.start, plan.elements, slots
        first, last = slots[0].name, slots[-1].name
        # In messages, and in the record of collectives.
        self.name = f"bucket {first}" + (f" to {last}" if last != first else "")
        # `param_data` is a view of the buffer's. Under ZeRO-3 it is `local_param_shard` itself if one rank has all,
        # else memory of the unit's slot, in the dtype of computation: the unit sets it when it gets a slot, and the
        # lane writes it during a gather.
        self.param_data, self.local_param_shard = buffer.cut_params(plan)
        self.param_format, self.grad_format = plan.param_format, plan.grad_format
        if buffer.param_data is not None:
            zero_padding(self.param_data, plan.layout)
            for slot in slots:  # one at a time, so that no second copy of the model exists at any moment
                view = slot.view_of(self.param_data)
                view.copy_(slot.param.detach())
                slot.param.data = view

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order of their places."""
        return [slot.param for slot in self.slots]

    params_list = params  # one of Megatron-LM's names, as the next two

    @property
    def numel_unpadded(self) -> int:
        """Number of elements up to the end of the last parameter."""
        return self.slots[-1].end

    @property
    def param_to_index(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Each parameter's elements, ``[start, end)``, counted from the beginning of the bucket."""
        return {slot.param: (slot.start, slot.end) for slot in self.slots}

    def place_params(self, memory: Tensor, skip: Callable[[Tensor], bool] | None = None) -> None:
        """Makes the parameters views of `memory` `[numel]`, except those for which `skip` is true."""
        for slot in self.slots:
            if skip is None or not skip(slot.param):
                slot.param.data = slot.view_of(memory)

    def gather_params(self, into: Tensor, what: str, *, sent_as: str | None = None) -> None:
        """All-gathers the shards into `into` `[numel]`, cast to the dtype of `into`.

        Args:
            sent_as: format in which they travel, and are then rounded on one rank too.
        """
        group = self.buffer.plan.groups.shard
        own, is_alone = self.local_param_shard, collectives.is_alone(group)
        if (own.dtype, own.device) != (into.dtype, into.device) or is_alone:
            own = into.chunk(group.size())[group.rank()].copy_(own, non_blocking=True)  # a cast takes no memory there
        if not is_alone or sent_as is not None:
            collectives.all_gather(into, own, group, format_of_all(sent_as, len(own), own.dtype), what=what)

    def local_ranges(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """Yields each parameter, this rank's elements, flat, and the index of the first of these elements."""
        for slot in self.slots:
            yield slot.param, self.local_param_shard[slice(*slot.kept)], slot.first
