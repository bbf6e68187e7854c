"""Contiguous memory for gradients, and where something is sharded for parameters: collectives work in place on it.

A `ParamAndGradBuffer` has the parameters of one dtype, device and gradient dtype, in reverse order of construction,
which is roughly the order in which backward finishes their gradients. Each of its `Bucket`s is reduced by one
collective, and gathered by one. Nothing here decides when.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ...base.host_memory import ReusedMemory, transient_memory
from ...comm import collectives, streams
from ...comm.collectives import Allocate
from ..plan import PieceKind, PiecePlan, Plan
from .grad_slot import GradSlot

_KEPT_GRADS = 2
"""Whole gradients kept per size, where units are reduced in turn: one is filled while the other is reduced."""


class ParamAndGradBuffer:
    """Owns the flat memory that a buffer of the plan asks for, as long as the wrapper exists.

    Args:
        sharding: the plan of the model: which ranks cut the buffer, and this rank's part.
        buckets: the buffer's pieces of the plan, which are of one kind.
        params: the model's parameters, by name. Those of `param_data` are moved into it; their old memory is freed
            unless something else refers to it.
        allocate: allocates whole gradients, where buckets release theirs.

    Attributes:
        plan: what all buckets have in common, `PieceKind`.
        param_dtype: dtype of `param_data`, or of `shards`.
        grad_dtype: dtype of whole gradients, in which they are reduced.
        params: in the order of their places.
        numel: elements of all buckets, padding included.
        device: the device that the model computes on; has `param_data` and whole gradients.
        shard_device: the device of `shards` and separate shards of gradients; the CPU if they are offloaded.
        shard_group: the ranks that cut it.
        num_grad_shards, grad_shard_index: equal parts that each bucket is cut into, and the one whose reduced gradient
            this rank keeps.
        param_data: `[numel]`, whole parameters, which are views of it (ZeRO-1 and ZeRO-2); else None.
        shards: `[numel / num_shards]`, this rank's shards of the parameters of all buckets, one after the other
            (ZeRO-3); else None. A single tensor, so that its version counts every write to a shard.
        grad_data: `[numel]`; every bucket's ``grad_data`` is a view of it. None where buckets allocate and release
            theirs, and where parameters are frozen.
        grad_memory: memory of whole gradients that buckets release, or set aside in a tree of micro-batches.
        buckets: in the order in which backward is expected to finish them.
    """

    def __init__(
        self,
        sharding: Plan,
        buckets: Sequence[PiecePlan],
        params: Mapping[str, nn.Parameter],
        allocate: Allocate = transient_memory,
    ) -> None:
        plan: PieceKind = buckets[0]
        self.plan, self.param_dtype, self.grad_dtype = plan, plan.param_dtype, plan.grad_dtype
        sharding = sharding.over_ranks_of(plan.holds_experts)
        self.shard_group = sharding.groups.shard
        self.params = [params[param.name] for bucket in buckets for param in bucket.params]
        self.numel = buckets[-1].layout.end
        self.device = self.shard_device = self.params[0].device
        self._pins_memory = False  # pinned, so that copies between host and device overlap with computation
        self.num_grad_shards, self.grad_shard_index = sharding.num_updated_parts, sharding.updated_part
        self._num_param_shards = sharding.num_shards
        self.param_data: Tensor | None = None
        self.shards: Tensor | None = None
        self.grad_data: Tensor | None = None
        if plan.holds_params and not sharding.shards_parameters:
            self.param_data = torch.empty(self.numel, dtype=plan.param_dtype, device=self.device)
        if plan.is_trained and not plan.releases_grads:
            self.grad_data = torch.zeros(self.numel, dtype=plan.grad_dtype, device=self.device)
        reused = Counter[int]()
        if sharding.shards_parameters:
            self.shard_device = torch.device("cpu") if sharding.cpu_offload else self.device
            self._pins_memory = sharding.pins_memory
            self.shards = self.zeros_for_shards(self.numel // sharding.num_shards, plan.param_dtype)
            reused.update(bucket.elements for bucket in buckets)
        self.grad_memory = ReusedMemory(
            plan.grad_dtype,
            self.device,
            most_kept={size: _KEPT_GRADS for size, count in reused.items() if count > 1},
            allocate=allocate,
        )
        self.buckets = [Bucket(self, bucket, params) for bucket in buckets]

    @property
    def param_index_map(self) -> dict[nn.Parameter, tuple[int, int, int]]:
        """``(start, end, number of the bucket)`` of each parameter in the buffer, by Megatron-LM's name."""
        return {
            param: (bucket.offset + start, bucket.offset + end, number)
            for number, bucket in enumerate(self.buckets)
            for param, (start, end) in bucket.param_to_index.items()
        }

    def zeros_for_shards(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocates `[numel]` on the device of shards."""
        if self._pins_memory:
            return streams.pinned([numel], dtype).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.shard_device)

    def cut_params(self, bucket: PiecePlan) -> tuple[Tensor, Tensor]:
        """Returns a bucket's whole parameters and this rank's shard of them, both empty where there are none here.

        The whole parameters of a buffer of shards are the shard itself, until a unit gathers the bucket elsewhere.
        """
        start, end = bucket.layout.start, bucket.layout.end
        if self.shards is not None:
            shard = self.shards[start // self._num_param_shards : end // self._num_param_shards]
            return shard, shard
        if self.param_data is None:
            return torch.empty(0), torch.empty(0)
        whole = self.param_data[start:end]
        return whole, whole.chunk(self.num_grad_shards)[self.grad_shard_index]


class Bucket:
    """The places of some parameters and their gradients in a flat buffer, which is cut evenly over ranks there.

    One collective reduces the gradients, and one gathers the values. The thread that runs a backward stores gradients,
    the main thread clears them between steps. While a collective runs in a lane, the lane's thread or stream reads and
    writes `grad_data`, `param_data` and the shards.

    Attributes:
        buffer: owns `param_data` or the shards, and `grad_data` unless `releases_grads`.
        slots: each parameter and the place of its gradient, in the order of the places; fixed.
        offset: the bucket's first element in the buffer.
        numel: number of elements, padding included; a multiple of the number of shards.
        param_data: `[numel]`, the memory that parameters are views of; empty where they keep their own. A view of the
            buffer's ``param_data``; under ZeRO-3 memory of its unit's slot, in the dtype of computation, set by
            the unit when it gets a slot, or `local_param_shard` itself if a single rank has all in that dtype.
        local_param_shard: `[numel / shards]`, this rank's part of the parameters, which its optimizer updates; fixed.
        grad_data: `[numel]`, whole gradients. Without `releases_grads` a view of the buffer's ``grad_data``; fixed.
            With `releases_grads` memory of the bucket: allocated for the first gradient of a step or to send the
            bucket, dropped by `release_grads`, None in between.
        separate_shard: `[numel / shards]`, memory of `local_grad_shard` with `releases_grads`. Allocated when it is
            first asked for in a step; dropped by `clear_grads`, and by `BucketSums`, which then owns it.
    """

    def __init__(self, buffer: ParamAndGradBuffer, plan: PiecePlan, params: Mapping[str, nn.Parameter]) -> None:
        self.buffer, self.offset, self.numel = buffer, plan.layout.start, plan.elements
        self.slots = tuple(
            GradSlot(
                params[param.name],
                param.name,
                start,
                end,
                buffer.grad_dtype,
                self._allocate_grads,
                accumulates_in_fp32=param.accumulates_in_fp32,
            )
            for param, (start, end) in zip(plan.params, plan.layout.ranges, strict=True)
        )
        self._slot_of = {slot.param: slot for slot in self.slots}
        first, last = self.slots[0].name, self.slots[-1].name
        self.name = f"bucket {first}" + (f" to {last}" if last != first else "")
        ends = [0, *(slot.end for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.numel]
        # Padding, ``[start, end)`` in the bucket.
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
        # ``[start, end)`` in `local_grad_shard` of what this rank keeps of each gradient; fixed.
        self._place_in_shard = dict(zip(self._slot_of, plan.places_in_shard(buffer.grad_shard_index), strict=True))
        self.param_data, self.local_param_shard = buffer.cut_params(plan)
        self.grad_data: Tensor | None = None
        self.separate_shard: Tensor | None = None
        if buffer.param_data is not None:
            self._adopt_values()
        if buffer.grad_data is not None:
            self._hold_grads(buffer.grad_data[plan.layout.start : plan.layout.end])
            for slot in self.slots:
                slot.note_zeros()

    # ---- places

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters, in the order of their places."""
        return list(self._slot_of)

    @property
    def param_to_index(self) -> dict[nn.Parameter, tuple[int, int]]:
        """Each parameter's elements, ``[start, end)``, counted from the beginning of the bucket."""
        return {slot.param: (slot.start, slot.end) for slot in self.slots}

    def slot_of(self, param: nn.Parameter) -> GradSlot:
        """Returns the place of a parameter's gradient."""
        return self._slot_of[param]

    def zero_padding(self, data: Tensor) -> None:
        """Zeros the gaps between parameters in `data` `[numel]`, so that they change no sum, norm or update."""
        if self._gaps:
            torch._foreach_zero_([data[start:end] for start, end in self._gaps])

    # ---- parameters

    def _adopt_values(self) -> None:
        """Moves parameters one at a time, so that no second copy of the model exists at any moment."""
        self.zero_padding(self.param_data)
        for slot in self.slots:
            view = slot.view_of(self.param_data)
            view.copy_(slot.param.detach())
            slot.param.data = view

    def place_params(self, memory: Tensor, skip: Callable[[Tensor], bool] | None = None) -> None:
        """Makes the parameters views of `memory` `[numel]`, except those for which `skip` is true."""
        for slot in self.slots:
            if skip is None or not skip(slot.param):
                slot.param.data = slot.view_of(memory)

    def gather_params(self, into: Tensor, what: str) -> None:
        """All-gathers the shards into `into` `[numel]`, cast to the dtype of `into`."""
        group = self.buffer.shard_group
        own, is_alone = self.local_param_shard, collectives.is_alone(group)
        if (own.dtype, own.device) != (into.dtype, into.device) or is_alone:
            own = into.chunk(group.size())[group.rank()].copy_(own, non_blocking=True)  # a cast takes no memory there
        if not is_alone:
            collectives.all_gather(into, own, group, what=what)

    def local_ranges(self) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
        """Yields for each parameter: the parameter, this rank's elements of it (flat), and the first one's index."""
        length = self.local_param_shard.numel()
        begin = length * self.buffer.shard_group.rank()
        for slot in self.slots:
            first, last = max(slot.start, begin), min(slot.end, begin + length)
            if first < last:
                yield slot.param, self.local_param_shard[first - begin : last - begin], first - slot.start
            else:
                yield slot.param, self.local_param_shard[:0], 0

    # ---- gradients

    @property
    def releases_grads(self) -> bool:
        """Whether whole gradients are freed once they are reduced (ZeRO-2)."""
        return self.buffer.grad_data is None

    @property
    def local_grad_shard(self) -> Tensor:
        """`[numel / shards]`, this rank's part of the reduced gradient.

        A part of `grad_data`. Where whole gradients are released, it is `separate_shard`, which is allocated at the
        first access after `clear_grads`: until the reduction the whole gradient is enough.
        """
        buffer = self.buffer
        if not self.releases_grads:
            return self._held_grads().chunk(buffer.num_grad_shards)[buffer.grad_shard_index]
        if self.separate_shard is None:
            length = self.numel // buffer.num_grad_shards
            self.separate_shard = buffer.zeros_for_shards(length, buffer.plan.shard_grad_dtype)
        return self.separate_shard

    def local_grad(self, param: nn.Parameter) -> Tensor:
        """Returns this rank's part of a parameter's reduced gradient, flat; it may be empty."""
        start, end = self._place_in_shard[param]
        return self.local_grad_shard[start:end]

    @property
    def accumulators(self) -> list[Tensor]:
        """The ``main_grad`` of parameters whose gradients accumulate in fp32, as far as they are allocated."""
        return [slot.accumulator for slot in self.slots if slot.accumulator is not None]

    def release_grads(self) -> None:
        """Drops the whole gradient. A reduction that still reads it keeps the memory until it has finished."""
        self.grad_data = None
        for slot in self.slots:
            slot.release()

    def _allocate_grads(self) -> None:
        data = self.buffer.grad_memory.take(self.numel)
        self.zero_padding(data)
        self._hold_grads(data)

    def _hold_grads(self, data: Tensor) -> None:
        self.grad_data = data
        for slot in self.slots:
            slot.hold(data)

    def _held_grads(self) -> Tensor:
        if self.grad_data is None:
            raise RuntimeError("the gradients of this bucket are not allocated")
        return self.grad_data

    def clear_grads(self) -> None:
        """Makes every gradient zero without touching its memory: ``main_grad`` is None until one arrives."""
        if self.releases_grads:
            self.release_grads()
        self.separate_shard = None
        for slot in self.slots:
            slot.clear()
        self.prepare_for_layers()

    def prepare_for_layers(self) -> None:
        """Zeros ``main_grad`` for layers that add into it themselves."""
        for slot in self.slots:
            slot.prepare_for_layer()

    def complete_grads(self) -> Tensor:
        """Returns the whole gradient `[numel]`, with zeros where no gradient has arrived; sets every ``main_grad``."""
        for slot in self.slots:
            slot.complete()
        return self._held_grads()
