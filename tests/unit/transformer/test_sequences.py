"""Attention over a cut sequence against the same over the whole one, and the keys that queries see against masks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core import parallel_state
from core.base.errors import ConfigError, DataError
from core.tensor_parallel import get_rng_tracker, model_parallel_manual_seed
from core.transformer import TransformerConfig, attention_backend, piecewise_attention
from core.transformer.dot_product_attention import DotProductAttention
from core.transformer.piecewise_attention import attend_in_pieces
from core.transformer.sequences import (
    PackedDocuments,
    QueryPiece,
    causal_pieces,
    chunk_places,
    chunks_of_rank,
    document_pieces,
    gather_sequence,
    own_chunks,
    own_positions,
    visible_keys,
)
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.tensor_parallel.test_linear_cross_entropy import LargestTensor

LENGTH, BATCH, HEADS, GROUPS, CHANNELS = 24, 2, 4, 2, 6
DOCUMENTS = ((5, 12, 7), (1, 2, 17, 4))
"""Lengths of the documents in each row."""


def _tensors() -> list[torch.Tensor]:
    """Makes query, key, value and the gradient of the output, `[s, b, n, d]`, of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(LENGTH, BATCH, heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def document_starts() -> torch.Tensor:
    """Returns the document starts `[b, s]` of `DOCUMENTS`."""
    rows = []
    for lengths in DOCUMENTS:
        begins = [sum(lengths[:i]) for i in range(len(lengths))]
        rows.append([begin for begin, length in zip(begins, lengths, strict=True) for _ in range(length)])
    return torch.tensor(rows)


@functools.cache
def _whole(documents: bool) -> tuple[torch.Tensor, ...]:
    """Returns output and gradients by torch's own attention with an explicit mask."""
    query, key, value, grad = _tensors()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, 1, LENGTH, LENGTH)
    if documents:
        starts = document_starts()
        visible = visible & (starts[:, None, :, None] == starts[:, None, None, :])
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in leaves)
    output = F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=True).permute(2, 0, 1, 3)
    output.backward(grad)
    return (output.detach(), *(leaf.grad for leaf in leaves))


def _cut(documents: bool, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Returns the output and gradients of this rank's chunks."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size > 1:
        parallel_state.initialize_model_parallel(context_parallel_size=size)
    query, key, value, grad = (own_chunks(tensor, 0).to(dtype) for tensor in _tensors())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    group = parallel_state.get_context_parallel_group(check_initialized=False)
    output = attend_in_pieces(*leaves, own_chunks(document_starts()) if documents else None, 0.0, group)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def _of_rank(tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    chunks = tensor.chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
def test_one_rank_equals_masked_attention(documents: bool):
    for actual, expected in zip(_cut(documents), _whole(documents), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_cp_attention_and_gradients_equal_serial(size: int, documents: bool):
    for rank, tensors in enumerate(run_distributed(_cut, size, documents)):
        for actual, expected in zip(tensors, _whole(documents), strict=True):
            torch.testing.assert_close(actual, _of_rank(expected, rank, size), rtol=1e-12, atol=1e-12)


def test_bf16_error_bound():
    for rank, tensors in enumerate(run_distributed(_cut, 2, False, torch.bfloat16)):
        for actual, expected in zip(tensors, _whole(False), strict=True):
            error = (actual.double() - _of_rank(expected, rank, 2)).norm() / expected.norm()
            assert actual.dtype == torch.bfloat16 and error < 0.01


def _cut_and_gathered() -> tuple[list[int], torch.Tensor, torch.Tensor]:
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    leaf = own_chunks(torch.arange(LENGTH, dtype=torch.float32), 0).requires_grad_()
    whole = gather_sequence(leaf, parallel_state.get_context_parallel_group())
    (whole * torch.arange(LENGTH) * (dist.get_rank() + 1)).sum().backward()
    return own_positions(LENGTH // size, torch.device("cpu")).tolist(), whole.detach(), leaf.grad


def test_gather_sequence_order_and_gradients():
    for rank, (positions, whole, grad) in enumerate(run_distributed(_cut_and_gathered, 2)):
        assert positions == [[*range(6), *range(18, 24)], [*range(6, 18)]][rank]
        assert torch.equal(whole, torch.arange(LENGTH, dtype=torch.float32))
        assert grad.tolist() == [3.0 * position for position in positions]


@on_ranks(2)
def test_indivisible_sequence_is_refused():
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    with pytest.raises(DataError, match=r"22 tokens .* 4 chunks of 2 context-parallel ranks; take 20 or 24"):
        own_chunks(torch.zeros(1, 22))


def _through_the_module(kernels: bool, documents: bool, dropout: float = 0.0) -> list[torch.Tensor]:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_manual_seed(3)
    sizes = {"num_layers": 1, "hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS}
    core = DotProductAttention(TransformerConfig(**sizes, context_parallel_size=2, attention_dropout=dropout))
    query, key, value, grad = (own_chunks(tensor, 0) for tensor in _tensors())
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    packed = PackedDocuments(own_chunks(document_starts()), dist.get_rank(), 2) if documents else None
    has_kernel = attention_backend.has_kernel if kernels else lambda *unused: False
    with mock.patch("core.transformer.dot_product_attention.has_kernel", has_kernel):
        output = core(*leaves, None, documents=packed)
    output.backward(grad.flatten(2))
    get_rng_tracker().reset()
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
def test_masked_fallback_without_kernel(documents: bool):
    actual, expected = (run_distributed(_through_the_module, 2, kernels, documents) for kernels in (False, True))
    for ours, theirs in zip(actual, expected, strict=True):
        for without, with_kernel in zip(ours, theirs, strict=True):
            torch.testing.assert_close(without, with_kernel, rtol=1e-12, atol=1e-12)


def test_attention_dropout_on_cpu():
    plain, dropped = (run_distributed(_through_the_module, 2, True, False, p)[0][0] for p in (0.0, 0.5))
    assert not torch.allclose(plain, dropped)


@on_ranks(2)
def test_a_mask_over_cut_sequences_is_refused():
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    core = DotProductAttention(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2)
    )
    tensor = torch.zeros(4, 1, 2, 4)
    with pytest.raises(ConfigError, match=r"attention_mask .* context parallelism .* give document_starts"):
        core(tensor, tensor, tensor, torch.zeros(1, 1, 4, 4, dtype=torch.bool))


def _watched(mode: LargestTensor, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function within which a mode is on: it does not see into an operation from outside."""

    def watched(*args: Any) -> Any:
        with mode:
            return function(*args)

    return watched


@on_ranks(2)
def test_attention_memory_is_not_quadratic():
    keys_and_values = 2 * 512 * 2 * 8
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    leaves = [torch.randn(512 // 2, 1, 2, 8, requires_grad=True) for _ in range(3)]
    starts = (torch.arange(512) // 200 * 200).unsqueeze(0)
    group = parallel_state.get_context_parallel_group()
    largest = LargestTensor()
    forward, backward = (_watched(largest, getattr(piecewise_attention, name)) for name in ("_forward", "_backward"))
    with mock.patch.multiple(piecewise_attention, _forward=forward, _backward=backward):
        for documents in (None, own_chunks(starts)):
            attend_in_pieces(*leaves, documents, 0.0, group).sum().backward()
    assert largest.most == keys_and_values


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
