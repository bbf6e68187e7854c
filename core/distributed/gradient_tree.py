"""Adds up a step's gradients on a rank in the order of `core.micro_batch_tree`, for every wrapper.

A wrapper adds gradients in place, as always. `GradientTree` counts the backwards of a step, and says when a sum is
complete: what holds gradients then sets it aside in its `PartialSums`, and the next gradient starts a new sum. At the
end of the step, before the last sum leaves or once it is there, what was set aside is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from .._torch_compat import NO_BACKWARD, current_backward
from ..errors import ConfigError, ShardstackError
from ..micro_batch_tree import MicroBatchTree

Begin = Callable[[int | None, bool], None]
"""Called as a backward begins, before its first gradient is stored: with `MicroBatchTree.additions` of its micro-batch
and with whether it is reduced at its end (`MicroBatchTree.reduces`)."""

Sum = Sequence[Tensor | None]
"""The gradients of some parameters, or one that holds all; None where none has come."""


class PartialSums:
    """Holds sums of micro-batches, newest last, until they are added to a later one."""

    def __init__(self) -> None:
        # Owns its tensors. Filled by `set_aside` as a backward begins; emptied by `added_to` at the end of a step, and
        # by `clear`.
        self._waiting: list[Sum] = []

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are set aside."""
        return [tensor for values in self._waiting for tensor in values if tensor is not None]

    def set_aside(self, values: Sum, additions: int) -> list[Tensor]:
        """Keeps `values`, added to the newest sums, as many as `additions`; their memory belongs to it from then on.

        Returns:
            Memory that it no longer needs.
        """
        free: list[Tensor] = []
        for _ in range(additions):
            older = self._waiting.pop()
            free += [new for old, new in zip(older, values, strict=True) if old is not None and new is not None]
            values = _added(older, values)
        self._waiting.append(values)
        return free

    def added_to(self, values: Sum) -> Sum:
        """Returns `values`, added up in place, with all that was set aside, the newest first."""
        while self._waiting:
            values = _added(values, self._waiting.pop())
        return values

    def clear(self) -> None:
        """Forgets what was set aside."""
        self._waiting.clear()


def _added(into: Sum, values: Sum) -> Sum:
    pairs = zip(into, values, strict=True)
    return [other if one is None else one if other is None else one.add_(other) for one, other in pairs]


class GradientTree:
    """The place of a step in its tree: how many backwards it has, and how many have begun.

    Args:
        mean_over: ranks whose sum becomes a mean; 1 leaves a sum.
    """

    def __init__(self, shape: MicroBatchTree, mean_over: int) -> None:
        self.shape = shape
        self._mean_over = mean_over
        # Whether the root of the tree is divided by `mean_over`; set by `expect`.
        self._divides = True
        # Micro-batches of this rank in each step; set by `expect`.
        self._count = 1
        # Backwards of this step that have begun, and the last of them; set by `enter`, cleared by `restart`.
        self._begun, self._backward = 0, NO_BACKWARD
        # Those that set sums aside: `register` adds them when a wrapper is built, and `enter` calls them.
        self._holders: list[Begin] = []

    @property
    def count(self) -> int:
        """Micro-batches of this rank in a step."""
        return self._count

    @property
    def sets_whole_gradients_aside(self) -> bool:
        """Whether whole gradients of several micro-batches of a step wait for each other."""
        return not self.shape.interleaves and self.shape.num_set_aside(self._count) > 0

    @property
    def factor(self) -> float:
        """Scale of the sum over ranks; exact, since the number of data-parallel ranks is a power of two."""
        return 1.0 / self._mean_over if self._divides else 1.0

    @property
    def reduces(self) -> bool:
        """Whether ranks add up the gradients of the backward that runs, at its end."""
        return self.shape.reduces(self._begun - 1, self._count)

    @property
    def has_entered(self) -> bool:
        """Whether the backward that runs, if any, has been noted."""
        return current_backward() in (self._backward, NO_BACKWARD)

    def register(self, begin: Begin) -> None:
        """Calls `begin` whenever a backward begins, for as long as this exists."""
        self._holders.append(begin)

    def expect(self, count: int, divides: bool) -> None:
        """Sets the number of micro-batches of each step that follows.

        Raises:
            ConfigError: it is below one.
            ShardstackError: a step has begun.
        """
        if count < 1:
            raise ConfigError(f"expect_micro_batches was given {count}; a step takes 1 micro-batch or more")
        if self._begun and (count, divides) != (self._count, self._divides):
            raise ShardstackError(
                f"expect_micro_batches was given {count} after the first backward of a step of {self._count}; call it "
                "before, or zero_grad_buffer first"
            )
        self._count, self._divides = count, divides

    def enter(self) -> None:
        """Notes the backward that runs; call it before any of its gradients is stored, once or more.

        Raises:
            ShardstackError: the step has all its backwards already.
        """
        running = current_backward()
        if running == self._backward:
            return
        if self._begun == self._count:
            raise ShardstackError(
                f"backward {self._begun + 1} of a step of {self._count}: reproducible_across_ranks adds up gradients "
                "in a tree of micro-batches; call the wrapper's expect_micro_batches(number) before the first step, "
                "run one backward for each, and zero_grad_buffer before the next step"
            )
        self._backward, number = running, self._begun
        self._begun += 1
        for begin in self._holders:
            begin(self.shape.additions(number, self._count), self.shape.reduces(number, self._count))

    def check_complete(self) -> None:
        """Raises unless the step has had all its backwards, or none.

        Raises:
            ShardstackError: says how many there were.
        """
        if self._begun not in (0, self._count):
            raise ShardstackError(
                f"gradients of a step of {self._count} micro-batches cannot be reduced after {self._begun} "
                "backwards; call the wrapper's expect_micro_batches(number) with the number of backwards of a step"
            )

    def restart(self) -> None:
        """Begins a step."""
        self._begun, self._backward = 0, NO_BACKWARD
