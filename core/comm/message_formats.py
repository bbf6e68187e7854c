"""How parameters and gradients travel between ranks in fewer bits: in bf16, or in blocks of 8-bit codes.

A block is 256 elements that follow each other in a tensor, with a scale in fp32, their largest magnitude. Blocks do
not depend on the number of ranks: ranks that encode their shards send what one rank would send for the whole tensor.
Each decodes to the same values, and what was decoded has the same codes again.

For a block with the largest magnitude `m` a decoded value differs from `x` by at most ``m / 254`` in ``int8``, and by
``max(|x| / 16, m / 458_752)`` in ``fp8`` (e4m3: 3 bits of a mantissa, steps of 1/512 below 1/64, 448 at most); in
``bf16`` by ``|x| / 256``. A block with an element that is not finite has no finite one after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.fused import Fused
from .call import FunctionWork

BLOCK = 256
"""Elements, as in ZeRO++ (Wang et al., 2023) and 8-bit optimizers."""

OWN_DTYPE = "own"
"""The format of what travels as it is, next to others."""

_CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0), "bf16": (torch.bfloat16, None)}
"""The dtype of codes, and the code of a block's largest element. None: values are cast, without blocks."""


def message_bytes(name: str | None, numel: int, dtype: torch.dtype) -> int:
    """Returns the bytes of `numel` elements in a format, or for None in their own `dtype`."""
    if name in (None, OWN_DTYPE):
        return numel * dtype.itemsize
    codes, most = _CODES[name]
    return numel * codes.itemsize + (0 if most is None else numel // BLOCK * torch.float32.itemsize)


def has_whole_blocks(shape: Sequence[int]) -> bool:
    """Returns whether rows of a tensor are whole blocks, so that no cut by rows splits one."""
    return len(shape) > 1 and bool(row := torch.Size(shape[1:]).numel()) and row % BLOCK == 0


class MessageFormat:
    """How the shard of one rank travels: runs of its elements in codes, and the rest as it is.

    Args:
        segments: numbers of elements and formats (``int8``, ``fp8``, ``bf16``, or `OWN_DTYPE`) of what follows each
            other in every shard, in at most one format besides `OWN_DTYPE`.
        dtype: of shards before they are encoded.
    """

    def __init__(self, segments: Iterable[tuple[int, str]], dtype: torch.dtype) -> None:
        self._dtype, self._runs, self._rest, end = dtype, list[slice](), list[slice](), 0
        name = "bf16"
        for length, of_run in segments:
            (self._rest if of_run == OWN_DTYPE else self._runs).append(slice(end, end + length))
            end, name = end + length, name if of_run == OWN_DTYPE else of_run
        (self._code_dtype, self._most), self._shard_numel = _CODES[name], end
        coded, rest = (sum(run.stop - run.start for run in runs) for runs in (self._runs, self._rest))
        code_bytes = coded * self._code_dtype.itemsize
        # Of a message: scales, what is not encoded, and codes.
        self._sizes = (message_bytes(name, coded, dtype) - code_bytes, rest * dtype.itemsize, code_bytes)

    def encode(self, shards: Tensor) -> Tensor:
        """Returns the messages of one or more shards, one after the other, as bytes in uint8."""
        rows = shards.detach().view(-1, self._shard_numel)
        codes, scales = [], []
        for run in self._runs:
            if self._most is None:
                codes.append(rows[:, run].to(self._code_dtype))
                continue
            of_run, largest = _to_codes(rows[:, run].reshape(-1, BLOCK), self._most, self._code_dtype)
            codes.append(of_run.view(len(rows), -1))
            scales.append(largest.view(len(rows), -1))
        fields = (*scales, *(rows[:, run].contiguous() for run in self._rest), *codes)
        return torch.cat([field.view(torch.uint8) for field in fields], 1).flatten()

    def decode(self, messages: Tensor, shards: Tensor) -> None:
        """Writes the values of messages into `shards`, of any dtype."""
        rows = shards.detach().view(-1, self._shard_numel)
        scales, rest, codes = messages.view(len(rows), -1).split(self._sizes, 1)
        if self._rest:
            _write(rows, self._rest, _as(self._dtype, rest))
        if not self._runs:
            return
        codes = _as(self._code_dtype, codes)
        if self._most is not None:
            largest = _as(torch.float32, scales).flatten()
            codes = _to_values(codes.view(-1, BLOCK), largest, self._most, rows.dtype).view(len(rows), -1)
        _write(rows, self._runs, codes)

    def gather(
        self, shards: Tensor, own: Tensor, num_ranks: int, gather: Callable[[Tensor, Tensor], dist.Work | None]
    ) -> dist.Work | None:
        """Gathers the shards of `num_ranks` ranks, of which `own` is this one's, into `shards`.

        Args:
            gather: gathers messages into its first argument from its second, and returns work where it goes on.
        """
        message = self.encode(own)
        messages = message.new_empty(num_ranks * len(message))
        work = gather(messages, message)

        def end() -> None:
            if work is not None:
                work.wait()
            self.decode(messages, shards)

        if work is not None:
            return FunctionWork(end)
        end()
        return None


def format_of_all(name: str | None, numel: int, dtype: torch.dtype) -> MessageFormat | None:
    """Returns the format in which all `numel` elements of a shard travel, or None if they do as they are."""
    return None if name is None else MessageFormat([(numel, name)], dtype)


def _as(dtype: torch.dtype, field: Tensor) -> Tensor:
    """Returns bytes of messages `[messages, bytes]` as elements, in memory that is aligned for them."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def _write(rows: Tensor, runs: Sequence[slice], values: Tensor) -> None:
    for run, of_run in zip(runs, values.split([run.stop - run.start for run in runs], 1), strict=True):
        rows[:, run] = of_run


@Fused
def _to_codes(blocks: Tensor, most: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns codes `[blocks, 256]` and scales `[blocks]`."""
    values = blocks.float()
    low, high = values.aminmax(dim=1)
    scales = torch.maximum(high, -low)
    codes = values / torch.where(scales == 0, 1.0, scales).unsqueeze(1) * most
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scales


@Fused
def _to_values(codes: Tensor, scales: Tensor, most: float, dtype: torch.dtype) -> Tensor:
    # Divided, so that the largest code is exactly the largest element.
    return (codes.float() / most * scales.unsqueeze(1)).to(dtype)
