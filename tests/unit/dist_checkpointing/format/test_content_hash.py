"""The hash of a whole tensor is the sum of what its parts add, however they are cut, and shows every small error."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.dist_checkpointing.format.content_hash import MODULUS, box_hash
from core.dist_checkpointing.global_view import boxes_of_range

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64]


def values(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return (bits & 1).view(torch.bool).squeeze(-1) if dtype == torch.bool else bits.view(dtype).squeeze(-1)


def whole_hash(tensor):
    return box_hash(tensor, (0,) * tensor.ndim, tensor.shape)


def by_definition(tensor):
    """Adds one term for each word, as the module's text has it, in integers of any size."""
    from core.dist_checkpointing.format.content_hash import _BLOCK_WORDS, _block_key, _position_keys

    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    keys = [int(key) for key in _position_keys()]
    terms = (w * keys[j % _BLOCK_WORDS] * _block_key(j // _BLOCK_WORDS) for j, w in enumerate(words))
    return sum(terms) % MODULUS


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 7), min_size=0, max_size=4))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    return tuple(shape), cuts


@settings(max_examples=80, deadline=None, derandomize=True)
@given(boxes(), st.sampled_from(DTYPES))
def test_the_parts_of_any_grid_add_up_to_the_whole(shape_and_cuts, dtype):
    shape, cuts = shape_and_cuts
    tensor = values(shape, dtype)
    expected = by_definition(tensor)
    assert whole_hash(tensor) == expected
    total = 0
    for corner in itertools.product(*(range(len(c) - 1) for c in cuts)):
        part = tuple(slice(cuts[d][at], cuts[d][at + 1]) for d, at in enumerate(corner))
        total += box_hash(tensor[part], [piece.start for piece in part], shape)
    assert total % MODULUS == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(3, 70_001), (257, 300), (2, 3, 40_000), (5, 100_000, 1)], ids=str)
def test_parts_larger_than_a_block_add_up(shape, dtype):
    tensor = values(shape, dtype)
    expected = by_definition(tensor) if tensor.numel() < 100_000 else whole_hash(tensor)
    assert whole_hash(tensor) == expected
    middle = shape[1] // 3
    halves = [(tensor[:, :middle], (0, 0)), (tensor[:, middle:], (0, middle))]
    assert sum(box_hash(t, (*at, *(0,) * (len(shape) - 2)), shape) for t, at in halves) % MODULUS == expected
    assert whole_hash(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == expected  # scattered in memory
    flat, total = tensor.reshape(-1), 0
    for begin, end in ((0, 7), (7, 65_537), (65_537, flat.numel())):
        run = flat[begin:end]
        for offsets, sizes in boxes_of_range(shape, begin, end):
            num = math.prod(sizes)
            total += box_hash(run[:num].view(sizes), offsets, shape)
            run = run[num:]
    assert total % MODULUS == expected


def test_the_hash_of_zeros_a_known_tensor_and_nothing():
    assert whole_hash(torch.zeros(100)) == 0
    assert whole_hash(torch.empty(0, 3)) == 0
    # stay what they are for ever: files hold them
    assert whole_hash(torch.arange(1000.0)) == 15078264644361945088
    assert whole_hash(torch.arange(100_000)) == 15458284381469311598


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_errors_show(dtype):
    tensor = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)).to(dtype)
    honest = whole_hash(tensor)
    damaged = {"as it is": tensor.clone()}
    bits = tensor.clone().view(torch.uint8)
    for bit in range(8):
        flipped = bits.clone()
        flipped[150, 77] ^= 1 << bit
        damaged[f"bit {bit}"] = flipped.view(dtype)
    damaged["every sign"] = -tensor
    damaged["two signs"] = tensor.clone()
    damaged["two signs"][0, 1] *= -1
    damaged["two signs"][9, 3] *= -1
    damaged["rows swapped"] = tensor[[1, 0, *range(2, 300)]]
    damaged["columns swapped"] = tensor[:, [1, 0, *range(2, 500)]]
    damaged["rolled"] = tensor.roll(1)
    damaged["rolled by a block"] = tensor.reshape(-1).roll(32768).view(300, 500)
    damaged["half zero"] = torch.cat([tensor[:150], torch.zeros_like(tensor[150:])])
    damaged["half twice"] = torch.cat([tensor[:150], tensor[:150]])
    differing = {name for name, other in damaged.items() if whole_hash(other) != honest}
    assert differing == damaged.keys() - {"as it is"}
