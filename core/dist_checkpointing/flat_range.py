"""Views a flat run of a tensor's elements as boxes of the whole model's tensor.

A distributed optimizer splits flat buffers into equal shares, whose limits fall anywhere inside a parameter. A run of
an n-dimensional tensor's elements, in row-major order, is at most ``2n - 1`` boxes: the rest of the row that it begins
in, whole rows, and the beginning of the row that it ends in, with rows split recursively. Each box is a view of the
flat storage, so that checkpoints are written from it and read into it without a gather or a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..base.errors import CheckpointError
from ..base.local_parts import kept_range
from .global_view import global_shape, global_view, local_slices, local_tensor

T = TypeVar("T")
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, per dimension."""


def flat_range_view(param: Tensor, values: Tensor, start: int) -> FlatRange:
    """Returns the whole model's tensor whose elements `values` this rank holds. Shares storage with them.

    Args:
        param: a plain parameter, with Megatron's attributes if tp splits it; only its shape and layout are read.
        values: `[n]`, contiguous, any dtype: values for the elements ``start .. start + n`` of this rank's piece of
            `param`, in row-major order. May be empty.

    Raises:
        CheckpointError: `values` is not flat, or exceeds the parameter.
        ParallelConfigError: as :func:`~core.dist_checkpointing.global_view` does.
    """
    if values.ndim != 1 or not values.is_contiguous() or not 0 <= start <= start + len(values) <= param.numel():
        raise CheckpointError(
            f"values of shape {list(values.shape)} from element {start} on are no run of a parameter of shape "
            f"{list(param.shape)}; give a contiguous tensor of one dimension that ends within {param.numel()} elements"
        )
    origin = [part.start for part in local_slices(param)]
    boxes = boxes_of_range(tuple(param.shape), start, start + len(values))
    moved = [(tuple(a + b for a, b in zip(origin, offsets, strict=True)), sizes) for offsets, sizes in boxes]
    return FlatRange(values.detach(), tuple(global_shape(param)), moved)


def whole_view(tensor: Tensor) -> Tensor:
    """Returns the whole model's tensor whose piece a parameter or buffer is. Shares storage.

    :func:`~core.dist_checkpointing.global_view`, or `flat_range_view` where a wrapper keeps a range of the parameter.
    """
    kept_elements = kept_range(tensor)
    view = global_view(tensor) if kept_elements is None else flat_range_view(tensor, *kept_elements)
    return noting_copy(view, tensor)


def noting_copy(view: Tensor, param: Tensor) -> Tensor:
    """Returns the view of a tensor of `param`, marked if that is the copy of a weight of another pipeline stage
    (Megatron-LM's mark `shared`)."""
    if getattr(param, "shared", False):
        view.shared = True  # type: ignore[attr-defined]
    return view


def is_copy(tensor: Tensor) -> bool:
    """Returns whether a view is of a copy: it is filled as others, and never written or counted, as stages may cut the
    weight in different ways."""
    return getattr(tensor, "shared", False)


def held_boxes(tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Returns the boxes of a whole-model tensor that this rank holds: the offsets of each, and a view of its storage.

    Args:
        tensor: a result of :func:`~core.dist_checkpointing.global_view` or :func:`flat_range_view`; a plain tensor is
            the whole one.
    """
    if isinstance(tensor, FlatRange):
        return tensor.pieces()
    offsets: Sequence[int] = (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [(tuple(offsets), local_tensor(tensor))]


def overlap(first: Box, second: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the slices of two boxes with the elements that both have. None if there are none."""
    bounds = [(max(a, b), min(a + m, b + n), a, b) for a, m, b, n in zip(*first, *second, strict=True)]
    if any(start >= stop for start, stop, _, _ in bounds):
        return None
    inside = tuple(slice(start - a, stop - a) for start, stop, a, _ in bounds)
    return inside, tuple(slice(start - b, stop - b) for start, stop, _, b in bounds)


def boxes_of_range(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Returns boxes of a tensor of `shape` with its elements ``start .. end``, in row-major order."""
    if start >= end:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])
    first, skipped = divmod(start, row)
    last, taken = divmod(end, row)
    if first == last:  # the run ends in the row that it begins in
        return _inside_row(shape, first, skipped, taken)
    boxes: list[Box] = []
    if skipped:
        boxes += _inside_row(shape, first, skipped, row)
        first += 1
    if first < last:
        boxes.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if taken:
        boxes += _inside_row(shape, last, 0, taken)
    return boxes


def _inside_row(shape: Sequence[int], index: int, start: int, end: int) -> list[Box]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes_of_range(shape[1:], start, end)]


class FlatRange(Tensor):
    """A tensor with the whole model's shape and dtype. This rank has a run of its elements in one flat tensor.

    Made for checkpoints: `save` writes it and `load` fills it in place. It has no arithmetic; compute with `held`.
    """

    held: Tensor
    """`[n]`: the elements of this rank."""

    boxes: list[Box]
    """Their boxes in the whole tensor, in the order of `held`."""

    @staticmethod
    def __new__(cls, held: Tensor, shape: tuple[int, ...], boxes: list[Box]) -> FlatRange:
        tensor: FlatRange = Tensor._make_wrapper_subclass(cls, shape, dtype=held.dtype, device=held.device)
        tensor.held = held
        tensor.boxes = boxes
        return tensor

    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Returns for each box its offsets in the whole tensor and a view of `held` in the box's shape."""
        sizes = [sizes for _, sizes in self.boxes]
        runs = self.held.split([math.prod(size) for size in sizes]) if sizes else ()
        return [(offsets, run.view(size)) for (offsets, size), run in zip(self.boxes, runs, strict=True)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatRange(shape={list(self.shape)}, dtype={self.dtype}, {len(self.held)} elements here)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            whole: FlatRange = args[0]
            return FlatRange(whole.held, tuple(whole.shape), whole.boxes)
        raise CheckpointError(
            f"{func} was called on a tensor that this rank holds a flat range of; compute with its `held`, or save it "
            "and load it into whole tensors; of a wrapped model's parameter, use it inside whole_parameters()"
        )


def in_buckets(items: Iterable[tuple[T, int]], limit: int) -> list[list[T]]:
    """Returns items, each given with its size, in lists that end before they exceed a limit. An item that is larger is
    a list of its own."""
    buckets, room = list[list[T]](), 0
    for item, size in items:
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(item)
        room -= size
    return buckets
