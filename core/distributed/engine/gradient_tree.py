"""Adds up a rank's gradients of a step in the order of `shardstack.base.micro_batch_tree`, under every wrapper.

A wrapper accumulates gradients in place, as always. `GradientTree` counts the backwards of a step, and knows when a
sum of micro-batches is complete. The owner of the gradients then moves the sum into its `PartialSums`, and the next
gradient starts a new sum. At the end of the step the partial sums are added to the last sum: whole gradients before
their reduction, shards after it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import ConfigError, ShardstackError
from ...base.micro_batch_tree import MicroBatchTree

Begin = Callable[[int | None, bool], None]
"""Called when a backward begins, before its first gradient is stored. Arguments: `MicroBatchTree.additions` of its
micro-batch, and `MicroBatchTree.reduces`, whether ranks add up gradients at its end."""


class PartialSums(list["Tensor | None"]):
    """Flat sums of earlier micro-batches, newest last, until they are added to a later sum.

    Owns its tensors; None is a sum without gradients. `set_aside` adds a sum when a backward begins, on autograd's
    thread; `added_to` empties it at the end of a step, and `clear` when gradients are zeroed.
    """

    @property
    def tensors(self) -> list[Tensor]:
        """All sums that are set aside."""
        return [tensor for tensor in self if tensor is not None]

    def set_aside(self, total: Tensor | None, additions: int) -> list[Tensor]:
        """Adds `total` to the newest `additions` sums, and keeps the result. Takes ownership of the memory.

        Returns:
            Tensors that are no longer needed.
        """
        free: list[Tensor] = []
        for _ in range(additions):
            older = self.pop()
            free += [total] if older is not None and total is not None else []
            total = _add(older, total)
        self.append(total)
        return free

    def added_to(self, total: Tensor) -> Tensor:
        """Adds all partial sums to `total`, in place, the newest first. Returns it."""
        while self:
            _add(total, self.pop())
        return total


def _add(into: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if into is None else into if other is None else into.add_(other)


class GradientTree:
    """Tracks a step's position in its tree: the number of backwards, and how many of them have begun.

    Autograd's thread calls it during a backward, the main thread between backwards.

    Args:
        shape: the tree over the micro-batches of all ranks.
        mean_over: number that the sum over ranks is divided by; 1 keeps the sum.
    """

    def __init__(self, shape: MicroBatchTree, mean_over: int) -> None:
        # The order of additions, which does not depend on the number of ranks.
        self.shape = shape
        self._mean_over = mean_over
        # Whether the root of the tree is divided by `mean_over`. `expect` sets it, for all steps that follow.
        self._divides = True
        # Micro-batches of this rank in each step. `expect` sets it, for all steps that follow; others only read it.
        self.count = 1
        # Whether the backwards that follow are outside `no_sync`. `Gradients.set_sync` sets it.
        self.is_synced = True
        # Number of backwards of this step that have begun, and the last of them. `enter` sets both, `restart` clears
        # them.
        self._num_begun, self._backward = 0, NO_BACKWARD
        # Callbacks that set sums aside. `register` adds them when a wrapper is built, `enter` calls them.
        self._holders: list[Begin] = []

    @property
    def sets_whole_gradients_aside(self) -> bool:
        """Whether a step keeps whole gradients of several micro-batches at the same time."""
        return not self.shape.interleaves and self.shape.num_set_aside(self.count) > 0

    @property
    def factor(self) -> float:
        """Scale of the sum over ranks. Exact, since the number of data-parallel ranks is a power of two."""
        return 1.0 / self._mean_over if self._divides else 1.0

    @property
    def reduces(self) -> bool:
        """Whether ranks add up gradients at the end of the running backward."""
        return self.shape.reduces(self._num_begun - 1, self.count)

    @property
    def is_last(self) -> bool:
        """Whether the running backward is the last of the step."""
        return self._num_begun == self.count

    @property
    def has_entered(self) -> bool:
        """Whether `enter` was called in the running backward. True if none runs."""
        return current_backward() in (self._backward, NO_BACKWARD)

    def register(self, begin: Begin) -> None:
        """Makes `enter` call `begin` at each backward's beginning, for the lifetime of the tree."""
        self._holders.append(begin)

    def expect(self, count: int, divides: bool) -> None:
        """Sets the number of micro-batches of each step that follows.

        Raises:
            ConfigError: it is below one.
            ShardstackError: a step has begun.
        """
        if count < 1:
            raise ConfigError(f"expect_micro_batches was given {count}; a step takes 1 micro-batch or more")
        if self._num_begun and (count, divides) != (self.count, self._divides):
            raise ShardstackError(
                f"expect_micro_batches was given {count} after the first backward of a step of {self.count}; call it "
                "before, or zero_grad_buffer first"
            )
        self.count, self._divides = count, divides

    def enter(self) -> None:
        """Records the running backward. Call it before each of its gradients is stored.

        Raises:
            ShardstackError: the step has all its backwards already.
        """
        running = current_backward()
        if running == self._backward:
            return
        if self._num_begun == self.count:
            raise ShardstackError(
                f"backward {self._num_begun + 1} of a step of {self.count}: reproducible_across_ranks adds up "
                "gradients in a tree of micro-batches; call the wrapper's expect_micro_batches(number) before the "
                "first step, run one backward for each, and zero_grad_buffer before the next step"
            )
        self._backward, number = running, self._num_begun
        self._num_begun += 1
        for begin in self._holders:
            begin(self.shape.additions(number, self.count), self.shape.reduces(number, self.count))

    def check_complete(self) -> None:
        """Raises unless the step has had all its backwards, or none.

        Raises:
            ShardstackError: says how many there were.
        """
        if self._num_begun not in (0, self.count):
            raise ShardstackError(
                f"gradients of a step of {self.count} micro-batches cannot be reduced after {self._num_begun} "
                "backwards; call the wrapper's expect_micro_batches(number) with the number of backwards of a step"
            )

    def restart(self) -> None:
        """Begins a step."""
        self._num_begun, self._backward = 0, NO_BACKWARD
