"""What travels between ranks in the place of a tensor whose values only move: contiguous, in a dtype of every backend.

Gloo reads and writes the memory of a tensor as if it were contiguous, whatever its strides, and knows neither float8
nor 16-bit integers; NCCL refuses tensors that are not contiguous. Each broadcast and gather of this library sends
`as_message` of a tensor, and `write_back` puts what arrived into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.errors import ShardstackError

_SENT_AS_THEY_ARE = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64)
)


def as_bytes(tensor: Tensor) -> Tensor:
    """Views a contiguous tensor as its bytes, `[n]`."""
    return tensor.view(-1).view(torch.uint8)


def as_message(tensor: Tensor) -> Tensor:
    """Returns a tensor's values as every backend can move them: in its shape, or as bytes `[n]`.

    Shares the tensor's memory where that is contiguous; else `write_back` copies what arrived.
    """
    message = tensor.resolve_conj().resolve_neg().contiguous()
    return message if message.dtype in _SENT_AS_THEY_ARE else as_bytes(message)


def overlaps_itself(tensor: Tensor) -> bool:
    """Returns whether a tensor has one memory for several elements, as of `Tensor.expand`."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def write_back(tensor: Tensor, message: Tensor) -> None:
    """Copies the values of a message into the tensor that it was made of, on any device. Nothing if it is that tensor.

    A tensor that overlaps itself (`Tensor.expand`) is written once for each element of its memory.

    Raises:
        ShardstackError: an element of memory was to get several values, as where the first rank's tensor does not
            overlap itself.
    """
    if message is tensor:
        return
    values = message.view(tensor.dtype).view(tensor.shape)
    distinct = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    tensor[distinct].copy_(values[distinct])
    written = tensor.contiguous()
    if written is not tensor and not torch.equal(as_bytes(written), as_bytes(values.to(tensor.device))):
        raise ShardstackError(
            f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} has one memory for several "
            "elements on this rank, for which other ranks have different values; give it its own memory on all ranks, "
            "by clone(memory_format=torch.contiguous_format)"
        )
