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

from ..base.errors import ConfigError, ShardstackError
from ..comm.collectives import exchange
from ..dist_checkpointing.gathering import Part
from .stream import WeightStream

_INT_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class WeightPatch:
    """Changed elements of one tensor, with the fields of vLLM's ``SparseWeightPatch``."""

    name: str
    indices: Tensor
    """`[n]` int32, or int64 for a tensor of 2^31 elements or more: places in the flattened tensor, ascending."""
    values: Tensor
    """`[n]`: the new values, in the dtype of the tensor on the wire."""

    def apply(self, target: Tensor) -> None:
        """Writes the values into a contiguous tensor in place."""
        target.view(-1).index_copy_(0, self.indices.long(), self.values)


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
        # This rank's pieces as the receivers have them, flattened, in the wire's dtype, by name and part. `restart`
        # fills it, `acknowledge` advances it; None before the first full stream.
        self._base: dict[tuple[str, Part], Tensor] | None = None
        # Changes since the base, by piece: places in it and values. `changes` sets it, `acknowledge` applies and
        # clears it; a patch that is not acknowledged is dropped by the next `changes` or `restart`.
        self._pending: dict[tuple[str, Part], tuple[Tensor, Tensor]] = {}
        self._dtypes = {name: meta.dtype for meta, name in zip(stream.metadata(), self._sources(), strict=True)}

    def _sources(self) -> list[str]:
        return [tensor.sources[0] for tensor in self.stream.outgoing]

    def restart(self) -> None:
        """Takes the weights of this moment as the base: those that a full stream sends."""
        self.stream.check_between_steps()
        self._pending = {}
        self._base = {key: values for name in self._dtypes for key, values in self._own(name, copies=True)}

    def _own(self, name: str, *, copies: bool = False) -> Iterator[tuple[tuple[str, Part], Tensor]]:
        """Yields the pieces that this rank sends, flattened, in the wire's dtype. The first rank that holds a piece
        sends it."""
        tensors = self.stream.tensors
        owners = tensors.owners()[name]
        for part, piece in tensors.held[name].items():
            if owners[part][0] == tensors.ranks.rank:
                values = piece.detach().to(self._dtypes[name], copy=copies, memory_format=torch.contiguous_format)
                yield (name, part), values.view(-1)

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
        tensors = self.stream.tensors
        receiver = tensors.receivers[0]
        sent_by_source: dict[str, list[int]] = {}
        for number, source in enumerate(self._sources()):
            sent_by_source.setdefault(source, []).append(number)
        for names in tensors.bucket_names():
            positions, values = self._gather_changes(names, self._base, receiver)
            patches: list[WeightPatch] = []
            for name in names:
                if tensors.ranks.rank == receiver and len(positions[name]):
                    dense = _dense(tensors.views[name].shape, positions[name], values[name])
                    for number in sent_by_source[name]:
                        patches += self._patch(number, name, *dense)
            yield patches

    def _gather_changes(
        self, names: list[str], base: Mapping[tuple[str, Part], Tensor], receiver: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns, on the receiver, places in the whole tensor and values of what changed on all ranks, by name."""
        ranks = self.stream.tensors.ranks
        found = {name: self._compare(name, base) for name in names}
        counts = ranks.all_gather([len(positions) for positions, _ in found.values()])
        sends, receives = [], []
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [found[name]] for name in names}
        for rank, lengths in enumerate(counts):
            for name, length in zip(names, lengths, strict=True):
                if not length or rank == receiver:
                    continue
                if ranks.rank == rank:
                    sends += [(tensor.view(torch.uint8), receiver) for tensor in found[name]]
                elif ranks.rank == receiver:
                    pair = tuple(tensor.new_empty(length) for tensor in found[name])
                    receives += [(tensor.view(torch.uint8), rank) for tensor in pair]
                    parts[name].append(pair)  # type: ignore[arg-type]
        exchange(sends, receives, ranks.group, what=f"changes of {names[0]} to {names[-1]}")
        return (
            {name: torch.cat([positions for positions, _ in held]) for name, held in parts.items()},
            {name: torch.cat([values for _, values in held]) for name, held in parts.items()},
        )

    def _compare(self, name: str, base: Mapping[tuple[str, Part], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns places in the whole tensor and values of this rank's elements that differ from the base in a bit."""
        view = self.stream.tensors.views[name]
        positions = [torch.empty(0, dtype=torch.int64, device=view.device)]
        values = [torch.empty(0, dtype=self._dtypes[name], device=view.device)]
        for key, current in self._own(name):
            bits = _INT_OF_BYTES[current.element_size()]
            changed = (current.view(bits) != base[key].view(bits)).nonzero().view(-1)
            if len(changed):
                self._pending[key] = changed, current[changed]
                positions.append(_places(key[1], view.shape, changed))
                values.append(current[changed])
        return torch.cat(positions), torch.cat(values)

    def _patch(self, number: int, name: str, values: Tensor, mask: Tensor) -> Iterator[WeightPatch]:
        tensor = self.stream.outgoing[number]
        changed = tensor.make({name: mask}).reshape(-1).nonzero().view(-1)
        if len(changed):
            small = mask.numel() < 2**31
            yield WeightPatch(
                tensor.name,
                changed.to(torch.int32 if small else torch.int64),
                tensor.make({name: values}).reshape(-1)[changed],
            )

    def acknowledge(self) -> None:
        """Advances the base by the changes that were sent last."""
        for key, (places, values) in self._pending.items():
            if self._base is not None:
                self._base[key][places] = values
        self._pending = {}


def _places(part: Part, shape: torch.Size, places: Tensor) -> Tensor:
    """Returns places in the flattened whole tensor, given those in a flattened part."""
    if part.is_run:
        return places + part.offsets[0]
    result, rest, stride = torch.zeros_like(places), places, 1
    for offset, size, length in zip(reversed(part.offsets), reversed(part.sizes), reversed(shape), strict=True):
        result += (rest % size + offset) * stride
        rest = rest // size
        stride *= length
    return result


def _dense(shape: torch.Size, positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a whole tensor with the values at their places, and a mask of these."""
    dense = values.new_zeros(shape)
    dense.view(-1)[positions] = values
    mask = torch.zeros(shape, dtype=torch.bool, device=values.device)
    mask.view(-1)[positions] = True
    return dense, mask
