"""Splits a rank's queries into pieces, each computed by one call of a causal kernel.

Context parallelism splits a sequence into 2 x cp chunks. Rank r has chunks r and 2 x cp - 1 - r, concatenated: under a
causal mask every rank then has the same work (as in Megatron-LM). Documents packed into a sequence split it further,
because they must not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import overload

import numpy as np
import torch

from ..errors import DataError


@dataclass(frozen=True)
class Piece:
    """Consecutive queries that see all keys of one earlier range, and each other causally."""

    rows: slice
    """Rows of the batch."""
    queries: slice
    """Range in this rank's part of the sequence."""
    before: slice
    """The earlier keys, as a range of the whole sequence; may be empty."""


def chunks_of_rank(rank: int, size: int) -> tuple[int, ...]:
    """Returns the chunks of the sequence that a context-parallel rank has, in its order; (0,) with one rank."""
    return (0,) if size == 1 else (rank, 2 * size - 1 - rank)


def chunk_places(size: int) -> list[int]:
    """Returns, for each chunk in the order of the sequence, its index among the concatenated chunks of all ranks."""
    held = [chunk for rank in range(size) for chunk in chunks_of_rank(rank, size)]
    return sorted(range(len(held)), key=held.__getitem__)


def causal_pieces(length: int, rank: int = 0, size: int = 1) -> list[Piece]:
    """Returns the pieces of a rank's `length` queries if every query sees all keys before it.

    Raises:
        DataError: under context parallelism, the length is not two equal chunks.
    """
    return [Piece(slice(None), queries, slice(0, start)) for queries, start in _chunks(length, rank, size)]


class DocumentPieces(Sequence[Piece]):
    """The pieces of packed documents, and where documents begin, as a kernel for all of them at once takes it.

    Not a list, so that what moves a model's inputs to its device (FSDP2) passes it on as it is.

    Args:
        pieces: by row, in each row in the order of its tokens.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = tuple(pieces)
        self._bounds: dict[torch.device, torch.Tensor] = {}  # by device, once `bounds` was asked for it

    @overload
    def __getitem__(self, index: int) -> Piece: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Piece]: ...
    def __getitem__(self, index: int | slice) -> Piece | Sequence[Piece]:
        return self._pieces[index]

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def longest(self) -> int:
        """Tokens of the longest piece."""
        return max(_length(piece) for piece in self._pieces)

    def bounds(self, device: torch.device) -> torch.Tensor:
        """Returns where pieces begin, and last where the last ends, `[pieces + 1]` in int32, in the order of rows."""
        if device not in self._bounds:
            lengths = [_length(piece) for piece in self._pieces]
            bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
            if device.type == "cuda":
                bounds = bounds.pin_memory()
            self._bounds[device] = bounds.to(device, non_blocking=True)
        return self._bounds[device]


def document_pieces(document_starts: torch.Tensor, rank: int = 0, size: int = 1) -> Sequence[Piece]:
    """Returns the pieces of a rank's queries if no query sees another document.

    Args:
        document_starts: `[b, s / cp]`, for each token of this rank the position in the whole sequence at which its
            document begins. Read on the host.

    Raises:
        DataError: a length as in `causal_pieces`, or a document that begins after one of its tokens.
    """
    rows, length = document_starts.shape
    starts = document_starts.numpy() if document_starts.device.type == "cpu" else document_starts.cpu().numpy()
    if not starts.any():
        return causal_pieces(length, rank, size)
    pieces = []
    for queries, start in _chunks(length, rank, size):
        of_chunk = starts[:, queries]
        late = of_chunk > np.arange(start, start + of_chunk.shape[1])
        if late.any():
            row, column = np.argwhere(late)[0]
            raise DataError(
                f"document_starts says that the token at position {start + column} of row {row} belongs to a document "
                f"that begins behind it, at {of_chunk[row, column]}; give positions in the whole sequence"
            )
        for row in range(rows):
            changes = np.flatnonzero(np.diff(of_chunk[row])) + 1
            for first, last in pairwise([0, *changes.tolist(), of_chunk.shape[1]]):
                begin = int(of_chunk[row, first])
                own = slice(queries.start + first, queries.start + last)
                pieces.append(Piece(slice(row, row + 1), own, slice(begin, max(begin, start))))
    return DocumentPieces(pieces)


def visible_keys(pieces: Sequence[Piece], positions: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    """Returns a mask `[b, 1, s / cp, s]` of pieces, True where a query sees a key, for devices without a fused kernel.

    Args:
        positions: `[s / cp]`, positions of the queries in the whole sequence of `length` tokens.
    """
    keys = torch.arange(length, device=positions.device)
    begins = torch.zeros(rows, len(positions), dtype=torch.long, device=positions.device)
    for piece in pieces:
        begins[piece.rows, piece.queries] = piece.before.start
    return ((keys >= begins[..., None]) & (keys <= positions[:, None])).unsqueeze(1)


def _length(piece: Piece) -> int:
    return int(piece.queries.stop - piece.queries.start)


def _chunks(length: int, rank: int, size: int) -> Sequence[tuple[slice, int]]:
    """Returns each chunk's range in the rank's part, and its start in the whole sequence."""
    held = chunks_of_rank(rank, size)
    if length % len(held):
        raise DataError(
            f"a context-parallel rank holds two equal chunks of a sequence, and {length} tokens are not; take a whole "
            f"sequence of a multiple of {2 * size} tokens and split it with core.transformer.own_chunks"
        )
    chunk = length // len(held)
    return [(slice(i * chunk, (i + 1) * chunk), number * chunk) for i, number in enumerate(held)]
