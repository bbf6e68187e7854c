"""Direct exchanges under gloo: sums in one order to the last bit, and memory for what arrives, which is used again."""

from __future__ import annotations

import os
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.comm import collectives, gloo
from core.comm.gloo import Sum
from core.distributed import finalize_model_grads
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.comm._sums import SHARD, WHAT, added_in_pairs, addend_of, sum_of
from tests.unit.distributed._toys import batches, build, gradients, loss_of, toy


def _scatters(dtype: torch.dtype, in_place: bool, chunk_bytes: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = addend_of(rank, size, dtype)
    before = whole.clone()
    own = whole.chunk(size)[rank]
    output = own if in_place else torch.full_like(own, float("nan"))
    with mock.patch.multiple(gloo, CHUNK_BYTES=chunk_bytes, LEAST_CHUNK_BYTES=1):
        collectives.reduce_scatter(output, whole, dist.group.WORLD, what=WHAT)
    expected = sum_of(size, dtype, dtype).chunk(size)[rank]
    assert torch.equal(output, expected)
    for part in range(size):
        if part != rank:
            assert torch.equal(whole.chunk(size)[part], before.chunk(size)[part])


@pytest.mark.parametrize(("world_size", "chunk_bytes"), [(2, 2**22), (2, 64), (4, 64)])
@on_ranks("world_size")
def test_reduce_scatter_adds_in_one_order(world_size: int, chunk_bytes: int):
    for dtype, in_place in product((torch.float32, torch.float64, torch.bfloat16), (True, False)):
        _scatters(dtype, in_place, chunk_bytes)


@on_ranks(2)
def test_reductions_of_any_size_and_dtype_reuse_memory():
    gloo._idle_inboxes.clear()
    actual = []
    for numel, dtype in ((2**22, torch.float32), (2**10, torch.float64), (2**21, torch.bfloat16)):
        whole = torch.ones(numel, dtype=dtype)
        collectives.reduce_scatter(whole.chunk(2)[dist.get_rank()], whole, dist.group.WORLD, what=WHAT)
        (saved,) = gloo._idle_inboxes
        actual.append((saved.data_ptr(), saved.numel()))
    assert len(set(actual)) == 1
    assert actual[0][1] == 2 * gloo.CHUNK_BYTES


def test_inbox_memory_is_exclusive_and_not_reused_after_an_error():
    gloo._idle_inboxes.clear()
    with torch.inference_mode(), gloo._inbox_memory(64) as first, gloo._inbox_memory(64) as second:
        assert first.data_ptr() != second.data_ptr()
    (saved,) = gloo._idle_inboxes
    assert not saved.is_inference()
    with pytest.raises(RuntimeError, match="a rank has gone"), gloo._inbox_memory(32) as third:
        assert third.data_ptr() == saved.data_ptr()
        raise RuntimeError("a rank has gone")
    assert gloo._idle_inboxes == []


def test_inputs_reveal_order_and_precision():
    exact = sum_of(4, torch.float32, torch.float64)
    assert not torch.equal(sum_of(4, torch.float32, torch.float32), exact)
    rounded = sum_of(4, torch.bfloat16, torch.bfloat16)
    assert not torch.equal(rounded, sum_of(4, torch.bfloat16, torch.float32))


@pytest.mark.parametrize("directly", [True, False], ids=["direct exchange", "all-to-all and a local sum"])
@pytest.mark.parametrize(("size", "order"), [(4, ((0, 2), (1, 3))), (6, ((0, 3), (1, 4), (2, 5)))])
@on_ranks("size")
def test_reduction_follows_sum_order(size: int, order: tuple[tuple[int, ...], ...], directly: bool):
    size, rank = dist.get_world_size(), dist.get_rank()
    addends = [addend_of(other, size, torch.float32) for other in range(size)]
    expected = added_in_pairs([added_in_pairs([addends[i] for i in members]) for members in order])
    assert not torch.equal(expected, added_in_pairs(addends))
    whole, output = addends[rank].clone(), torch.empty(SHARD)
    with mock.patch.object(gloo, "exchanges_directly", lambda *unused: directly):
        collectives.reduce_scatter(output, whole.clone(), dist.group.WORLD, Sum(order=order), what=WHAT)
        uneven = whole[:-1].clone()  # every rank adds the rest
        collectives.all_reduce(uneven, dist.group.WORLD, Sum(order=order), what=WHAT)
    assert torch.equal(output, expected.chunk(size)[rank])
    assert torch.equal(uneven, expected[:-1])


TRAINED: list[tuple[str, dict[str, Any]]] = [*((kind, {}) for kind in ("ddp", "zero1", "zero2", "zero3", "fsdp2"))]


def _trains(switch: str) -> list[tuple[dict[str, torch.Tensor], int]]:
    """Returns the gradients of a step of each wrapper, and how many messages were sent directly."""
    found = []
    for kind, fields in TRAINED:
        with (
            mock.patch.dict(os.environ, SHARDSTACK_DIRECT_EXCHANGE=switch),
            mock.patch.object(gloo, "_send", wraps=gloo._send) as sent,  # on all threads
        ):
            model = build(kind, toy(), **fields)
            loss_of(model, batches(dist.get_rank())[0]).backward()
            finalize_model_grads([model])
            model.engine.parameters.settle()
        found.append((gradients(model), sent.call_count))
    return found


def test_gloo_without_direct_exchange_is_bitwise():
    for direct, plain in zip(*(run_distributed(_trains, 2, switch) for switch in "10"), strict=True):
        for case, (expected, messages), (actual, none) in zip(TRAINED, direct, plain, strict=True):
            assert all(torch.equal(actual[name], expected[name]) for name in expected), case
            assert messages > 0 and none == 0, case
