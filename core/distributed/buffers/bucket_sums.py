"""Sums a bucket's gradients over micro-batches in the order of a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...errors import ShardstackError
from ..gradient_tree import GradientTree, PartialSums
from .bucket import Bucket


class BucketSums:
    """Keeps sums of a bucket's earlier micro-batches, until the tree adds them to later ones.

    Args:
        tree: the wrapper's tree; it decides when a sum is set aside.
        of_shards: each chunk is reduced on its own, so that sums are of this rank's shard; else of whole gradients.
        wait: returns when no reduction of the bucket is running.
    """

    def __init__(self, bucket: Bucket, tree: GradientTree, *, of_shards: bool, wait: Callable[[], None]) -> None:
        self._bucket, self._tree, self._of_shards, self._wait = bucket, tree, of_shards, wait
        # Owns the memory of the sums that are set aside: `_begin` adds them; `complete` takes whole gradients out,
        # `finish` takes shards out, `clear` drops all. On the thread that runs backward, or between backwards.
        self._sums = PartialSums()
        # Whether the shard holds the root of the tree. `finish` sets it, `clear` clears it.
        self._is_finished = False
        tree.register(self._begin)

    @property
    def tensors(self) -> list[Tensor]:
        """All sums that are set aside."""
        return self._sums.tensors

    def enter(self) -> None:
        """Notes the backward that runs; call it before a gradient is added to the bucket."""
        self._tree.enter()

    def reject_written_by_layer(self, name: str) -> None:
        """Raises because a layer has added its gradient to a sum of other micro-batches.

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
        """Adds the earlier sums to the last sum of a step, `whole` `[numel]`, before it is reduced."""
        if self._of_shards:
            return
        set_aside = self._sums.tensors
        self._sums.added_to([whole])
        for free in set_aside:
            self._bucket.buffer.grad_memory.give_back(free)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the bucket's shard the root of the tree, once all reductions have finished."""
        if self._is_finished:
            return
        self._is_finished = True
        shard = self._bucket.local_grad_shard
        if self._of_shards:
            self._sums.added_to([shard])
        if self._tree.factor != 1.0:
            shard.mul_(self._tree.factor)

    def clear(self) -> None:
        """Begins a step: drops the sums of the last one."""
        self._sums.clear()
        self._is_finished = False
