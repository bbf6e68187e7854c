"""Sets gradients of a bucket aside, to add them up over micro-batches in a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ShardstackError
from ..gradient_tree import GradientTree, PartialSums
from .bucket import Bucket


class BucketSums:
    """Sets gradients of a bucket aside: whole ones, or, where each chunk is reduced, this rank's part of them.

    Args:
        tree: of the wrapper; says when to set aside.
        of_shards: each chunk is reduced on its own.
        wait: returns when no reduction of the bucket is under way.
    """

    def __init__(self, bucket: Bucket, tree: GradientTree, *, of_shards: bool, wait: Callable[[], None]) -> None:
        self._bucket, self._tree, self._of_shards, self._wait = bucket, tree, of_shards, wait
        # Owns the memory of what is set aside, from `_begin` until `complete` or `finish`, or until `clear`.
        self._sums = PartialSums()
        # The shard holds the root of the tree: set by `finish`, cleared by `clear`.
        self._is_finished = False
        tree.register(self._begin)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that it holds."""
        return self._sums.tensors

    def enter(self) -> None:
        """Notes the backward that runs; call it before a gradient is added to the bucket."""
        self._tree.enter()

    def reject_written_by_layer(self, name: str) -> None:
        """Raises because a layer has added to what may be the sum of other micro-batches.

        Raises:
            ShardstackError: names the parameter.
        """
        raise ShardstackError(
            f"a layer added the gradient of parameter {name} into main_grad itself, rounding it with the sum that is "
            "there; for reproducible_across_ranks let it return the gradient (gradient_accumulation_fusion=False)"
        )

    def _begin(self, additions: int | None, reduces: bool) -> None:
        if additions is None:
            return
        if self._of_shards:
            self._wait()
            self._sums.set_aside([self._bucket.local_grad_shard], additions)
            self._bucket.separate_shard = None
        else:
            self._set_whole_aside(additions)

    def _set_whole_aside(self, additions: int) -> None:
        bucket, memory = self._bucket, self._bucket.buffer.grad_memory
        whole = bucket.complete_grads()
        if bucket.releases_grads:
            bucket.release_grads()
            kept = None
        else:
            bucket.restart_grads()
            kept = whole
            if not additions:
                whole = memory.take(bucket.numel).copy_(whole)
        for free in self._sums.set_aside([whole], additions):
            if free is not kept:
                memory.give_back(free)

    @torch.no_grad()
    def complete(self, whole: Tensor) -> None:
        """Adds what was set aside to the last sum of a step, `whole` `[numel]`, before it is reduced."""
        if self._of_shards:
            return
        set_aside = self._sums.tensors
        self._sums.added_to([whole])
        for free in set_aside:
            self._bucket.buffer.grad_memory.give_back(free)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the bucket's shard the root of the tree, once all that was sent has arrived."""
        if self._is_finished:
            return
        self._is_finished = True
        shard = self._bucket.local_grad_shard
        if self._of_shards:
            self._sums.added_to([shard])
        if self._tree.factor != 1.0:
            shard.mul_(self._tree.factor)

    def clear(self) -> None:
        """Begins a step: drops what was set aside."""
        self._sums.clear()
        self._is_finished = False
