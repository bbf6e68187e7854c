"""Adds up gradients of FSDP2 over micro-batches in a tree, inside the units' custom reduce-scatter.

With ``reproducible_across_ranks`` torch reduces after every micro-batch. The reduce-scatter keeps the whole gradients
of a micro-batch, adds what the tree adds, and hands torch negative zeros, which change no number that torch adds them
to. After the last micro-batch it reduces the sum of all, over replicas too: torch knows one optimizer instance. With
``reduce_every_micro_batch`` ranks are the lower levels of the tree: whole gradients are reduced, and their shards are
kept and added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.fsdp import FSDPModule

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import ShardstackError, UnitError
from ...comm import collectives, streams
from ...comm.gloo import Sum
from ..engine.gradient_tree import GradientTree, PartialSums
from ..plan import Plan, UnitPlan
from .shard_model import UnitReduceScatter
from .torch_private import TorchState, as_fsdp, has_all_reduce_hook

_NOTHING = -0.0
"""What changes no number that it is added to. Positive zero would change the sign of a negative zero."""


class GradientSums:
    """Adds up the gradients of all units of a sharded model in a tree.

    Args:
        modules: every module that FSDP2 acts on.
        state: what torch holds for the model.
    """

    def __init__(self, plan: Plan, tree: GradientTree, modules: Iterable[FSDPModule], state: TorchState) -> None:
        # All fixed. `_of_shards`: sums are of reduced gradients, because each micro-batch is reduced.
        self._modules, self._state, self._of_shards = list(modules), state, plan.reduces_every_micro_batch
        # The units' reduce-scatters; fixed.
        self._units = [_TreeReduceScatter(plan, unit, tree) for unit in plan.units]
        for planned, unit in zip(plan.units, self._units, strict=True):
            if plan.groups.shard.size() > 1:
                as_fsdp(planned.modules[0]).set_custom_reduce_scatter(unit)
            else:  # torch calls no reduce-scatter
                as_fsdp(planned.modules[0]).set_all_reduce_hook(unit.add_alone)
        tree.register(self._begin)

    @property
    def tensors(self) -> list[Tensor]:
        """All sums that are kept from earlier micro-batches."""
        return [tensor for unit in self._units for tensor in unit.tensors]

    def expect_sync(self, enabled: bool) -> None:
        """Sets whether the backwards that follow are outside `no_sync`."""
        for unit in self._units:
            unit.is_synced = enabled

    def clear(self) -> None:
        """Begins a step: drops what is kept."""
        for unit in self._units:
            unit.clear()

    def _begin(self, additions: int | None, reduces: bool) -> None:
        for unit in self._units:
            unit.reject_all_reduce_hook()
        if self._of_shards and reduces:
            self._state.complete_accumulated_gradients()
        if self._of_shards:  # torch adds up the whole gradients of the micro-batches that are reduced together
            for module in self._modules:
                module.set_requires_gradient_sync(reduces, recurse=False)
        if additions is not None:
            for unit in self._units:
                unit.set_aside(additions)


class _TreeReduceScatter(UnitReduceScatter):
    """Reduces one unit's sum over the micro-batches of a step, in the backward of the last."""

    def __init__(self, plan: Plan, unit: UnitPlan, tree: GradientTree) -> None:
        super().__init__(plan, unit)
        # All fixed. The tree is the wrapper's, which all units share.
        self._tree, self._module, self._replicas = tree, as_fsdp(unit.modules[0]), plan.groups.replicate
        self._of_shards, self._is_alone = plan.reduces_every_micro_batch, plan.groups.shard.size() == 1
        # Whether the running backward is outside `no_sync`. `GradientSums.expect_sync` sets it before each.
        self.is_synced = True
        # The gradients that are added in place, whole or of shards, flat, in memory of their own. `_add` sets and
        # clears it, on torch's stream for reductions; `set_aside` moves it to `_sums`, between reductions.
        self._current: Tensor | None = None
        # Sums of earlier micro-batches. `set_aside` adds them when a backward begins, `_add` takes them out after the
        # last one of a step, both on autograd's thread; `clear` drops them between steps.
        self._sums = PartialSums()
        # The last backward that has reduced the unit, to notice a second run of the unit in it.
        self._reduced_in = NO_BACKWARD

    def _reduce(self, output: Tensor, whole: Tensor, group: ProcessGroup, op: ReduceOp.RedOpType) -> None:
        self._sum(whole, output, partial(super()._reduce, group=group, op=op))

    def add_alone(self, gradient: Tensor) -> None:
        """Does in place for a rank that is alone among shards what `_reduce` does for several."""
        self._sum(gradient.clone(), gradient, Tensor.copy_)

    def _sum(self, whole: Tensor, shard: Tensor, reduce: Callable[[Tensor, Tensor], Any]) -> None:
        """Makes `shard` this rank's part of the sum over the step, once it is complete. `reduce` fills it from whole
        gradients."""
        is_late = current_backward() == NO_BACKWARD  # a gradient that its unit's backward has left
        if not is_late:
            self._reject_what_adds_by_itself()
        total = whole if is_late or self._of_shards else self._add(whole)
        if total is not None:
            reduce(shard, total)
            if self._replicas is not None:
                order = (range(self._replicas.size()),)
                collectives.all_reduce(shard, self._replicas, Sum(order=order), what=f"the gradients of {self.unit}")
            if self._of_shards and not is_late and (total := self._add(shard.clone())) is not None:
                shard.copy_(total)
        if total is None:
            shard.fill_(_NOTHING)

    def set_aside(self, additions: int) -> None:
        """Ends the sum that is added in place, and adds it to the newest `additions` sums before it."""
        freed = self._sums.set_aside(self._current, additions)
        self._current = None
        for tensor in (*freed, *self._sums.tensors):
            _keep_for_this_stream(tensor)

    def reject_all_reduce_hook(self) -> None:
        """Raises if the caller has added what torch calls between a reduction and the gradient of the shard."""
        if not self._is_alone and has_all_reduce_hook(self._module):
            raise UnitError(
                f"set_all_reduce_hook was called on {self.unit}, and reproducible_across_ranks adds up gradients in "
                "one order; drop one of the two"
            )

    def clear(self) -> None:
        """Drops all sums."""
        self._current, self._reduced_in = None, NO_BACKWARD
        self._sums.clear()

    @property
    def tensors(self) -> list[Tensor]:
        """The sums that are kept."""
        return [*self._sums.tensors, *(() if self._current is None else (self._current,))]

    def _add(self, gradients: Tensor) -> Tensor | None:
        """Adds the gradients of a micro-batch, taking their memory. Returns the sum of the step after the last."""
        _keep_for_this_stream(gradients)
        self._current = gradients if self._current is None else self._current.add_(gradients)
        if not self._tree.is_last:
            return None
        total = self._sums.added_to(self._current)
        self._current = None
        return total

    def _reject_what_adds_by_itself(self) -> None:
        if not self._tree.has_entered:
            raise UnitError(
                f"a backward reached {self.unit} around the tensors that the model's forward returned; for "
                "reproducible_across_ranks return tensors, or tuples, lists or dicts of them"
            )
        if self.is_synced and not self._of_shards and not self._tree.is_last:
            raise ShardstackError(
                "a backward before the last of a step was to be reduced by itself, and reproducible_across_ranks "
                "reduces the sum of all; put every backward of a step but the last inside no_sync"
            )
        if self._reduced_in == current_backward():  # two addends of torch's sum, where the tree has one
            raise UnitError(
                f"{self.unit} ran twice in one forward, and FSDP2 adds the gradient of each run by itself; for "
                "reproducible_across_ranks make its parent the unit, or use FullyShardedDataParallel"
            )
        self._reduced_in = current_backward()


def _keep_for_this_stream(tensor: Tensor) -> None:
    """Keeps the memory of a sum until the current stream, which may not have allocated it, is done with it."""
    if streams.is_asynchronous(tensor.device):
        streams.used_on(tensor, streams.current_stream())
