"""Decides when buckets of gradients leave: during a backward, in one order on all ranks, or when a step ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..._torch_compat import NO_BACKWARD, current_backward
from ..gradient_tree import GradientTree
from ..plan import FlatPlan
from .bucket_group import BucketGroup


class ReductionSchedule:
    """Sends buckets in their fixed order, so that all ranks send the same sequence.

    Args:
        groups: the buckets, in the order in which they leave.
        plan: says whether they leave during a backward, and whether each micro-batch is reduced on its own.
        finish: called at the end of each backward that reduces, where the wrapper finishes gradients in backward.
        tree: says after which micro-batches gradients are reduced, where it does.
    """

    def __init__(
        self,
        groups: Sequence[BucketGroup],
        plan: FlatPlan,
        finish: Callable[[], None] | None = None,
        tree: GradientTree | None = None,
    ) -> None:
        self._groups, self._plan, self._finish, self._tree = groups, plan, finish, tree
        # Index of the next bucket to leave; those before it have left in this step. Advanced when buckets are sent, by
        # autograd's thread during a backward; 0 after `restart`, and after each backward where each is reduced by
        # itself.
        self._next = 0
        # The backward whose end autograd will report: set by the first gradient that it brings, cleared at its end and
        # by `restart`. One that raises is never reported.
        self._watched = NO_BACKWARD
        # A backward sends buckets, and not all have been sent: set by the first gradient that it brings, cleared when
        # the last bucket is sent and by `restart`.
        self._is_sending = False

    def restart(self) -> None:
        """Begins a step: no bucket has left, and no backward is awaited."""
        self._next, self._watched, self._is_sending = 0, NO_BACKWARD, False

    def give_up(self) -> None:
        """Ends a step whose gradients are dropped, on every rank; then `restart`.

        A backward that raised, or that had no gradient for some parameter, may have sent fewer buckets than on another
        rank, which waits for the rest, or would take those of the next step for it.
        """
        if self._is_sending:
            for group in self._groups:
                if not group.has_left:
                    group.start_grad_sync(inspects=False)
        self.restart()

    @property
    def has_lost_a_backward(self) -> bool:
        """Whether the last backward raised: its end was never reported."""
        return self._watched not in (NO_BACKWARD, current_backward())

    def note_gradient(self, group: BucketGroup, param: nn.Parameter, reduces: bool) -> None:
        """Takes note of a gradient that a backward has brought, and sends what is complete.

        Args:
            reduces: this backward's gradients are to be reduced: it is not inside ``no_sync``.
        """
        each = self._plan.reduces_every_micro_batch and (self._tree is None or self._tree.reduces)
        if each or (reduces and self._finish is not None):
            self._watch()
        if self._plan.reduces_during_backward and (reduces or each):
            self._is_sending = True
            group.note_grad_ready(param)
            self._send_complete()

    def send_all(self) -> None:
        """Sends every bucket that has not left yet."""
        for group in self._groups:
            if not group.has_left:
                group.start_grad_sync()
        self._next, self._is_sending = len(self._groups), False

    def _send_complete(self, and_incomplete_ones: bool = False) -> None:
        while self._next < len(self._groups):
            group = self._groups[self._next]
            if not (group.is_complete or and_incomplete_ones):
                return
            if not group.has_left:
                group.start_grad_sync()
            self._next += 1
            if group.bucket.releases_grads and self._next >= 2:
                # Whole gradients live until they are reduced: with two under way, wait for the older one.
                self._groups[self._next - 2].wait_for_grads()

    def _watch(self) -> None:
        if self._watched != current_backward():
            self._watched = current_backward()
            for group in self._groups:  # all of them, also those that this backward does not reach on this rank
                group.begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._watched = NO_BACKWARD
        if self._plan.reduces_every_micro_batch:  # each bucket leaves once a backward, on every rank
            self._send_complete(and_incomplete_ones=True)
            self._next, self._is_sending = 0, False
            for group in self._groups:
                group.bucket.prepare_for_layers()
        if self._finish is not None:
            self._finish()
