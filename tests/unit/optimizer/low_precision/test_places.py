"""Where elements and blocks of a cut tensor are in the whole one."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from core.dist_checkpointing.global_view import FlatRange, boxes_of_range
from core.optimizer.low_precision.places import BLOCK, Places


def _cut(whole: Tensor, draws: random.Random) -> FlatRange:
    """Cuts a run of elements, or a box of any dims, as tensor parallelism and sharding do."""
    shape = tuple(whole.shape)
    if draws.random() < 0.5:
        start, end = sorted(draws.randrange(whole.numel() + 1) for _ in range(2))
        if draws.random() < 0.5:
            start = start // BLOCK * BLOCK
        boxes = boxes_of_range(shape, start, end)
    else:
        ranges = []
        for size in shape:
            start, end = sorted((draws.randrange(size), draws.randrange(1, size + 1)))
            ranges.append((0, size) if draws.random() < 0.4 else (start, max(end, start + 1)))
        boxes = [(tuple(start for start, _ in ranges), tuple(end - start for start, end in ranges))]
    parts = [whole[tuple(slice(a, a + n) for a, n in zip(*box, strict=True))].reshape(-1) for box in boxes]
    return FlatRange(torch.cat(parts) if parts else whole.view(-1)[:0], shape, boxes)


def test_places_and_blocks_are_those_of_the_whole_tensor() -> None:
    draws, kinds = random.Random(3), set()
    for _ in range(600):
        shape = [draws.choice([1, 2, 3, 5, 8]) for _ in range(draws.choice([0, 1, 2]))]
        shape.append(draws.choice([1, 64, 128, 256, 320, 512, 700]))
        part = _cut(torch.arange(math.prod(shape)).view(shape), draws)
        own, n = part.elements, len(part.elements)
        places = Places(part, torch.device("cpu"))
        start, end = sorted(draws.randrange(n + 1) for _ in range(2))
        assert places.numel == n and torch.equal(places.places(start, end), own[start:end])
        blocks = own // BLOCK
        kinds.add((places._lead is None, bool(places._lead), len(places.shared) > 0))
        order = list(dict.fromkeys(blocks.tolist()))
        numbers = torch.tensor(sorted(order) if places._lead is None else order)
        assert places.num_blocks == len(order)
        # Each element's block, found through chunks, which cut none.
        of_chunks = [places.of_blocks(a, b, numbers) for a, b in places.chunks(2 * BLOCK) if a < b]
        assert torch.equal(torch.cat(of_chunks) if of_chunks else blocks, blocks)
        values, largest = torch.randn(n), torch.zeros(len(order))
        for a, b in places.chunks(2 * BLOCK):
            if a < b:
                places.write_largest(a, b, values[a:b], largest)
        for number, found in zip(numbers, largest, strict=True):
            assert found == values[blocks == number].abs().max()
        cut = [n for n in numbers.tolist() if (blocks == n).sum() < min(BLOCK, math.prod(shape) - n * BLOCK)]
        assert places.shared_numbers == cut == [numbers[index] for index in places.shared]
        covered = {element for a, b in places.shared_ranges for element in range(a, b)}
        assert covered >= {i for i, n in enumerate(blocks.tolist()) if n in cut}
    assert len(kinds) == 4, "whole blocks alone, cut ones, shifted ones and scattered ones were not all met"
