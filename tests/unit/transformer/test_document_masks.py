"""The keys that a rank's queries see, compared with the explicit mask."""

from collections.abc import Sequence

import pytest
import torch

from core.base.errors import DataError
from core.transformer.document_masks import (
    PackedDocuments,
    QueryPiece,
    causal_pieces,
    chunk_places,
    chunks_of_rank,
    document_pieces,
    visible_keys,
)

STARTS = torch.tensor([[0, 0, 0, 3, 3, 5, 5, 5], [0, 1, 1, 1, 1, 1, 1, 7]])  # [b, s]


def _seen(pieces: Sequence[QueryPiece], rows: int, positions: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the pairs of query and key, `[b, s / cp, s]`, that the kernels are asked for, counted."""
    seen = torch.zeros(rows, len(positions), length, dtype=torch.int)
    for piece in pieces:
        own = positions[piece.queries]
        for row in range(rows)[piece.rows]:
            for number, query in enumerate(range(len(positions))[piece.queries]):
                seen[row, query, piece.before] += 1
                seen[row, query, own[: number + 1]] += 1
    return seen


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("documents", [False, True])
def test_every_pair_is_computed_once(size: int, documents: bool):
    positions = torch.arange(8)
    visible = torch.ones(8, 8, dtype=torch.int).tril().expand(2, 8, 8)
    if documents:
        visible = visible * (STARTS[:, :, None] == STARTS[:, None, :])
    work = set()
    for rank in range(size):
        chunks = positions.chunk(2 * size if size > 1 else 1)
        own = torch.cat([chunks[chunk] for chunk in chunks_of_rank(rank, size)])
        length = len(own)
        pieces = document_pieces(STARTS[:, own], rank, size) if documents else causal_pieces(length, rank, size)
        seen = _seen(pieces, 2, own, 8)
        assert torch.equal(seen, visible[:, own])
        mask = visible_keys(STARTS[:, own] if documents else None, own, 8)
        assert torch.equal(mask[:, 0].int().expand(2, -1, -1), visible[:, own])
        work.add(int(seen.sum()))
    assert documents or len(work) == 1  # under a causal mask all ranks do the same


def test_chunk_places_restore_sequence_order():
    assert chunk_places(2) == [0, 2, 3, 1]
    held = [chunk for rank in range(4) for chunk in chunks_of_rank(rank, 4)]
    assert [held[place] for place in chunk_places(4)] == list(range(8))


def test_single_document_needs_no_extra_calls():
    assert list(document_pieces(torch.zeros(3, 8, dtype=torch.long))) == causal_pieces(8)


def test_document_pieces_are_cached():
    assert document_pieces(STARTS) is document_pieces(STARTS.int())
    assert document_pieces(STARTS) != document_pieces(STARTS.flip(0))
    assert document_pieces(STARTS[:, :4]) != document_pieces(STARTS[:1])


def test_bounds_shape_does_not_depend_on_layout():
    for starts, bounds, longest in (
        (STARTS, [0, 3, 5, 8, 9, 15, 16], 6),
        (torch.zeros(2, 8, dtype=torch.long), [0, 8, 16], 8),
        (torch.arange(8).expand(2, 8), [*range(17)], 1),
    ):
        documents = PackedDocuments(starts)
        assert documents.counts.tolist() == [len(bounds) - 1, longest]
        assert documents.bounds.dtype == torch.int32
        assert documents.bounds.tolist() == bounds + [16] * (17 - len(bounds))
    assert PackedDocuments(STARTS[:, [0, 1, 6, 7]], 0, 2).bounds is None


def test_indivisible_sequences_are_refused():
    with pytest.raises(DataError, match=r"two equal chunks .* 7 tokens are not; .* multiple of 4"):
        causal_pieces(7, 0, 2)
    with pytest.raises(DataError, match=r"position 1 of row 0 .* begins behind it, at 5"):
        PackedDocuments(torch.tensor([[0, 5, 0]]))
