"""One bucket of a flat buffer: the memory of its gradients, and their way through a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...base.errors import ShardstackError
from ...comm import collectives, streams
from ...comm.lane import Handle
from ..engine.gradient_tree import PartialSums
from ..engine.gradients import BucketReduction
from ..plan import PiecePlan
from .buffer import FlatBuffer, PlacedParams, zero_padding
from .grad_slot import GradSlot


class BucketMemory:
    """The gradients of one bucket in memory: whole ones, this rank's shard, and sums of earlier micro-batches.

    Attributes:
        buffer: owns `whole` unless `releases`.
        releases: whether whole gradients are freed once they are reduced (ZeRO-2); fixed.
        slots: each parameter and its place, in the order of the places; fixed.
        whole: `[numel]`, the whole gradients, or None where they are released and not allocated.
        separate_shard: `[numel / shards]`, memory of `shard` with `releases`, or None.
        sums: sums of earlier micro-batches, with a tree: of whole gradients or shards.
    """

    def __init__(self, buffer: FlatBuffer, plan: PiecePlan, params: Mapping[str, nn.Parameter]) -> None:
        self.buffer, self._plan, self.releases = buffer, plan, buffer.grad_data is None
        rank = buffer.plan.shard_index
        self.slots = [
            GradSlot(
                params[of.name],
                of.name,
                *place,
                plan.grad_dtype,
                self._allocate,
                accumulates_in_fp32=of.accumulates_in_fp32,
                kept=kept,
                first=of.bounds[rank] if kept[0] < kept[1] else 0,
            )
            for of, place, kept in zip(plan.params, plan.layout.ranges, plan.places_in_shard(rank), strict=True)
        ]
        # Without `releases` a view of the buffer's ``grad_data``; fixed. With it memory of the bucket, on the thread
        # that runs backward: allocated for the first gradient of a step or to send the bucket, dropped by `release`. A
        # reduction in the lane keeps it alive until it ends.
        self.whole: Tensor | None = None
        # Owned by the bucket. `shard` allocates it when first asked for in a step, and the lane writes it until
        # `Bucket.wait_for_shard` returns. `clear` drops it, and `set_aside`, which gives it to the sums.
        self.separate_shard: Tensor | None = None
        # The whole gradient that a reduction reads, where the buffer reuses such memory. `Bucket.start_grad_sync` sets
        # it; `Bucket.wait_for_grads` returns it to the buffer. Otherwise only the reduction holds it.
        self.sent: Tensor | None = None
        # `set_aside` adds them when a backward begins, on its thread; `add_sums` takes them out at a step's end, and
        # `clear` drops them.
        self.sums = PartialSums()
        # This rank's part of `whole`, unless that is released; fixed.
        self._part: Tensor | None = None
        # The parts of `shard` that `shard_of` was asked for. Dropped with `separate_shard`.
        self._parts_of_shard: dict[GradSlot, Tensor] = {}
        if buffer.grad_data is not None:
            self._hold(buffer.grad_data[plan.layout.start : plan.layout.end])
            self._part = self.whole.chunk(buffer.plan.num_shards)[rank]  # type: ignore[attr-defined]
            for slot in self.slots:
                slot.zero(writes=False)

    @property
    def shard(self) -> Tensor:
        """`[numel / shards]`, this rank's part of the reduced gradient.

        A part of `whole`. With `releases` it is `separate_shard`, allocated at the first access in a step.
        """
        if self._part is not None:
            return self._part
        if self.separate_shard is None:
            length, dtype = self._plan.elements // self.buffer.plan.num_shards, self.buffer.kind.shard_grad_dtype
            self.separate_shard = self.buffer.zeros_for_shards(length, dtype)
        return self.separate_shard

    def shard_of(self, slot: GradSlot) -> Tensor:
        """Returns the part of `shard` that is of one parameter."""
        part = self._parts_of_shard.get(slot)
        if part is None:
            part = self._parts_of_shard[slot] = self.shard[slice(*slot.kept)]
        return part

    def _drop_shard(self) -> None:
        if self.separate_shard is not None:
            self.separate_shard = None
            self._parts_of_shard.clear()

    @property
    def accumulators(self) -> list[Tensor]:
        """The ``main_grad`` of parameters whose gradients accumulate in fp32, as far as they are allocated."""
        return [slot.accumulator for slot in self.slots if slot.accumulator is not None]

    def _allocate(self) -> None:
        data = self.buffer.grad_memory.take(self._plan.elements)
        zero_padding(data, self._plan.layout)
        self._hold(data)

    def _hold(self, data: Tensor) -> None:
        self.whole = data
        for slot in self.slots:
            slot.hold(data)

    def release(self) -> None:
        """Drops the whole gradient. A reduction that still reads it keeps the memory until it has finished."""
        self.whole = None
        for slot in self.slots:
            slot.release()

    def complete(self) -> Tensor:
        """Returns the whole gradient `[numel]`, with zeros where no gradient has arrived. Sets every ``main_grad``."""
        for slot in self.slots:
            slot.borrower = None
            if slot.accumulates_in_fp32 or not slot.counts:
                slot.complete()
        return self.whole  # type: ignore[return-value]

    def take_reduced(self) -> None:
        """Copies reduced gradients into every ``main_grad`` that is not a view of `whole`."""
        for slot in self.slots:
            if slot.accumulator is not None and slot.view is not None:
                slot.accumulator.copy_(slot.view)

    def zero_for_layers(self) -> None:
        """Zeros ``main_grad`` for layers that add into it themselves."""
        for slot in self.slots:
            if slot.is_written_by_layer:
                slot.zero()

    def clear(self) -> None:
        """Makes every gradient zero, before the first backward of a step."""
        self.sums.clear()
        self._drop_shard()
        if self.releases:
            self.whole = None
        for slot in self.slots:
            if self.releases and (slot.view is not None or slot.accumulator is not None):
                slot.release()
            slot.clear()
        self.zero_for_layers()

    def set_aside(self, additions: int, *, is_shard: bool) -> None:
        """Moves the sum that accumulates in place, whole or of this rank's shard, behind the sums before it.

        Args:
            additions: number of newest sums that it is added to, as in `PartialSums.set_aside`.
        """
        if is_shard:
            self.sums.set_aside(self.shard, additions)
            self._drop_shard()
            return
        whole, memory, in_use = self.complete(), self.buffer.grad_memory, None
        if self.releases:
            self.release()
        else:
            for slot in self.slots:
                slot.restart()
            in_use = whole
            if not additions:
                whole = memory.take(len(whole)).copy_(whole)
        for free in self.sums.set_aside(whole, additions):
            if free is not in_use:
                memory.give_back(free)

    @torch.no_grad()
    def add_sums(self, last: Tensor) -> None:
        """Adds the earlier sums to the last one of a step, in place: to whole gradients, or to the shard."""
        set_aside = self.sums.tensors
        self.sums.added_to(last)
        if last is self.whole:
            for free in set_aside:
                self.buffer.grad_memory.give_back(free)

    def held(self) -> list[Tensor]:
        """Returns the memory of gradients that the bucket has at this moment."""
        own = (self.whole, self.sent, self.separate_shard, *self.accumulators, *self.sums.tensors)
        return [tensor for tensor in own if tensor is not None]


class Bucket(PlacedParams):
    """Parameters whose gradients are next to each other in a flat buffer, and reduced together.

    A backward adds gradients (`add_gradient`, `note_grad_ready`), `start_grad_sync` sends them by one collective, and
    after `finish_grad_sync` this rank's shard is global. It also has Megatron-LM's interface of a bucket group.

    The thread that runs a backward stores gradients, the main thread clears them between steps. While a collective
    runs in a lane, the lane's thread or stream reads and writes the gradients, `param_data` and the shards.

    Args:
        params: the model's parameters, by name.
        reduction: over which ranks, in which lane and order gradients are reduced.

    Attributes:
        grads: the memory of the gradients.
        tree: the order of additions over micro-batches, where there is one.
        has_left: whether the gradients were sent, and no further micro-batch is being added to them.
    """

    def __init__(
        self, buffer: FlatBuffer, plan: PiecePlan, params: Mapping[str, nn.Parameter], reduction: BucketReduction
    ) -> None:
        self.grads = BucketMemory(buffer, plan, params)
        super().__init__(buffer, plan, self.grads.slots)
        # Buckets over the same ranks share a reduction, and all of a wrapper a lane and a tree.
        self._reduction, self._lane, self.tree = reduction, reduction.lane, reduction.tree
        self._reduces_each = reduction.plan.settings.reduce_every_micro_batch
        if self.tree is not None and plan.is_trained:
            self.tree.register(self._set_aside)
        # Places whose gradient the running backward has finished. `note_grad_ready` adds; `start_grad_sync` and
        # `clear_grads` clear.
        self._ready: set[GradSlot] = set()
        # How many `_ready` waits for: those of trainable parameters, counted at the bucket's first gradient of each
        # backward, because users freeze and thaw parameters between them.
        self._num_awaited = len(self.slots)
        # A reduction in the lane: set by `start_grad_sync`, cleared by `wait_for_grads`.
        self._grad_handle: Handle | None = None
        # `start_grad_sync` sets it. `clear_grads` and `open_again` clear it on the main thread between backwards, and
        # where each micro-batch is reduced the schedule, on autograd's thread.
        self.has_left = False
        # Whether the shard has gradients of this step, not of an earlier one. `start_grad_sync` sets it, until
        # gradients are cleared or opened again.
        self.has_reduced = False
        # Whether the whole gradient is global, not this rank's shard of it alone. `gather_grads` sets it, until the
        # bucket is sent again or cleared.
        self.is_whole = False

    # ---- Megatron-LM's names

    @property
    def grad_data(self) -> Tensor | None:
        """The whole gradients `[numel]`, if they are allocated."""
        return self.grads.whole

    @property
    def buckets(self) -> list[Bucket]:
        """The bucket, in the list of Megatron-LM's bucket group."""
        return [self]

    # ---- a step

    def _set_aside(self, additions: int | None, reduces: bool) -> None:
        if additions is not None:
            if self._reduces_each:
                self.wait_for_shard()
            self.grads.set_aside(additions, is_shard=self._reduces_each)

    def lend(self, slot: GradSlot) -> Tensor | None:
        """Lends memory to compute a parameter's gradient in (`GradSlot.lend`), or None if it comes too late."""
        if self.tree is not None:
            self.tree.enter()
        return slot.lend() if not self.has_left or self._reduces_each else None

    def add_gradient(self, slot: GradSlot, gradient: Tensor | None) -> bool:
        """Adds a gradient. None records that a layer has added it itself.

        Returns:
            False for a gradient that comes after the bucket was sent: it is dropped, because it can no longer be
            reduced with the bucket.

        Raises:
            ShardstackError: a layer has added its gradient to a sum of other micro-batches, in a tree.
        """
        if self.tree is not None:
            self.tree.enter()
        slot.check_size()
        if slot.borrower is not None:
            slot.take_back()
        if self.has_left and not self._reduces_each:
            return False
        self.has_left = False
        if gradient is not None:
            slot.add(gradient)
        elif self.tree is None:
            slot.note_written_by_layer()
        else:
            raise ShardstackError(
                f"a layer added the gradient of parameter {slot.name} into main_grad itself, rounding it with the "
                "sum that is there; for reproducible_across_ranks let it return the gradient "
                "(gradient_accumulation_fusion=False)"
            )
        return True

    def note_grad_ready(self, slot: GradSlot) -> None:
        """Notes that this backward has finished the gradient of a place."""
        if not self._ready:
            self._num_awaited = len([slot for slot in self.slots if slot.param.requires_grad])
        self._ready.add(slot)

    @property
    def is_complete(self) -> bool:
        """Whether this backward has finished the gradients of all parameters that are trainable now."""
        if not self._ready:
            return not any(slot.param.requires_grad for slot in self.slots)
        return len(self._ready) >= self._num_awaited

    def open_again(self, without_gradient: Sequence[GradSlot]) -> None:
        """Lets a backward add to reduced gradients, which start from zero for the slots `without_gradient`."""
        if len(without_gradient) == len(self.slots):
            self.clear_grads()
            return
        self.has_left = self.has_reduced = False
        for slot in without_gradient:
            slot.zero()

    def start_grad_sync(self, *, inspects: bool = True) -> None:
        """Sends the bucket's gradient, complete or not, with zeros for gradients that have not arrived.

        Args:
            inspects: False for gradients that will be dropped.
        """
        self.wait_for_grads()
        grads, whole = self.grads, self.grads.complete()
        if inspects:
            if not self._reduces_each:
                grads.add_sums(whole)
            self._reduction.inspect((slot.name, slot.view) for slot in self.slots)  # type: ignore[misc]
        if grads.releases:
            grads.release()
            grads.sent = whole if self.buffer.grad_memory.keeps(whole.numel()) else None
        adds = grads.separate_shard is not None
        what = f"the gradients of {self.name}"
        run = partial(self._reduction.reduce, whole, grads.shard, adds, what, self.grad_format)
        del whole  # from here on only the reduction holds it
        if self._reduction.plan.settings.overlap_grad_reduce:
            self._grad_handle = self._lane.submit(run)
        else:
            self._lane.run(run)
            self.wait_for_grads()
        self.has_left, self.has_reduced, self.is_whole = True, True, False
        self._ready.clear()

    def wait_for_grads(self) -> None:
        """Waits for a running reduction, and returns the memory that it has read."""
        handle, sent = self._grad_handle, self.grads.sent
        self._grad_handle = self.grads.sent = None
        if handle is not None:
            handle.wait()
        if sent is not None:
            # The lane is done, so the next user of this memory runs after the reduction, on CUDA too: the current
            # stream waits for the lane's.
            self.buffer.grad_memory.give_back(sent)

    def wait_for_shard(self) -> None:
        """Waits for a running reduction, and on the host for the copy of an offloaded shard to it."""
        self.wait_for_grads()
        shard = self.grads.separate_shard
        if shard is not None and shard.device != self.buffer.device:
            streams.current_stream().synchronize()

    def abandon_reduction(self) -> None:
        """Waits for a running reduction whose gradients are dropped. If it fails, warns."""
        try:
            self.wait_for_grads()
        except Exception as error:
            warnings.warn(f"the gradients of {self.name} are dropped; their reduction failed: {error}", stacklevel=2)

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Makes this rank's shard of the gradient global, or with `force_all_reduce` the whole gradient."""
        if not self.has_left:
            self.start_grad_sync()
        self.wait_for_shard()
        if self._reduces_each:
            self.grads.add_sums(self.grads.shard)
        if force_all_reduce:
            self.gather_grads()
        self.grads.take_reduced()

    def gather_grads(self) -> None:
        """Makes the whole gradient global, once this rank's shard is final."""
        group, whole = self._reduction.shard_group, self.grads.whole
        if group is not None and whole is not None:
            gather = partial(collectives.all_gather, whole, self.grads.shard, group)
            self._lane.run(partial(gather, what=f"the gradients of {self.name}"))
            self.is_whole = True
            self.grads.take_reduced()

    def clear_grads(self) -> None:
        """Makes every gradient zero, before the first backward of a step."""
        self.abandon_reduction()
        self._ready.clear()
        self.has_left = self.has_reduced = self.is_whole = False
        self.grads.clear()
