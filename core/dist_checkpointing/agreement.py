"""Makes the ranks of one checkpoint agree: on errors, which are raised on all ranks, and on who writes which piece."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..base.dtypes import DTYPES, dtype_name
from ..base.errors import CheckpointError, ShardstackError
from ..base.text import join_parts, texts_by_rank
from ..process_groups_config import ProcessGroupCollection, groups_in_effect
from .format.index import Box, Piece, TensorEntry, json_problem
from .global_view import held_boxes, is_copy, is_piece

T = TypeVar("T")
R = TypeVar("R")

_PROBLEMS_SHOWN = 50


class Ranks:
    """The ranks of a process group, or this process alone if there is no group.

    Args:
        group: None means the default group, if there is one.
        alone: no communication even if there is a group.
        error: what `from_first`, `decided_by_first` and `on_all` raise.
    """

    def __init__(
        self, group: ProcessGroup | None = None, *, alone: bool = False, error: type[ShardstackError] = CheckpointError
    ) -> None:
        has_ranks = dist.is_available() and dist.is_initialized() and not alone
        # Fixed: make a new instance after the process group is destroyed or replaced.
        self.group, self._error = group, error
        self.size = dist.get_world_size(group) if has_ranks else 1
        self.rank = dist.get_rank(group) if has_ranks else 0
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
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, make: Callable[[], T], doing: str = "") -> T:
        """Calls `make` on the group's first rank, and returns its result, or raises its error, on all ranks.

        Args:
            doing: begins the message of an error.
        """
        error, outcome = self._attempt(make, doing) if self.is_first else (None, None)
        shared = [outcome]
        if self.size > 1:
            dist.broadcast_object_list(shared, group=self.group, group_src=0)
        return self._result(shared[0], error, doing)  # type: ignore[no-any-return]

    def decided_by_first(self, value: T, decide: Callable[[list[T]], Sequence[R]], doing: str = "") -> R:
        """Calls `decide` on the group's first rank with the small objects of all ranks, in rank order.

        Args:
            doing: begins the message of an error.

        Returns:
            this rank's entry of the result.
        """
        values: list[Any] = [value] * self.size
        own: list[Any] = [None]
        if self.size > 1:
            dist.gather_object(value, values if self.is_first else None, group=self.group, group_dst=0)
        error, outcome = self._attempt(lambda: decide(values), doing) if self.is_first else (None, (None, ""))
        decisions, message = outcome
        outcomes = [(entry, message) for entry in decisions or [None] * self.size]
        if self.size > 1:
            dist.scatter_object_list(own, outcomes if self.is_first else None, group=self.group, group_src=0)
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
            raise self._error(f"{doing}{message}") from error
        return result


def pipeline_ranks(
    groups: ProcessGroupCollection | None = None, error: type[ShardstackError] = CheckpointError
) -> Ranks:
    """Returns the ranks that hold the stages of one model: this process alone if there is one, or if others are
    simulated.

    Args:
        groups: those of the model; by default those of `shardstack.parallel_state`.
    """
    group = (groups_in_effect(names=("pp",)) if groups is None else groups).pp
    is_alone = group is None or group.size() == 1 or dist.get_backend(group) == "fake"
    return Ranks(None if is_alone else group, alone=is_alone, error=error)


def joined_by_rank(messages: Sequence[str]) -> str:
    """Joins the ranks' messages into one: once if all are the same, else by rank. Empty ones count as none."""
    by_rank = [(rank, text) for rank, text in enumerate(messages) if text]
    is_same = len({text for _, text in by_rank}) == 1
    return by_rank[0][1] if is_same else "; ".join(texts_by_rank(by_rank))


def error_text(error: BaseException) -> str:
    """Returns the message of an error, with the name of its type unless it is one of this library's."""
    return str(error) if isinstance(error, ShardstackError) else f"{type(error).__name__}: {error}"


def refuse(what: str, problems: list[str]) -> None:
    """Raises CheckpointError if there are problems."""
    if problems:
        raise CheckpointError(f"{what}: {join_parts(problems, _PROBLEMS_SHOWN)}")


_MARK = "written_by_first_rank"

Key = tuple[str, Box]
"""A tensor's name, and a box of it that one rank writes as one piece."""


def of_first_rank(tensor: Tensor) -> Tensor:
    """Returns a view whose values `spread` takes from the first rank that holds them."""
    view = tensor.detach()
    setattr(view, _MARK, True)
    return view


def is_of_first_rank(tensor: Tensor) -> bool:
    """Returns whether `of_first_rank` made a view: its values may differ on other ranks."""
    return getattr(tensor, _MARK, False)


@dataclass(frozen=True)
class Offer:
    """The part of a tensor that a rank can write."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    boxes: tuple[Box, ...]
    of_first_rank: bool
    """Whether ranks that hold the same box may differ, as in a buffer: then the first of them writes it."""


def held_parts(tensor: Tensor) -> dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor]:
    """Returns the boxes of a whole-model tensor that this rank holds, and a view of the storage of each.

    Args:
        tensor: as `held_boxes` takes it. A copy of another pipeline stage's weight counts as none.
    """
    if is_copy(tensor):
        return {}
    return {(offsets, tuple(part.shape)): part.detach() for offsets, part in held_boxes(tensor) if part.numel()}


def held_pieces(state: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Returns views of all boxes that this rank holds of the tensors in `state`."""
    return {(name, Box(*box)): part for name, tensor in state.items() for box, part in held_parts(tensor).items()}


def offers(state: Mapping[str, Tensor]) -> dict[str, Offer]:
    """Returns what this rank can write of each tensor."""
    boxes: dict[str, list[Box]] = {name: [] for name in state}
    for name, box in held_pieces(state):
        boxes[name].append(box)
    return {
        name: Offer(tensor.dtype, tuple(tensor.shape), tuple(boxes[name]), is_of_first_rank(tensor))
        for name, tensor in state.items()
    }


def spread(of_ranks: Sequence[Mapping[str, Offer]]) -> list[list[Key]]:
    """Returns the boxes that each rank writes. What several ranks hold goes to the one with the fewest bytes.

    Raises:
        CheckpointError: there is no tensor.
    """
    if not any(of_ranks):
        raise CheckpointError("no rank gave a tensor to save")
    holders: dict[Key, list[int]] = {}
    for rank, offers_of_rank in enumerate(of_ranks):
        for name, offer in offers_of_rank.items():
            for box in offer.boxes:
                holders.setdefault((name, box), []).append(rank)
    keys: list[list[Key]] = [[] for _ in of_ranks]
    num_bytes = [0] * len(of_ranks)
    for (name, box), ranks in sorted(holders.items(), key=lambda item: len(item[1])):
        offer = of_ranks[ranks[0]][name]
        writer = ranks[0] if offer.of_first_rank else min(ranks, key=num_bytes.__getitem__)
        keys[writer].append((name, box))
        num_bytes[writer] += math.prod(box.sizes) * offer.dtype.itemsize
    return keys


_ALIGNMENT_BYTES = 64
"""Alignment of each piece in its file."""


def aligned(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Returns where runs of so many bytes begin one after another, each aligned, and where the last one ends."""
    starts, end = list[int](), 0
    for size in sizes:
        starts.append(-(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        end = starts[-1] + size
    return starts, end


def place_pieces(own_offers: Mapping[str, Offer], keys: Sequence[Key], file: str) -> tuple[list[Piece], int]:
    """Returns the place of each box in a file that has them in this order, and its length."""
    sizes = [math.prod(box.sizes) * own_offers[name].dtype.itemsize for name, box in keys]
    starts, end = aligned(sizes)
    places = zip(keys, starts, sizes, strict=True)
    return [Piece(box.offsets, box.sizes, file, start, size) for (_, box), start, size in places], end


def entries(own_offers: Mapping[str, Offer], keys: Sequence[Key], pieces: Sequence[Piece]) -> dict[str, TensorEntry]:
    """Returns tensors with the pieces that a rank writes. A tensor without elements has none."""
    of_name: dict[str, list[Piece]] = {name: [] for name, offer in own_offers.items() if 0 in offer.shape}
    for (name, _), piece in zip(keys, pieces, strict=True):
        of_name.setdefault(name, []).append(piece)
    return {
        name: TensorEntry(own_offers[name].dtype, own_offers[name].shape, tuple(of)) for name, of in of_name.items()
    }


def join_entries(of_ranks: Sequence[Mapping[str, TensorEntry]]) -> tuple[dict[str, TensorEntry], dict[str, int]]:
    """Returns each tensor with the pieces of all ranks, and the bytes of each file."""
    tensors: dict[str, TensorEntry] = {}
    file_bytes: dict[str, int] = {}
    for name, entry in (item for of_rank in of_ranks for item in of_rank.items()):
        earlier = tensors[name].pieces if name in tensors else ()
        tensors[name] = dataclasses.replace(entry, pieces=earlier + entry.pieces)
        for piece in entry.pieces:
            file_bytes[piece.file] = max(file_bytes.get(piece.file, 0), piece.start + piece.num_bytes)
    return tensors, file_bytes


def planned_pieces(
    state: Mapping[str, Tensor],
    metadata: Any,
    folder: Path,
    ranks: Ranks,
    decide: Callable[[list[dict[str, Offer]]], Sequence[R]],
) -> R:
    """Returns what this rank writes of a checkpoint: its entry of what `decide` makes of all `offers`. Collective.

    Raises:
        CheckpointError: on all ranks, if one gave what cannot be saved.
    """
    ranks.on_all(lambda: refuse(f"{folder} cannot be saved", unsavable(state, metadata)))
    return ranks.decided_by_first(offers(state), decide, f"saving {folder}: ")


def unsavable(state: Mapping[str, Tensor], metadata: Any) -> list[str]:
    """Returns what no checkpoint can hold of a state and its metadata."""
    problems = [problem for name, tensor in state.items() if (problem := tensor_problem(name, tensor))]
    if not isinstance(metadata, Mapping):
        problems.append(f"metadata is a {type(metadata).__name__}, and a mapping is needed")
    elif problem := json_problem(dict(metadata)):
        problems.append(problem)
    return problems


def tensor_problem(name: str, tensor: Tensor) -> str | None:
    """Returns why a tensor cannot be saved or loaded, or None."""
    if not isinstance(name, str):
        return f"the name {name!r} is no text"
    if not isinstance(tensor, Tensor):
        return f"{name} is a {type(tensor).__name__}, and only tensors are saved here: put it into metadata"
    if dtype_name(tensor.dtype) not in DTYPES or tensor.layout is not torch.strided:
        return f"{name} is {tensor.layout} {tensor.dtype}, which no checkpoint holds"
    if tensor.is_meta:
        return f"{name} is on the meta device and has no values: materialise the model first"
    if is_piece(tensor):
        return f"{name} is one tensor-parallel rank's piece, or has one rank's experts: give global_view({name})"
    return None
