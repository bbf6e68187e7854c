"""Buckets in a step and between steps: when they are sent, and what code between backwards sees and may change.

During a backward buckets are sent in the same order on all ranks. Between steps code may look at parameters, and at
gradients in ``param.grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...base.errors import ShardstackError
from ...base.parameters import without_waiting
from ..engine.gradient_tree import GradientTree
from ..engine.gradients import UnreadableGradient, is_unreadable
from ..plan import Plan
from .bucket import Bucket
from .grad_slot import GradSlot


class _Backward:
    """A backward whose end autograd will report: autograd keeps this object until then, or until the backward
    raises."""


_LOST = weakref.ref(_Backward())
"""A dead reference, like the one to a backward that raised."""


class ReductionSchedule:
    """Sends buckets in a fixed order, so that all ranks start the same sequence of collectives.

    Args:
        buckets: all buckets with gradients, in the order in which they are sent.
        plan: its settings say whether buckets are sent during backward, and whether each micro-batch is reduced.
        finish: called at the end of each backward that reduces; None if the wrapper does not finish gradients in
            backward.
        tree: with ``reproducible_across_ranks``, decides after which micro-batches gradients are reduced.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        plan: Plan,
        finish: Callable[[], None] | None = None,
        tree: GradientTree | None = None,
    ) -> None:
        # `_finish` is called at the end of a backward, where each one finishes gradients.
        self._buckets, self._plan, self._finish, self._tree = buckets, plan, finish, tree
        # Whether buckets are sent when their gradients are complete, instead of all at the end.
        self._sends_early = plan.settings.overlap_grad_reduce or plan.strategy in ("optim_grads", "optim_grads_params")
        # Whether a backward has to call `note_gradients`, which otherwise does nothing.
        self.acts_in_backward = self._sends_early or plan.settings.reduce_every_micro_batch or finish is not None
        # Index of the next bucket to send; earlier buckets were sent in this step. `_send_complete` advances it on
        # autograd's thread, `send_all` on the main thread. `restart` resets it, and so does the end of each backward
        # where each micro-batch is reduced.
        self._next = 0
        # The backward whose end autograd will report (`_end_backward`); None before its first gradient and after its
        # end. Autograd alone keeps the object: if the backward raises, the reference is dead (`has_lost_a_backward`).
        # `restart` clears it.
        self._watched_backward: weakref.ref[_Backward] | None = None
        # Whether a backward has begun to send buckets and has not sent all. Its first gradient sets it; `send_all`,
        # `restart`, and the end of a backward that reduces each micro-batch clear it.
        self._is_sending = False

    def restart(self) -> None:
        """Begins a step, in which no bucket was sent and no backward is awaited."""
        self._next, self._watched_backward, self._is_sending = 0, None, False

    def give_up(self) -> None:
        """Ends a step whose gradients are dropped, on every rank, and calls `restart`.

        A backward that raised, or that reached fewer parameters than on other ranks, may have sent fewer buckets. The
        other ranks would wait for the rest, or pair it with buckets of the next step: sends the rest.
        """
        if self._is_sending:
            for bucket in self._buckets:
                bucket.abandon_reduction()
            for bucket in self._buckets:
                if not bucket.has_left:
                    bucket.start_grad_sync(inspects=False)
        self.restart()

    @property
    def has_lost_a_backward(self) -> bool:
        """Whether the last backward raised, before its end or in the reductions there."""
        return self._watched_backward is not None and self._watched_backward() is None

    def note_gradients(self, bucket: Bucket, slots: Iterable[GradSlot], reduces: bool) -> None:
        """Records that a backward has finished gradients of a bucket, and sends complete buckets.

        Args:
            reduces: False inside ``no_sync``: gradients of this backward are not reduced.
        """
        each = self._plan.settings.reduce_every_micro_batch and (self._tree is None or self._tree.reduces)
        if each or (reduces and self._finish is not None):
            self._watch()
        if self._sends_early and (reduces or each):
            self._is_sending = True
            for slot in slots:
                bucket.note_grad_ready(slot)
            if bucket.is_complete:
                self._send_complete()

    def send_all(self) -> None:
        """Sends every bucket that was not sent yet."""
        for bucket in self._buckets:
            if not bucket.has_left:
                bucket.start_grad_sync()
        self._next, self._is_sending = len(self._buckets), False

    def _send_complete(self, and_incomplete_ones: bool = False) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not (bucket.is_complete or and_incomplete_ones):
                return
            if not bucket.has_left:
                bucket.start_grad_sync()
            self._next += 1
            if bucket.grads.releases and self._next >= 2 and self._plan.groups.experts is None:
                # A whole gradient is freed once it is reduced: let at most two reductions run at a time. Ranks that
                # share experts do not wait here. Where a parameter is unused on some of them, one would wait for a
                # bucket that others send at the end of their backward, and these for its tokens.
                self._buckets[self._next - 2].wait_for_grads()

    def _watch(self) -> None:
        # A backward inside that of a checkpoint (use_reentrant=True) belongs to the one around it, where that one has
        # brought a gradient before. Else each is watched on its own: sums are right, and buckets are sent more often.
        if self._watched_backward is None or self._watched_backward() is None:
            backward = _Backward()
            self._watched_backward = weakref.ref(backward)
            if self._plan.settings.reduce_every_micro_batch:
                # Opens all of them, also those that this backward does not reach on this rank: so all ranks send each
                # bucket once per backward. What is sent then is added to the shard.
                for bucket in self._buckets:
                    bucket.has_left = False
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, backward))

    def _end_backward(self, backward: _Backward) -> None:
        self._watched_backward = _LOST  # until the reductions below have not raised
        if self._plan.settings.reduce_every_micro_batch:  # each bucket leaves once a backward, on every rank
            self._send_complete(and_incomplete_ones=True)
            self._next, self._is_sending = 0, False
            for bucket in self._buckets:
                bucket.grads.zero_for_layers()
        if self._finish is not None:
            self._finish()
        self._watched_backward = None


class ShownGradients:
    """Sets ``param.grad`` of the parameters of flat buffers, from `finish_grad_sync` to the optimizer's step.

    A whole gradient is shown as a tensor that shares the memory of ``main_grad``. If gradients are sharded, or in
    another dtype than the parameter, ``param.grad`` is a tensor that raises when it is read. None is what users set.

    Args:
        places: the bucket and the place in it of each parameter.
        is_sharded: whether a rank keeps only a shard of each gradient.
    """

    def __init__(self, places: Sequence[tuple[Bucket, GradSlot]], is_sharded: bool) -> None:
        # Buckets own the gradients that are shown.
        self._places, self._is_sharded = places, is_sharded
        # After a step with sharded gradients: the parameters with a gradient, whose ``grad`` is hidden, so that code
        # between steps may convert or copy them. `hide_after_step` sets it, `show` clears it to None.
        self._stepped_params: set[nn.Parameter] | None = None
        # Each place with what is shown in place of its gradient, the same tensor in each step: one that raises when it
        # is read, without memory. None where the gradient itself is shown.
        self._shown: list[tuple[nn.Parameter, GradSlot, UnreadableGradient | None]] = []
        for _, slot in places:
            is_readable = not is_sharded and slot.main_grad_dtype == slot.param.dtype
            self._shown.append((slot.param, slot, None if is_readable else UnreadableGradient(slot.param)))

    def take_written(self) -> None:
        """Replaces this rank's gradients by those that the user has assigned to ``param.grad``.

        Raises:
            ShardstackError: a gradient of the bucket has been reduced already, or is a part of a tree.
        """
        with without_waiting():
            places = [(bucket, slot, grad) for bucket, slot in self._places if (grad := slot.param.grad) is not None]
            written = [place for place in places if not shows_main_grad(place[1].param)]
        for bucket, slot, gradient in written:
            _check_may_replace(bucket, slot.name)
            slot.take_back()
            slot.counts = False
            slot.add(gradient)
        with without_waiting():
            for _, slot in self._places:
                slot.param.grad = None

    def show(self) -> None:
        """Shows reduced gradients, and None for a frozen parameter without a gradient."""
        self._stepped_params = None
        with without_waiting():
            for param, slot, unreadable in self._shown:
                if not slot.has_gradient:
                    param.grad = param.main_grad = None  # type: ignore[attr-defined]
                else:
                    param.grad = param.main_grad if unreadable is None else unreadable  # type: ignore[attr-defined]

    def hide_after_step(self) -> None:
        """Clears ``param.grad`` after a step, if gradients are sharded."""
        if self._is_sharded and self._stepped_params is None:
            with without_waiting():
                self._stepped_params = {param for param, _, _ in self._shown if param.grad is not None}
                for param in self._stepped_params:
                    param.grad = None

    def has_gradient(self, param: nn.Parameter) -> bool:
        """Returns whether a step reads a gradient of the parameter, which the user has not set to None."""
        if self._stepped_params is not None:
            return param in self._stepped_params
        with without_waiting():
            return param.grad is not None

    def find_written(self) -> GradSlot | None:
        """Returns the place of a parameter whose ``grad`` was assigned where an optimizer reads a shard, or None."""
        if not self._is_sharded:
            return None
        with without_waiting():
            assigned = [slot for param, slot, own in self._shown if param.grad is not None and param.grad is not own]
        return assigned[0] if assigned else None


def _check_may_replace(bucket: Bucket, name: str) -> None:
    if bucket.tree is None and not bucket.has_reduced:
        return
    when, remedy = "a part of the step's gradients had been reduced", ", or switch overlap_grad_reduce off"
    if bucket.tree is not None:
        when, remedy = "reproducible_across_ranks has micro-batches still to be added", ""
    raise ShardstackError(
        f"parameter {name} was given a .grad before finalize_model_grads, when {when}; set it after "
        f"finalize_model_grads{remedy}"
    )


def shows_main_grad(param: Any) -> bool:
    """Returns whether ``param.grad`` is still what `ShownGradients.show` has set it to."""
    grad = param.grad
    return grad is not None and (is_unreadable(grad) or grad is getattr(param, "main_grad", None))
