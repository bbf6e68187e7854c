"""A 64-bit hash of a whole tensor, computed as a sum over its parts, so that it does not depend on the layout.

The bytes of the whole tensor in row-major order are read as 32-bit words ``w[j]``; each is multiplied by the key of
its position::

    hash = sum over j of  w[j] * key[j]   modulo 2^64

which is multilinear hashing (Carter and Wegman, 1979). Each rank hashes its part, with zeros for the missing
bytes of a word that it holds in part, and the sum over ranks is the hash of the whole tensor. Keys are odd random
64-bit numbers that never change: the key of a position in a block times the key of the block. A change of one word is
always detected; other damage is missed about once in 2^32. The hash finds errors. It is no signature: values can be
chosen to collide.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...base.host_memory import shared_bytes

MODULUS = 1 << 64
_WORD_BYTES = 4
_BLOCK_WORDS = 1 << 15  # keys and words of a block stay in the second-level cache
_BLOCK_BYTES = _WORD_BYTES * _BLOCK_WORDS
_SLAB_BYTES = 1 << 26  # copied at a time from a tensor on a device or with gaps in memory
_HOLE_BYTES = 1 << 15  # gaps between rows up to this size are hashed as zeros, which is faster than skipping them
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = MODULUS - 1


def box_hash(values: Tensor, offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the addend of a box to the hash of the whole tensor.

    Args:
        values: the box, on any device, with any strides.
        offsets: first index of the box in the whole tensor, per dimension.
        shape: shape of the whole tensor.
    """
    if values.numel() == 0:
        return 0
    total = 0
    for slab, first in _host_slabs(values.detach()):
        begin = [offsets[0] + first, *offsets[1:]] if offsets else []
        for run, start in _runs(slab, begin, list(shape), 0):
            total += _run_hash(run, start * values.element_size())
    return total % MODULUS


def joint_hash(hashes: Mapping[str, int]) -> str:
    """Returns one hash, 16 hexadecimal digits, of the names and hashes of several whole tensors, in any order."""
    text = "".join(f"{name} {value:016x}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _host_slabs(values: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yields parts of the box along its first dimension, contiguous on the host, with their first rows."""
    if values.device.type == "cpu" and values.is_contiguous():
        yield values, 0
    elif values.ndim == 0:
        yield values.cpu(), 0
    else:
        rows = max(1, _SLAB_BYTES * len(values) // max(values.numel() * values.element_size(), 1))
        for first in range(0, len(values), rows):
            yield values[first : first + rows].cpu().contiguous(), first


def _runs(values: Tensor, offsets: list[int], shape: list[int], base: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields a contiguous box as bytes of runs of the whole tensor's elements, each with its first element's index."""
    row = math.prod(shape[1:])
    start = base + (offsets[0] * row if offsets else 0)
    if list(values.shape[1:]) == shape[1:]:
        yield shared_bytes(values), start
        return
    inner = row // shape[1]
    gap_bytes = (shape[1] - values.shape[1]) * inner * values.element_size()
    if list(values.shape[2:]) == shape[2:] and gap_bytes <= _HOLE_BYTES:
        rows = max(1, _BLOCK_BYTES // (row * values.element_size()))
        for first in range(0, len(values), rows):
            part = values[first : first + rows]
            padded_rows = torch.zeros((len(part), row * values.element_size()), dtype=torch.uint8)
            begin, size = offsets[1] * inner * values.element_size(), part.shape[1] * inner * values.element_size()
            padded_rows[:, begin : begin + size] = torch.from_numpy(shared_bytes(part)).view(len(part), size)
            yield shared_bytes(padded_rows), start + first * row
        return
    for index in range(len(values)):
        yield from _runs(values[index], offsets[1:], shape[1:], start + index * row)


def _run_hash(data: np.ndarray, start: int) -> int:
    """Returns the sum over a run of bytes that begins at byte `start` of the whole tensor."""
    keys = _position_keys()
    wide = np.empty(min(_BLOCK_WORDS, len(data) // _WORD_BYTES + 2), np.uint64)
    total = position = 0
    while position < len(data):
        block, inside = divmod(start + position, _BLOCK_BYTES)
        part = data[position : position + _BLOCK_BYTES - inside]
        first, lead = divmod(inside, _WORD_BYTES)
        if lead or len(part) % _WORD_BYTES:  # the run has only some bytes of its first or last word
            block_bytes = np.zeros(-(-(lead + len(part)) // _WORD_BYTES) * _WORD_BYTES, np.uint8)
            block_bytes[lead : lead + len(part)] = part
            words = block_bytes.view(np.uint32)
        else:
            words = part.view(np.uint32)
        factors = wide[: len(words)]
        factors[...] = words
        total += int(np.dot(factors, keys[first : first + len(words)])) * _block_key(block)
        position += len(part)
    return total % MODULUS


@cache
def _position_keys() -> np.ndarray:
    """Returns the keys of positions in a block."""
    keys: np.ndarray = splitmix64(np.arange(1, _BLOCK_WORDS + 1, dtype=np.uint64)) | np.uint64(1)
    return keys


def _block_key(block: int) -> int:
    """Returns the key of a block, from another stream. It is odd, so that a change of a block's sum changes the whole
    sum."""
    return int(splitmix64(~block % MODULUS)) | 1


def splitmix64(index: Any, seed: int = 0) -> Any:
    """Returns number `index` of SplitMix64 (Steele, Lea and Flood, 2014): of an int below 2^64, or of uint64s each."""
    x = (index * _GOLDEN + seed) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & _MASK
    return x ^ (x >> 31)
