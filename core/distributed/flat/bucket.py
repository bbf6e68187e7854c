"""One bucket of a flat buffer: the places of its gradients, and their way through a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...base.errors import ShardstackError
from ...comm import collectives, streams
from ...comm.lane import Handle
from ..engine.bucket_reduction import BucketReduction
from ..engine.gradient_tree import PartialSums
from ..plan import PiecePlan
from .buffer import FlatBuffer, PlacedParams
from .grad_slot import GradSlot


class Bucket(PlacedParams):
    """Parameters whose gradients are next to each other in a flat buffer, and reduced together.

    A backward adds gradients (`add_gradient`, `note_grad_ready`), `start_grad_sync` sends them by one collective, and
    after `finish_grad_sync` this rank's shard is global. It also has Megatron-LM's interface of a bucket group.

    The thread that runs a backward stores gradients, the main thread clears them between steps. While a collective
    runs in a lane, the lane's thread or stream reads and writes `grad_data`, `param_data` and the shards.

    Args:
        buffer: owns `grad_data` unless `releases_grads`.
        params: the model's parameters, by name.
        reduction: over which ranks, in which lane and order gradients are reduced.

    Attributes:
        tree: the order of additions over micro-batches, where there is one.
        grad_data: `[numel]`, whole gradients, or None where they are released and not allocated.
        separate_shard: `[numel / shards]`, memory of `local_grad_shard` with `releases_grads`, or None.
        has_left: whether the gradients were sent, and no further micro-batch is being added to them.
    """

    def __init__(
        self, buffer: FlatBuffer, plan: PiecePlan, params: Mapping[str, nn.Parameter], reduction: BucketReduction
    ) -> None:
        # All fixed. Buckets over the same ranks share a reduction, and all of a wrapper a lane and a tree.
        self._reduction, self._lane, self.tree = reduction, reduction.lane, reduction.tree
        self._reduces_each = reduction.plan.settings.reduce_every_micro_batch
        slots = [
            GradSlot(params[of.name], of.name, *place, plan.grad_dtype, self._allocate_grads, of.accumulates_in_fp32)
            for of, place in zip(plan.params, plan.layout.ranges, strict=True)
        ]
        super().__init__(buffer, plan, slots)
        # ``[start, end)`` in `local_grad_shard` of what this rank keeps of each gradient; fixed.
        self._place_in_shard = dict(zip(self._slot_of, plan.places_in_shard(buffer.plan.shard_index), strict=True))
        # Without `releases_grads` a view of the buffer's ``grad_data``; fixed. With it memory of the bucket, on the
        # thread that runs backward: allocated for the first gradient of a step or to send the bucket, dropped by
        # `release_grads`. A reduction in the lane keeps it alive until it ends.
        self.grad_data: Tensor | None = None
        # Owned by the bucket. `local_grad_shard` allocates it when first asked for in a step, and the lane writes
        # it until `wait_for_shard` returns. `clear_grads` drops it, and `_set_aside`, which gives it to the sums.
        self.separate_shard: Tensor | None = None
        # Sums of earlier micro-batches, with a tree: of whole gradients or shards. `_set_aside` adds them when a
        # backward begins, on its thread; `_add_sums` takes them out at a step's end, and `clear_grads` drops them.
        self._sums = PartialSums()
        if self.tree is not None and plan.is_trained:
            self.tree.register(self._set_aside)
        # Parameters whose gradient the running backward has finished. `note_grad_ready` adds; `start_grad_sync` and
        # `clear_grads` clear.
        self._ready_params: set[nn.Parameter] = set()
        # Parameters that `_ready_params` waits for: the trainable ones, counted at the bucket's first gradient of each
        # backward, because users freeze and thaw parameters between them.
        self._num_awaited = len(self.slots)
        # A reduction in the lane: set by `start_grad_sync`, cleared by `wait_for_grads`.
        self._grad_handle: Handle | None = None
        # The whole gradient that `_grad_handle` reads, where the buffer reuses such memory. Set by `start_grad_sync`;
        # `_give_back` returns it to the buffer once the reduction has ended. Otherwise only the reduction holds it.
        self._sent_gradient: Tensor | None = None
        # `start_grad_sync` sets it. `clear_grads` and `open_again` clear it on the main thread between backwards, and
        # where each micro-batch is reduced `begin_backward`, on autograd's thread.
        self.has_left = False
        # Whether the whole gradient is global, not this rank's shard of it alone. `gather_grads` sets it, until the
        # bucket is sent again or cleared.
        self.is_whole = False
        if buffer.grad_data is not None:
            self._hold_grads(buffer.grad_data[plan.layout.start : plan.layout.end])
            for slot in self.slots:
                slot.note_zeros()

    # ---- gradients

    @property
    def releases_grads(self) -> bool:
        """Whether whole gradients are freed once they are reduced (ZeRO-2)."""
        return self.buffer.grad_data is None

    @property
    def local_grad_shard(self) -> Tensor:
        """`[numel / shards]`, this rank's part of the reduced gradient.

        A part of `grad_data`. With `releases_grads` it is `separate_shard`, allocated at the first access in a step.
        """
        buffer, plan = self.buffer, self.buffer.plan
        if self.grad_data is not None and not self.releases_grads:
            return self.grad_data.chunk(plan.num_shards)[plan.shard_index]
        if self.separate_shard is None:
            length = self.numel // plan.num_shards
            self.separate_shard = buffer.zeros_for_shards(length, buffer.kind.shard_grad_dtype)
        return self.separate_shard

    def local_grad(self, param: nn.Parameter) -> Tensor:
        """Returns this rank's part of a parameter's reduced gradient, flat. It may be empty."""
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

    def prepare_for_layers(self) -> None:
        """Zeros ``main_grad`` for layers that add into it themselves."""
        for slot in self.slots:
            slot.prepare_for_layer()

    def complete_grads(self) -> Tensor:
        """Returns the whole gradient `[numel]`, with zeros where no gradient has arrived. Sets every ``main_grad``."""
        for slot in self.slots:
            slot.complete()
        return self.grad_data  # type: ignore[return-value]

    def held(self) -> list[Tensor]:
        """Returns the memory of gradients that the bucket has at this moment."""
        own = (self.grad_data, self._sent_gradient, self.separate_shard, *self.accumulators, *self._sums.tensors)
        return [tensor for tensor in own if tensor is not None]

    @property
    def buckets(self) -> list[Bucket]:
        """The bucket, in the list of Megatron-LM's bucket group."""
        return [self]

    # ---- a step

    @property
    def has_reduced(self) -> bool:
        """Whether the shard has gradients of this step. Otherwise its values are from an earlier step."""
        return self.has_left or self.separate_shard is not None

    @property
    def is_too_late(self) -> bool:
        """Whether a gradient that arrives now cannot be reduced with the bucket any more."""
        return self.has_left and not self._reduces_each

    def begin_backward(self) -> None:
        """Reopens a sent bucket for the next micro-batch, where each micro-batch is reduced.

        Called for all buckets with the first gradient of a backward, so that all ranks send each bucket once per
        backward. What is sent then is added to the shard.
        """
        if self._reduces_each:
            self.has_left = False

    def lend(self, param: nn.Parameter) -> Tensor | None:
        """Lends memory to compute the parameter's gradient in (`GradSlot.lend`), or None if it comes too late."""
        if self.tree is not None:
            self.tree.enter()
        return None if self.is_too_late else self.slot_of(param).lend()

    def add_gradient(self, param: nn.Parameter, gradient: Tensor | None) -> bool:
        """Adds a gradient. None records that a layer has added it itself.

        Returns:
            False for a gradient that comes after the bucket was sent: it is dropped, because it can no longer be
            reduced with the bucket.

        Raises:
            ShardstackError: a layer has added its gradient to a sum of other micro-batches, in a tree.
        """
        if self.tree is not None:
            self.tree.enter()
        slot = self.slot_of(param)
        slot.check_size()
        slot.take_back()
        if self.is_too_late:
            return False
        self.has_left = False
        if gradient is None:
            if self.tree is not None:
                raise ShardstackError(
                    f"a layer added the gradient of parameter {slot.name} into main_grad itself, rounding it with the "
                    "sum that is there; for reproducible_across_ranks let it return the gradient "
                    "(gradient_accumulation_fusion=False)"
                )
            slot.note_written_by_layer()
        else:
            slot.add(gradient)
        return True

    def note_grad_ready(self, param: nn.Parameter) -> None:
        """Notes that this backward has finished the parameter's gradient."""
        if not self._ready_params:
            self._num_awaited = sum(param.requires_grad for param in self.params)
        self._ready_params.add(param)

    @property
    def is_complete(self) -> bool:
        """Whether this backward has finished the gradients of all parameters that are trainable now."""
        if not self._ready_params:
            return not any(param.requires_grad for param in self.params)
        return len(self._ready_params) >= self._num_awaited

    def open_again(self, without_gradient: Sequence[nn.Parameter]) -> None:
        """Lets a backward add to reduced gradients, which start from zero for the parameters `without_gradient`."""
        if len(without_gradient) == len(self.params):
            self.clear_grads()
            return
        self.has_left = False
        for param in without_gradient:
            self.slot_of(param).show().zero_()

    def start_grad_sync(self, *, inspects: bool = True) -> None:
        """Sends the bucket's gradient, complete or not, with zeros for gradients that have not arrived.

        Args:
            inspects: False for gradients that will be dropped.
        """
        self.wait_for_grads()
        whole = self.complete_grads()
        if inspects:
            if not self._reduces_each:
                self._add_sums(whole)
            self._reduction.inspect((slot.name, slot.view) for slot in self.slots)  # type: ignore[misc]
        if self.releases_grads:
            self.release_grads()
            self._sent_gradient = whole if self.buffer.grad_memory.keeps(whole.numel()) else None
        what = f"the gradients of {self.name}"
        adds = self.separate_shard is not None
        run = partial(self._reduction.reduce, whole, self.local_grad_shard, adds, what)
        del whole  # from here on only the reduction holds it
        if self._reduction.plan.settings.overlap_grad_reduce:
            self._grad_handle = self._lane.submit(run)
        else:
            self._lane.run(run)
            self._give_back()
        self.has_left, self.is_whole = True, False
        self._ready_params.clear()

    def wait_for_grads(self) -> None:
        """Waits for a running reduction."""
        if self._grad_handle is not None:
            handle, self._grad_handle = self._grad_handle, None
            handle.wait()
            self._give_back()

    def wait_for_shard(self) -> None:
        """Waits for a running reduction, and on the host for the copy of an offloaded shard to it."""
        self.wait_for_grads()
        shard = self.separate_shard
        if shard is not None and shard.device != self.buffer.device:
            streams.current_stream().synchronize()

    def abandon_reduction(self) -> None:
        """Waits for a running reduction whose gradients are dropped. If it fails, warns."""
        try:
            self.wait_for_grads()
        except Exception as error:
            self._sent_gradient = None
            warnings.warn(f"the gradients of {self.name} are dropped; their reduction failed: {error}", stacklevel=2)

    def _give_back(self) -> None:
        # Callers have waited for the lane, so the next user of this memory runs after the reduction, on CUDA too: the
        # current stream waits for the lane's.
        if self._sent_gradient is not None:
            self.buffer.grad_memory.give_back(self._sent_gradient)
            self._sent_gradient = None

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Makes this rank's shard of the gradient global, or with `force_all_reduce` the whole gradient."""
        if not self.has_left:
            self.start_grad_sync()
        self.wait_for_shard()
        if self._reduces_each:
            self._add_sums(self.local_grad_shard)
        if force_all_reduce:
            self.gather_grads()
        for slot in self.slots:
            slot.take_reduced()

    def gather_grads(self) -> None:
        """Makes the whole gradient global, once this rank's shard is final."""
        group = self._reduction.shard_group
        if group is not None and self.grad_data is not None:
            gather = partial(collectives.all_gather, self.grad_data, self.local_grad_shard, group)
            self._lane.run(partial(gather, what=f"the gradients of {self.name}"))
            self.is_whole = True
            for slot in self.slots:
                slot.take_reduced()

    def clear_grads(self) -> None:
        """Makes every gradient zero, before the first backward of a step."""
        self.abandon_reduction()
        self._ready_params.clear()
        self._sums.clear()
        self.has_left = self.is_whole = False
        if self.releases_grads:
            self.release_grads()
        self.separate_shard = None
        for slot in self.slots:
            slot.clear()
        self.prepare_for_layers()

    # ---- sums over micro-batches, in a tree

    def _set_aside(self, additions: int | None, reduces: bool) -> None:
        if additions is None:
            return
        if self._reduces_each:
            self.wait_for_shard()
            self._sums.set_aside(self.local_grad_shard, additions)
            self.separate_shard = None
            return
        whole, memory, in_use = self.complete_grads(), self.buffer.grad_memory, None
        if self.releases_grads:
            self.release_grads()
        else:
            for slot in self.slots:
                slot.restart()
            in_use = whole
            if not additions:
                whole = memory.take(self.numel).copy_(whole)
        for free in self._sums.set_aside(whole, additions):
            if free is not in_use:
                memory.give_back(free)

    @torch.no_grad()
    def _add_sums(self, last: Tensor) -> None:
        """Adds the earlier sums to the last one of a step, in place: to whole gradients, or to the shard."""
        set_aside = self._sums.tensors
        self._sums.added_to(last)
        if not self._reduces_each:
            for free in set_aside:
                self.buffer.grad_memory.give_back(free)
