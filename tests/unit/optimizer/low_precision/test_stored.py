"""Columns in each format: what is read after a write, chunk by chunk, and scales of blocks that two ranks share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from core.dist_checkpointing.global_view import FlatRange, boxes_of_range
from core.optimizer.low_precision.formats import key_of, random_bits, to_bf16
from core.optimizer.low_precision.places import Places
from core.optimizer.low_precision.stored import InBlocks, Rounded, SharedScales, Stored, WithRest
from tests.unit._spawn import on_ranks

SHAPE = (7, 300)
CPU = torch.device("cpu")


def _places(start: int, end: int) -> Places:
    return Places(FlatRange(torch.zeros(end - start), SHAPE, boxes_of_range(SHAPE, start, end)), CPU)


def _values(step: int) -> Tensor:
    return torch.randn(2100, generator=torch.Generator().manual_seed(step)) * 10.0 ** (step % 3 - 1)


def _in_blocks(n: int, places: Places) -> Stored:
    return InBlocks(torch.zeros(n, dtype=torch.uint8), places, "w", "dynamic8", True, True)


COLUMNS: dict[str, Callable[[int, Places], Stored]] = {
    "rounded": lambda n, places: Rounded(torch.zeros(n, dtype=torch.bfloat16), places, "w"),
    "with rest": lambda n, places: WithRest(torch.zeros(n, dtype=torch.bfloat16), places, "w"),
    "in blocks": _in_blocks,
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_chunks_have_the_bits_of_the_whole(kind: str) -> None:
    whole, in_chunks = (COLUMNS[kind](2100, _places(0, 2100)) for _ in range(2))
    for step in range(3):
        values = _values(step)
        whole.write_all(values, step)
        for start, end in in_chunks.places.chunks(512):
            in_chunks.write(start, end, values[start:end], step)
        assert torch.equal(whole.read_all(), in_chunks.read_all())
        for name, tensor in whole.parts.items():
            assert torch.equal(tensor, in_chunks.parts[name])
        if kind == "with rest":
            assert torch.equal(whole.read_all(), values)
        if kind == "rounded":
            bits = random_bits(torch.arange(2100), key_of("w", step))
            assert torch.equal(whole.read_all(), to_bf16(values, bits).float())


@on_ranks(2)
def test_ranks_agree_on_blocks_that_are_cut() -> None:
    start, end = [(0, 1000), (1000, 2100)][dist.get_rank()]
    column, whole = _in_blocks(end - start, _places(start, end)), _in_blocks(2100, _places(0, 2100))
    shared = SharedScales([column], dist.group.WORLD, CPU)
    assert shared.num_shared == 1  # elements 768 to 1024
    for step in range(4):
        values = _values(step)
        values[[768, 1023][step % 2]] = 50.0 * (step + 1)  # the largest of the block is on either rank
        whole.write_all(values, step)
        column.write_all(values[start:end], step)
        shared.agree()
        shared.agree()  # nothing was written in between
        assert torch.equal(column.read_all(), whole.read_all()[start:end])


@on_ranks(2)
def test_nothing_is_sent_where_no_block_is_cut() -> None:
    start, end = [(0, 1024), (1024, 2100)][dist.get_rank()]
    shared = SharedScales([_in_blocks(end - start, _places(start, end))], dist.group.WORLD, CPU)
    assert shared.num_shared == 0
    if dist.get_rank() == 0:
        shared.agree()  # the other rank does not take part
