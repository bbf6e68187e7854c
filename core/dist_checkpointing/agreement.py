"""Makes the ranks of one checkpoint agree: an error on one rank is raised on all, and no rank waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..base.errors import CheckpointError, ShardstackError
from ..base.text import rank_list

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """The ranks of a process group, or this process alone if there is no group.

    Args:
        group: None means the default group, if there is one.
        alone: no communication even if there is a group.
    """

    def __init__(self, group: ProcessGroup | None = None, *, alone: bool = False) -> None:
        joined = dist.is_available() and dist.is_initialized() and not alone
        # Fixed: make a new instance after the process group is destroyed or replaced.
        self.group = group
        self.size = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0
        if self.rank < 0:
            raise CheckpointError(
                f"rank {dist.get_rank()} does not belong to the process group that it gave; only members may call"
            )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Returns the small objects of all ranks, in rank order."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def from_first(self, make: Callable[[], T], doing: str = "") -> T:
        """Calls `make` on the group's first rank, and returns its result, or raises its error, on all ranks.

        Args:
            doing: begins the message of an error.
        """
        error, outcome = self._attempt(make, doing) if self.is_first else (None, None)
        shared = [outcome]
        if self.size > 1:
            dist.broadcast_object_list(shared, src=self._first_global_rank(), group=self.group)
        return self._result(shared[0], error, doing)  # type: ignore[no-any-return]

    def decided_by_first(self, value: T, decide: Callable[[list[T]], Sequence[R]], doing: str = "") -> R:
        """Calls `decide` on the group's first rank with the small objects of all ranks, in rank order.

        Args:
            doing: begins the message of an error.

        Returns:
            this rank's entry of the result.
        """
        gathered: list[Any] = [value] * self.size
        own: list[Any] = [None]
        group, first = self.group, self._first_global_rank()
        if self.size > 1:
            dist.gather_object(value, gathered if self.is_first else None, dst=first, group=group)
        error, outcome = self._attempt(lambda: decide(gathered), doing) if self.is_first else (None, (None, ""))
        decided, message = outcome
        outcomes = [(entry, message) for entry in decided or [None] * self.size]
        if self.size > 1:
            dist.scatter_object_list(own, outcomes if self.is_first else None, src=first, group=group)
        return self._result(own[0] if self.size > 1 else outcomes[0], error, doing)  # type: ignore[no-any-return]

    def on_all(self, run: Callable[[], T], doing: str = "") -> T:
        """Runs `run` on every rank and returns its result, or raises on all if it raised on one.

        `run` must not communicate: a rank that fails would leave the others waiting inside it.

        Args:
            doing: begins the message of an error.
        """
        error, (result, message) = self._attempt(run, doing)
        return self._result((result, joined_by_rank(self.all_gather(message))), error, doing)  # type: ignore[no-any-return]

    def _attempt(self, run: Callable[[], Any], doing: str = "") -> tuple[BaseException | None, Any]:
        """Runs `run`. Returns its error, and what other ranks learn: the result, and the error's message or ``""``."""
        try:
            return None, (run(), "")
        except BaseException as error:
            if self.size == 1 and not doing:
                raise
            return error, (None, error_text(error))

    def _result(self, outcome: Any, error: BaseException | None, doing: str = "") -> Any:
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt stays an interrupt
        result, message = outcome
        if message:
            raise CheckpointError(f"{doing}{message}") from error
        return result

    def _first_global_rank(self) -> int:
        return 0 if self.group is None else dist.get_global_rank(self.group, 0)


def joined_by_rank(messages: Sequence[str]) -> str:
    """Joins the ranks' messages into one: once if all are the same, else by rank. Empty ones count as none."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(messages):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    return "; ".join(f"{rank_list(ranks)}: {text}" for text, ranks in ranks_of.items())


def error_text(error: BaseException) -> str:
    """Returns the message of an error, with the name of its type unless it is one of this library's."""
    return str(error) if isinstance(error, ShardstackError) else f"{type(error).__name__}: {error}"
