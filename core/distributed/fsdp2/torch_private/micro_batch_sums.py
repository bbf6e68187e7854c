"""Adds up gradients of FSDP2 over micro-batches in a tree.

Inside `no_sync` torch adds whole gradients; outside it, torch reduces them and adds the result to the gradients of the
shards. When torch's sum is a complete node of the tree, this module moves it out, so that torch starts a new sum. At
the end of the step it adds the sum back: to whole gradients before torch reduces them, to shards after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from ...._torch_compat import NO_BACKWARD, current_backward
from ....comm.collectives import all_reduce
from ....errors import ShardstackError, UnitError
from ...gradient_tree import GradientTree, PartialSums
from .gradients import complete_accumulated_gradients
from .states import name_of_parameter, param_groups


class MicroBatchSums:
    """Adds up the gradients of all units of a sharded model in a tree.

    Args:
        of_shards: each chunk of micro-batches is reduced on its own.
        replicas: the ranks with the same shard, if there are several.
    """

    def __init__(self, root: nn.Module, tree: GradientTree, *, of_shards: bool, replicas: ProcessGroup | None) -> None:
        self._root, self._tree, self._of_shards = root, tree, of_shards
        # One for each of torch's groups of parameters; fixed.
        self._units = [_UnitSums(group, tree, of_shards, replicas) for group in param_groups(root)]
        tree.register(self._begin)

    @property
    def tensors(self) -> list[Tensor]:
        """All sums that were moved out."""
        return [tensor for unit in self._units for tensor in unit.sums.tensors]

    def _begin(self, additions: int | None, reduces: bool) -> None:
        if self._of_shards:
            for unit in self._units:
                unit.group.reduce_grads = reduces
            if reduces:
                complete_accumulated_gradients(self._root)
        if additions is not None:
            for unit in self._units:
                unit.set_aside(additions)

    @torch.no_grad()
    def finish(self) -> None:
        """Makes the shards' gradients the root of the tree, once all have been reduced."""
        for unit in self._units:
            unit.finish()
        if self._tree.factor != 1.0:
            found = [gradient for unit in self._units for gradient in unit.shards() if gradient is not None]
            if found:
                torch._foreach_mul_(found, self._tree.factor)

    def clear(self) -> None:
        """Begins a step: drops the sums that were moved out."""
        for unit in self._units:
            unit.sums.clear()


class _UnitSums:
    """Adds up the gradients of one `FSDPParamGroup`. Takes over its `post_backward`, which torch calls by name."""

    def __init__(self, group: Any, tree: GradientTree, of_shards: bool, replicas: ProcessGroup | None) -> None:
        self.group, self._tree, self._of_shards, self._replicas = group, tree, of_shards, replicas
        # Owns the sums that were moved out: of whole gradients, or of shards. Filled when backwards begin; emptied by
        # `_complete` before torch reduces, by `finish`, or when the step is dropped.
        self.sums = PartialSums()
        # The shard that replicas were added to on torch's stream for that, which may not have ended; torch itself
        # keeps it only for an all-reduce of its own. `_add_replicas` sets it in a backward. The next one replaces it,
        # or `finish` drops it: the current stream has waited for torch's at the end of the backward.
        self._reduced: Tensor | None = None
        # The backward in which the unit's gradients were complete last, and how often each had been written by then.
        # `post_backward` sets both at its end, and reads them to notice a second run of the unit in one backward.
        self._ended_in, self._versions = NO_BACKWARD, list[int]()
        # Torch's bound method, which our replacement on the object calls. Never restored.
        self._post_backward = group.post_backward
        group.post_backward = self.post_backward

    def post_backward(self, *unused: Any) -> None:
        self._reject_what_adds_by_itself()
        if self.group.reduce_grads and not self._of_shards:
            self._complete()
        with self._replicas_added_in_order():
            self._post_backward(*unused)
        self._ended_in, self._versions = current_backward(), self._count_writes()

    @contextmanager
    def _replicas_added_in_order(self) -> Iterator[None]:
        """Makes torch call `_add_replicas` instead of its own all-reduce, which adds replicas in any order."""
        if self._replicas is None:
            yield
            return
        info = self.group.mesh_info
        self.group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
        self.group._all_reduce_hook = self._add_replicas
        try:
            yield
        finally:
            self.group.mesh_info, self.group._all_reduce_hook = info, None

    def _add_replicas(self, shard: Tensor) -> None:
        if self._replicas is not None:
            self._reduced = shard
            order = (range(self._replicas.size()),)
            all_reduce(shard, self._replicas, what=f"the gradients of the unit of {self._name}", order=order)

    def set_aside(self, additions: int) -> None:
        if self._of_shards:
            self.sums.set_aside(self.shards(), additions)
            for parameter in self.group.fsdp_params:
                parameter.sharded_param.grad = None
            return
        self.sums.set_aside(self._take_whole(), additions)

    def finish(self) -> None:
        self._reduced = None
        if not self._of_shards:
            return
        for parameter, total in zip(self.group.fsdp_params, self.sums.added_to(self.shards()), strict=True):
            if total is not None and parameter.sharded_param.grad is None:
                parameter.sharded_param.grad = parameter.to_sharded_dtensor(total)

    def shards(self) -> list[Tensor | None]:
        """Returns this rank's part of each gradient; None where none was reduced."""
        gradients = (parameter.sharded_param.grad for parameter in self.group.fsdp_params)
        return [None if gradient is None else gradient._local_tensor for gradient in gradients]

    @torch.no_grad()
    def _complete(self) -> None:
        """Adds the sums that were moved out to the whole gradients that torch is about to reduce."""
        if not self.sums.tensors:
            return
        dtype = self.sums.tensors[0].dtype
        last = [gradient if gradient is None else gradient.to(dtype) for gradient in self._take_whole()]
        for parameter, total in zip(self.group.fsdp_params, self.sums.added_to(last), strict=True):
            if total is None and parameter._unsharded_param.requires_grad:
                total = torch.zeros_like(parameter._unsharded_param, dtype=dtype)
            parameter.unsharded_accumulated_grad = total

    def _take_whole(self) -> list[Tensor | None]:
        """Takes the whole gradients that torch has accumulated."""
        taken: list[Tensor | None] = []
        for parameter in self.group.fsdp_params:
            if not hasattr(parameter, "_unsharded_param"):
                taken.append(None)
                continue
            parameter.accumulate_unsharded_grad_if_needed()
            total = parameter.unsharded_accumulated_grad
            taken.append(parameter._unsharded_param.grad if total is None else total)
            parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None
        return taken

    def _reject_what_adds_by_itself(self) -> None:
        if self.group._all_reduce_hook is not None:
            raise UnitError(
                f"set_all_reduce_hook was called on the unit of {self._name}, and reproducible_across_ranks adds up "
                "gradients in one order; drop one of the two"
            )
        if not self._tree.has_entered:
            raise UnitError(
                f"a backward reached the unit of {self._name} around the tensors that the model's forward returned; "
                "for reproducible_across_ranks return tensors, or tuples, lists or dicts of them"
            )
        if self.group.reduce_grads and not self._tree.reduces:
            raise ShardstackError(
                "a backward before the last of a step was to be reduced by itself, and reproducible_across_ranks "
                "reduces the sum of all; put every backward of a step but the last inside no_sync"
            )
        is_second = self._ended_in == current_backward() != NO_BACKWARD
        if is_second and self._versions != self._count_writes():  # two addends of torch's sum, where the tree has one
            raise UnitError(
                f"the unit of {self._name} ran twice in one forward, and FSDP2 adds the gradient of each run by "
                "itself; for reproducible_across_ranks make its parent the unit, or use FullyShardedDataParallel"
            )

    def _count_writes(self) -> list[int]:
        """Returns for each whole gradient a number that grows when it is written; -1 where there is none."""
        found: Sequence[Tensor | None] = [
            gradient
            for parameter in self.group.fsdp_params
            for gradient in (
                getattr(getattr(parameter, "_unsharded_param", None), "grad", None),
                parameter.unsharded_accumulated_grad,
            )
        ]
        return [-1 if gradient is None else gradient._version for gradient in found]

    @property
    def _name(self) -> str:
        return name_of_parameter(self.group.fsdp_params[0])
