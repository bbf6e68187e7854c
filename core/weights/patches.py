"""Streams only the elements that changed since the version that receivers have.

Each rank compares its own pieces with those that it sent last, as bits, in the dtype of the wire. Only positions and
values travel: nothing is gathered. The base advances when receivers have acknowledged, so that a patch that was lost
is contained in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.errors import ConfigError, ShardstackError, WeightsError
from ..base.files import brief
from ..dist_checkpointing.gathering import Outgoing, TensorStream
from ..dist_checkpointing.global_view import Box, FlatRange
from .stream import WeightStream

_Key = tuple[str, Box]
_INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WeightPatch:
    """Changed elements of one tensor, with the fields of vLLM's ``SparseWeightPatch``."""

    name: str
    indices: Tensor
    """`[n]` int32, or int64 for a tensor of 2^31 elements or more: places in the flattened tensor, ascending."""
    values: Tensor
    """`[n]`: the new values, in the dtype of the tensor on the wire."""

    def check(self, target: Tensor) -> None:
        """Raises WeightsError unless all places are in a tensor, in ascending order."""
        places = self.indices
        if places[0] < 0 or places[-1] >= target.numel() or not (places[1:] > places[:-1]).all():
            raise WeightsError(f"the patch of {brief(self.name)} has places that do not ascend, or are not in it")

    def apply(self, target: Tensor) -> None:
        """Writes the values into a contiguous tensor in place, a parameter too."""
        target.detach().view(-1).index_copy_(0, self.indices.long(), self.values)


class PatchStream:
    """Patches of a stream's weights. Every rank of the group calls each method together.

    The order of calls is `restart`, with a full stream, then `changes` after each update, and `acknowledge` after
    each of both that the receivers have confirmed. A rank keeps a copy of its own pieces in the dtype of the wire.

    Args:
        stream: what is compared and sent; its first receiver gets the patches.

    Raises:
        ConfigError: the stream adds LoRA adapters to weights, of which every element changes.
    """

    def __init__(self, stream: WeightStream) -> None:
        if any(len(tensor.sources) > 1 for tensor in stream.outgoing):
            raise ConfigError(
                "patches were asked of a stream that merges LoRA adapters, which changes every element; use "
                "WeightStream(adapters='only'), which is small, or a full stream"
            )
        self.stream = stream
        # This rank's boxes as the receivers have them, flattened, in the wire's dtype, by name and box. `restart`
        # fills it, `acknowledge` advances it; None before the first full stream.
        self._base: dict[_Key, Tensor] | None = None
        # Changes since the base, by box: places in it and values. `changes` sets it, `acknowledge` applies and
        # clears it; a patch that is not acknowledged is dropped by the next `changes` or `restart`.
        self._pending: dict[_Key, tuple[Tensor, Tensor]] = {}
        # What goes out of each of the model's tensors.
        self._sent_as: dict[str, list[Outgoing]] = {}
        for tensor in stream.outgoing:
            self._sent_as.setdefault(tensor.sources[0], []).append(tensor)

    def restart(self) -> None:
        """Takes the weights of this moment as the base: those that a full stream sends."""
        self.stream.check_between_steps()
        self._pending = {}
        self._base = {key: values for name in self.stream.views for key, values in self._own(name, copies=True)}

    def _own(self, name: str, *, copies: bool = False) -> Iterator[tuple[_Key, Tensor]]:
        """Yields the boxes that this rank sends, flattened, in the wire's dtype: those that it holds first."""
        owners, dtype = self.stream.owners[name], self.stream.dtypes[name]
        for box, part in self.stream.held[name].items():
            if owners[box][0] == self.stream.ranks.rank:
                yield (name, box), part.to(dtype, copy=copies, memory_format=torch.contiguous_format).view(-1)

    def changes(self) -> Iterator[list[WeightPatch]]:
        """Yields the changes of each bucket, in the stream's order. An empty list on ranks that do not receive, and
        where nothing changed.

        Raises:
            ShardstackError: a step has begun, or there is no base yet.
        """
        if self._base is None:
            raise ShardstackError("patches were asked for before a full stream; call restart, and send that first")
        self.stream.check_between_steps()
        self._pending = {}
        stream, rows = self.stream, dict[str, Tensor]()
        patches = {name: self._compare(name, self._base) for name in stream.views}
        counts = stream.ranks.all_gather({name: len(changed) for name, changed in patches.items()})
        for name, changed in patches.items():
            start, total = (sum(of[name] for of in part) for part in (counts[: stream.ranks.rank], counts))
            box = (start, 0), tuple(changed.shape)
            if total:  # whole once the rows that each rank has found follow each other
                rows[name] = FlatRange(changed.view(-1), (total, changed.shape[1]), [box] if len(changed) else [])
        gathered = TensorStream(
            rows, None, stream.ranks.group, receivers=stream.receivers[:1], bucket_bytes=stream.bucket_bytes
        )
        for bucket in gathered.buckets():
            yield [patch for name, changed in bucket if gathered.receives for patch in self._patches(name, changed)]

    def _compare(self, name: str, base: Mapping[_Key, Tensor]) -> Tensor:
        """Returns this rank's elements that differ from the base in a bit, `[n, bytes]`: place in the whole tensor and
        value of each."""
        view, dtype = self.stream.views[name], self.stream.dtypes[name]
        rows = [torch.empty(0, 8 + dtype.itemsize, dtype=torch.uint8, device=view.device)]
        for key, current in self._own(name):
            bits = _INT_OF_BYTES[dtype.itemsize]
            changed = (current.view(bits) != base[key].view(bits)).nonzero().view(-1)
            self._pending[key] = changed, current[changed]
            (offsets, shape), strides = key[1], torch.empty(view.shape, device="meta").stride()
            indices = zip(torch.unravel_index(changed, shape), offsets, strides, strict=True)
            places = sum(((index + offset) * stride for index, offset, stride in indices), torch.zeros_like(changed))
            columns = places.view(torch.uint8).view(-1, 8), current[changed].view(torch.uint8).view(-1, dtype.itemsize)
            rows.append(torch.cat(columns, 1))
        return torch.cat(rows)

    def _patches(self, name: str, changed: Tensor) -> Iterator[WeightPatch]:
        """Yields the patches of what goes out of one tensor, given its changed elements as `_compare` returns them."""
        shape, dtype = self.stream.views[name].shape, self.stream.dtypes[name]
        places, values = (part.contiguous().view(-1) for part in changed.split([8, dtype.itemsize], 1))
        dense = torch.zeros(shape, dtype=dtype, device=changed.device)
        mask = torch.zeros_like(dense, dtype=torch.bool)
        dense.view(-1)[places.view(torch.int64)] = values.view(dtype)
        mask.view(-1)[places.view(torch.int64)] = True
        for tensor in self._sent_as[name]:
            indices = tensor.make({name: mask}).reshape(-1).nonzero().view(-1)
            if len(indices):
                values = tensor.make({name: dense}).reshape(-1)[indices]
                yield WeightPatch(
                    tensor.name, indices.to(torch.int32 if mask.numel() < 2**31 else torch.int64), values
                )

    def acknowledge(self) -> None:
        """Advances the base by the changes that were sent last."""
        for key, (places, values) in self._pending.items():
            if self._base is not None:
                self._base[key][places] = values
        self._pending = {}
