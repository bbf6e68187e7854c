"""Decides when buckets are sent: during backward, in the same order on all ranks, or at the end of a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from ..gradient_tree import GradientTree
from ..plan import Plan
from .bucket import Bucket


class _Backward:
    """A backward whose end autograd will report: autograd keeps this object until then, or until the backward
    raises."""


_LOST = weakref.ref(_Backward())
"""A dead reference, as that of a backward that raised."""


class ReductionSchedule:
    """Sends buckets in a fixed order, so that all ranks start the same sequence of collectives.

    Args:
        buckets: in the order in which they are sent.
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
        # All fixed. `_finish` is called at the end of a backward, where each one finishes gradients.
        self._buckets, self._plan, self._finish, self._tree = buckets, plan, finish, tree
        # Index of the next bucket to send; earlier buckets were sent in this step. `_send_complete` advances it on
        # autograd's thread, `send_all` on the main thread. `restart` resets it, and so does the end of each backward
        # where each micro-batch is reduced.
        self._next = 0
        # The backward whose end autograd will report (`_end_backward`); None before its first gradient and after its
        # end. Autograd alone keeps the object: if the backward raises, the reference is dead (`has_lost_a_backward`).
        # `restart` clears it.
        self._watched: weakref.ref[_Backward] | None = None
        # Whether a backward has begun to send buckets and has not sent all. Its first gradient sets it; `send_all`,
        # `restart`, and the end of a backward that reduces each micro-batch clear it.
        self._is_sending = False

    def restart(self) -> None:
        """Begins a step: no bucket was sent, and no backward is awaited."""
        self._next, self._watched, self._is_sending = 0, None, False

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
        return self._watched is not None and self._watched() is None

    def note_gradient(self, bucket: Bucket, param: nn.Parameter, reduces: bool) -> None:
        """Records that a gradient has arrived in a backward, and sends complete buckets.

        Args:
            reduces: False inside ``no_sync``: gradients of this backward are not reduced.
        """
        each = self._plan.reduces_every_micro_batch and (self._tree is None or self._tree.reduces)
        if each or (reduces and self._finish is not None):
            self._watch()
        if self._plan.reduces_during_backward and (reduces or each):
            self._is_sending = True
            bucket.note_grad_ready(param)
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
            if bucket.releases_grads and self._next >= 2 and self._plan.groups.experts is None:
                # A whole gradient is freed once it is reduced: let at most two reductions run at a time. Ranks that
                # share experts do not wait here. Where a parameter is unused on some of them, one would wait for a
                # bucket that others send at the end of their backward, and these for its tokens.
                self._buckets[self._next - 2].wait_for_grads()

    def _watch(self) -> None:
        # A backward inside that of a checkpoint (use_reentrant=True) belongs to the one around it, where that one has
        # brought a gradient before. Else each is watched on its own: sums are right, and buckets are sent more often.
        if self._watched is None or self._watched() is None:
            backward = _Backward()
            self._watched = weakref.ref(backward)
            for bucket in self._buckets:  # all of them, also those that this backward does not reach on this rank
                bucket.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, backward))

    def _end_backward(self, backward: _Backward) -> None:
        self._watched = _LOST  # until the reductions below have not raised
        if self._plan.reduces_every_micro_batch:  # each bucket leaves once a backward, on every rank
            self._send_complete(and_incomplete_ones=True)
            self._next, self._is_sending = 0, False
            for bucket in self._buckets:
                bucket.prepare_for_layers()
        if self._finish is not None:
            self._finish()
        self._watched = None
