"""Takes the gradient of one bucket through a step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial

from torch import Tensor, nn

from ...base.errors import ShardstackError
from ...comm import collectives, streams
from ...comm.lane import CommLane, Handle
from ..gradient_tree import GradientTree
from ..plan import Plan
from .buffer import Bucket
from .reduction import BucketReduction, BucketSums


class BucketPhase(Enum):
    """The state of one bucket in a step::

        FILLING ---> SENT <---> REFILLING

    Each step begins with FILLING. REFILLING exists only where each micro-batch is reduced. Autograd's thread changes
    it during a backward, the main thread between steps, never both at once.
    """

    FILLING = "filling"
    """Gradients accumulate on this rank. The shard counts as zeros: its memory has values of an earlier step."""

    SENT = "sent"
    """This rank's sum was sent. The shard is valid once `wait_for_grads` has returned."""

    REFILLING = "refilling"
    """A further micro-batch computes gradients, which will be added to the shard. Begins for all buckets with the
    first gradient of a backward, so that all ranks send each bucket once per backward."""


class BucketGroup:
    """Takes one bucket through a step.

    A backward adds gradients (`add_gradient`, `note_grad_ready`), `start_grad_sync` sends them, and after
    `finish_grad_sync` this rank's shard is global. Megatron-LM's class of this name may hold several buckets.

    Args:
        plan: of the model; says whether reductions run during backward, or before `start_grad_sync` returns, and
            whether each micro-batch is reduced and added to the shard.
        reduction: reduces the gradient.
        inspect: called with the bucket before its gradient is sent, to raise on invalid gradients.
        lane: runs the collectives: a thread on CPU, a stream on CUDA.
        tree: the order of additions over micro-batches, where there is one.

    Attributes:
        bucket: the bucket; fixed.
        phase: the bucket's phase in the step. Only methods of this class set it.
        sums: sums of earlier micro-batches; fixed. None without `tree`.
    """

    def __init__(
        self,
        bucket: Bucket,
        plan: Plan,
        reduction: BucketReduction,
        inspect: Callable[[Bucket], None],
        lane: CommLane,
        tree: GradientTree | None = None,
    ) -> None:
        self.bucket, self._plan, self._reduction, self._inspect, self._lane = bucket, plan, reduction, inspect, lane
        self._tree = tree
        self.sums: BucketSums | None = None
        if tree is not None:
            each = plan.reduces_every_micro_batch
            self.sums = BucketSums(bucket, tree, of_shards=each, wait=self.wait_for_shard)
        # Parameters whose gradient the running backward has finished. `note_grad_ready` adds; `start_grad_sync` and
        # `reset` clear.
        self._ready: set[nn.Parameter] = set()
        # Parameters that `_ready` waits for: the trainable ones, counted at the bucket's first gradient of each
        # backward, because users freeze and thaw parameters between them.
        self._num_awaited = len(bucket.params)
        # A reduction in the lane: set by `start_grad_sync` in the phase SENT, cleared by `wait_for_grads`.
        self._grad_handle: Handle | None = None
        # The whole gradient that `_grad_handle` reads, where the buffer reuses such memory. Set by `start_grad_sync`;
        # `_give_back` returns it to the buffer once the reduction has ended. Otherwise only the reduction holds it.
        self._sent: Tensor | None = None
        self.phase = BucketPhase.FILLING

    @property
    def buckets(self) -> list[Bucket]:
        """The bucket, in the list of Megatron-LM's interface."""
        return [self.bucket]

    @property
    def params(self) -> list[nn.Parameter]:
        """The bucket's parameters."""
        return self.bucket.params

    @property
    def has_reduced(self) -> bool:
        """Whether the shard has gradients of this step; otherwise its values are from an earlier step."""
        return self.phase is not BucketPhase.FILLING

    @property
    def has_left(self) -> bool:
        """Whether the gradients were sent, and no further micro-batch is being added to them."""
        return self.phase is BucketPhase.SENT

    def begin_backward(self) -> None:
        """Reopens a sent bucket for the next micro-batch, where each micro-batch is reduced."""
        if self._plan.reduces_every_micro_batch and self.has_left:
            self.phase = BucketPhase.REFILLING

    def lend(self, param: nn.Parameter) -> Tensor | None:
        """Lends memory to compute the parameter's gradient in (`GradSlot.lend`); None if it comes too late."""
        if self._tree is not None:
            self._tree.enter()
        is_late = self.has_left and not self._plan.reduces_every_micro_batch
        return None if is_late else self.bucket.slot_of(param).lend()

    def add_gradient(self, param: nn.Parameter, gradient: Tensor | None) -> bool:
        """Adds a gradient; None records that a layer has added it itself.

        Returns:
            False for a gradient that comes after the bucket was sent: it is dropped, because it can no longer be
            reduced with the bucket.

        Raises:
            ShardstackError: a layer has added its gradient to a sum of other micro-batches, in a tree.
        """
        if self._tree is not None:
            self._tree.enter()
        slot = self.bucket.slot_of(param)
        slot.take_back()
        self.begin_backward()
        if self.has_left:
            return False
        if gradient is None:
            if self._tree is not None:
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
        if not self._ready:
            self._num_awaited = sum(param.requires_grad for param in self.bucket.params)
        self._ready.add(param)

    @property
    def is_complete(self) -> bool:
        """Whether this backward has finished the gradients of all parameters that are trainable now."""
        if not self._ready:
            return not any(param.requires_grad for param in self.bucket.params)
        return len(self._ready) >= self._num_awaited

    def replace_gradient(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Replaces this rank's gradient of the parameter by one that the user has written, before it is reduced.

        Raises:
            ShardstackError: a gradient of the bucket has been reduced already, or is a part of a tree.
        """
        slot = self.bucket.slot_of(param)
        if self.sums is not None:
            raise ShardstackError(
                f"parameter {slot.name} was given a .grad before finalize_model_grads, when reproducible_across_ranks "
                "has micro-batches still to be added; set it after finalize_model_grads"
            )
        if self.has_reduced:
            raise ShardstackError(
                f"parameter {slot.name} was given a .grad before finalize_model_grads, when a part of the step's "
                "gradients had been reduced; set it after finalize_model_grads, or switch overlap_grad_reduce off"
            )
        slot.replace(gradient)

    def open_again(self, dropped: Sequence[nn.Parameter]) -> None:
        """Lets a backward add to reduced gradients; gradients of the parameters in `dropped` start from zero."""
        if len(dropped) == len(self.bucket.params):
            self.clear_grads()
            return
        self.phase = BucketPhase.FILLING
        for param in dropped:
            self.bucket.slot_of(param).show().zero_()

    def start_grad_sync(self, *, inspects: bool = True) -> None:
        """Sends the bucket's gradient, complete or not, with zeros for gradients that have not arrived.

        Args:
            inspects: False for gradients that will be dropped.
        """
        self.wait_for_grads()
        whole = self.bucket.complete_grads()
        if inspects:
            if self.sums is not None:
                self.sums.complete(whole)
            self._inspect(self.bucket)
        if self.bucket.releases_grads:
            self.bucket.release_grads()
            self._sent = whole if self.bucket.buffer.grad_memory.keeps(whole.numel()) else None
        what = f"the gradients of {self.bucket.name}"
        adds = self.has_reduced and self.bucket.separate_shard is not None
        run = partial(self._reduction.reduce, whole, self.bucket.local_grad_shard, adds, what)
        del whole  # from here on only the reduction holds it
        if self._plan.overlaps_grads:
            self._grad_handle = self._lane.submit(run)
        else:
            self._lane.run(run)
            self._give_back()
        self.phase = BucketPhase.SENT
        self._ready.clear()

    def wait_for_grads(self) -> None:
        """Waits for a running reduction."""
        if self._grad_handle is not None:
            handle, self._grad_handle = self._grad_handle, None
            handle.wait()
            self._give_back()

    def wait_for_shard(self) -> None:
        """Waits for a running reduction, and on the host for the copy of an offloaded shard to it."""
        self.wait_for_grads()
        shard = self.bucket.separate_shard
        if shard is not None and shard.device != self.bucket.buffer.device:
            streams.current_stream().synchronize()

    def abandon_reduction(self) -> None:
        """Waits for a running reduction whose gradients are dropped; if it fails, warns."""
        try:
            self.wait_for_grads()
        except Exception as error:
            self._sent = None
            warnings.warn(
                f"the gradients of {self.bucket.name} are dropped; their reduction failed: {error}", stacklevel=2
            )

    def _give_back(self) -> None:
        # Callers have waited for the lane, so the next user of this memory runs after the reduction, on CUDA too: the
        # current stream waits for the lane's.
        if self._sent is not None:
            self.bucket.buffer.grad_memory.give_back(self._sent)
            self._sent = None

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Makes this rank's shard of the gradient global; with `force_all_reduce` the whole gradient."""
        if not self.has_left:
            self.start_grad_sync()
        self.wait_for_shard()
        if self.sums is not None:
            self.sums.finish()
        bucket, group = self.bucket, self._reduction.shard_group
        if force_all_reduce and group is not None and bucket.grad_data is not None:
            gather = partial(collectives.all_gather, bucket.grad_data, bucket.local_grad_shard, group)
            self._lane.run(partial(gather, what=f"the gradients of {bucket.name}"))
        for slot in bucket.slots:
            slot.take_reduced()

    def reset(self) -> None:
        """Forgets which gradients are ready and reduced, before the next step; keeps their values."""
        self.wait_for_grads()
        self._ready.clear()
        self.phase = BucketPhase.FILLING
        if self.sums is not None:
            self.sums.clear()

    def clear_grads(self) -> None:
        """Makes every gradient zero, before the first backward of a step."""
        self.abandon_reduction()
        self.reset()
        self.bucket.clear_grads()
