"""Views a rank's piece of a parameter, or a run of its elements, as a part of the whole model's parameter.

A parameter can be split twice. Tensor parallelism splits the layer: the rank holds a plain tensor, and Megatron's
attributes ``tensor_model_parallel`` and ``partition_dim`` say how it was split. Experts are split by dim 0 first, over
expert parallelism (``expert_model_parallel``), and then over tensor-parallel ranks of their own. FSDP then shards this
rank's piece: the parameter becomes a DTensor over the data-parallel mesh. :func:`global_view` joins both into one
DTensor of the whole parameter, without copies or communication. Every other file (checkpoints, gradient norms,
exports, initialisation) reads shapes and offsets from it instead of computing them.

The joint mesh has tp, or ep and the experts' tp, as *outer* axes, because DTensor applies placements from the left:
``(Shard(0), Shard(0))`` means the even tp split first and FSDP's split inside it, in the order in which they were
made, for any sizes.

A wrapper's flat buffers are split into equal shares, whose limits fall anywhere inside a parameter. A run of an
n-dimensional tensor's elements, in row-major order, is at most ``2n - 1`` boxes: the rest of the row that it begins
in, whole rows, and the beginning of the row that it ends in, with rows split recursively. :func:`flat_range_view`
makes each box a view of the flat storage, which checkpoints are written from and read into without a gather or a copy.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..base import device
from ..base.errors import CheckpointError, ParallelConfigError
from ..base.parameters import is_packed, kept_range, local_part
from ..process_groups_config import groups_in_effect

_OUTER_AXES = ("tp", "ep", "expert_tp")
_INNER_AXES = {1: ("dp",), 2: ("dp_replicate", "dp_shard")}


def global_view(param: Tensor, tensor: Tensor | None = None) -> Tensor:
    """Returns the whole model's tensor whose piece `param` is. Shares storage and never requires gradients.

    Args:
        param: a parameter or buffer, plain or sharded by FSDP2, with Megatron's attributes if tp splits it.
        tensor: viewed instead of `param`, in `param`'s layout: a moment, a master weight or a gradient, plain or
            DTensor, in the shape of this rank's piece of `param`; any dtype.

    Returns:
        Without tensor parallelism the tensor itself: plain if `param` is plain, else a DTensor on `param`'s mesh. With
        it a DTensor with placements ``(Shard(partition_dim) | Replicate(), *param.placements)`` on the mesh
        ``(tp, *param.device_mesh)``, or on ``(tp,)`` if `param` is plain; of experts on ``(ep, expert_tp, ...)``.
        Data-parallel ranks outside of the mesh hold replicas.

    Raises:
        ParallelConfigError: the split is interleaved (``partition_stride`` above 1), or the piece does not have the
            shape that its layout gives.
    """
    value = _detach(param if tensor is None else tensor)
    local = local_part(value)
    own_part = local_part(_detach(param))
    if local.shape != own_part.shape:
        raise ParallelConfigError(
            f"a tensor of shape {tuple(local.shape)} cannot be viewed like a parameter whose piece on this rank has "
            f"shape {tuple(own_part.shape)}; give the tensor that belongs to this piece"
        )
    mesh, placements, shape = _layout(param, local.device.type)
    if mesh is None:
        return value
    if isinstance(value, DTensor) and value.device_mesh == mesh and value.placements == placements:
        return value
    _check_piece(local.shape, mesh, placements, shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def global_shape(param: Tensor) -> torch.Size:
    """Returns the shape of the whole model's tensor whose piece `param` is. See :func:`global_view`."""
    return _layout(param, param.device.type)[2]


def local_slices(param: Tensor) -> tuple[slice, ...]:
    """Returns the slices of the whole tensor that this rank holds: ``full[local_slices(param)]`` is the local piece.

    An empty piece has empty slices. Raises as :func:`global_view` does.
    """
    mesh, placements, shape = _layout(param, param.device.type)
    if mesh is None:
        return tuple(slice(0, size) for size in shape)
    sizes, offsets = _check_piece(local_part(param).shape, mesh, placements, shape)
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def local_tensor(value: Tensor) -> Tensor:
    """Returns this rank's piece of `value` as a plain, detached tensor that shares its storage. Flat for a
    `FlatRange`."""
    return value.elements if isinstance(value, FlatRange) else local_part(_detach(value))


def _layout(param: Tensor, device_type: str) -> tuple[DeviceMesh | None, tuple[Placement, ...], torch.Size]:
    """Returns the mesh, placements and global shape of `param`. No mesh if the plain tensor is already the whole."""
    inner = param.device_mesh if isinstance(param, DTensor) else None
    inner_placements = tuple(param.placements) if isinstance(param, DTensor) else ()
    outer = _outer_cuts(param)
    if not outer or (inner is not None and set(inner.mesh_dim_names or ()).intersection(_OUTER_AXES)):
        if inner is not None and device_type not in (inner.device_type, "meta"):
            inner = _mesh((), inner, device_type)  # CPU-offloaded: DTensor would copy it to the mesh's device
        return inner, inner_placements, param.shape

    shape = list(param.shape)
    for cut in outer:
        if isinstance(cut.placement, Shard):
            shape[cut.placement.dim] *= cut.group.size()
    if device_type == "meta":
        device_type = inner.device_type if inner is not None else device.device_type()
    placements = (*(cut.placement for cut in outer), *inner_placements)
    return _mesh(outer, inner, device_type), placements, torch.Size(shape)


class _OuterCut(NamedTuple):
    """How ranks of one axis share a layer's parameter, before any sharding."""

    axis: str
    group: ProcessGroup
    placement: Placement


def _outer_cuts(param: Tensor) -> list[_OuterCut]:
    """Returns the cuts of a parameter by its layer, the outer one first. There is none over a single rank."""
    found = groups_in_effect(names=("tp", "ep", "expt_tp"))
    groups = {"tp": found.tp}
    if getattr(param, "expert_model_parallel", False) and found.experts_are_apart:
        groups = {"ep": found.ep, "expert_tp": found.expt_tp}
    several = {axis: group for axis, group in groups.items() if group is not None and group.size() > 1}
    return [_OuterCut(axis, group, _outer_placement(param, axis)) for axis, group in several.items()]


def _outer_placement(param: Tensor, axis: str) -> Placement:
    if axis == "ep":
        return Shard(0)
    return Shard(_partition_dim(param)) if getattr(param, "tensor_model_parallel", False) else Replicate()


def is_piece(tensor: Tensor) -> bool:
    """Returns whether a tensor is one rank's piece of a layer's parameter, which `global_view` has not joined."""
    is_joined = isinstance(tensor, DTensor) and set(tensor.device_mesh.mesh_dim_names or ()).intersection(_OUTER_AXES)
    return not is_joined and any(isinstance(cut.placement, Shard) for cut in _outer_cuts(tensor))


def _check_piece(
    piece: Sequence[int], mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns sizes and offsets of this rank's piece, which has to have the shape `piece`."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if tuple(sizes) != tuple(piece):
        raise ParallelConfigError(
            f"a piece of shape {tuple(piece)} does not fit a tensor of shape {tuple(shape)} placed as "
            f"{placements} on the mesh {tuple(mesh.shape)}: {tuple(sizes)} would; tensor-parallel pieces must be "
            "of equal size (pad the dimension)"
        )
    return tuple(sizes), tuple(offsets)


def _partition_dim(param: Tensor) -> int:
    stride = getattr(param, "partition_stride", 1)
    if stride != 1:
        raise ParallelConfigError(
            f"a parameter of shape {tuple(param.shape)} has partition_stride={stride}: interleaved tensor-parallel "
            "splits are not contiguous in the whole tensor; lay the rows out so that each rank's are, and use stride 1"
        )
    dim = getattr(param, "partition_dim", None)
    if not isinstance(dim, int) or not 0 <= dim < param.ndim:
        raise ParallelConfigError(
            f"a tensor-parallel parameter of shape {tuple(param.shape)} has partition_dim={dim!r}; "
            f"it takes a dimension from 0 to {param.ndim - 1}"
        )
    return dim


def _detach(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) else tensor


_joint_meshes: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, DeviceMesh]] = weakref.WeakKeyDictionary()
"""The meshes that `_mesh` has made, by their first group. Later groups of equal ranks and names do not get those of
destroyed ones."""


def _mesh(outer: Sequence[_OuterCut], inner: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """Returns the mesh ``(*outer, *inner)`` of existing groups. `device_type` is that of the local tensors."""
    inner_groups = [] if inner is None else [inner.get_group(axis) for axis in range(inner.ndim)]
    groups = [*(cut.group for cut in outer), *inner_groups]
    key = (tuple(group.group_name for group in groups), device_type)
    meshes = _joint_meshes.setdefault(groups[0], {})
    if key in meshes:
        return meshes[key]
    names = tuple(cut.axis for cut in outer)
    ranks = torch.tensor(torch.distributed.get_rank(), dtype=torch.int)
    if inner is not None:
        names += tuple(inner.mesh_dim_names or _INNER_AXES.get(inner.ndim) or (f"dp_{i}" for i in range(inner.ndim)))
        ranks = inner.mesh.to(torch.int)
    # Ranks are numbered linearly along every axis of a parallel layout (sum of coordinate x stride), so that this
    # rank's column of each outer axis and its data-parallel plane give the whole mesh without communication.
    for cut in reversed(outer):
        column = torch.tensor(torch.distributed.get_process_group_ranks(cut.group), dtype=torch.int)
        ranks = (column - torch.distributed.get_rank()).view(-1, *([1] * ranks.ndim)) + ranks
    if len(ranks.unique()) != ranks.numel():
        raise ParallelConfigError(
            f"ranks {[torch.distributed.get_process_group_ranks(group) for group in groups]} along the axes "
            f"{', '.join(names)} do not span a grid; shard over parallel_state.get_data_parallel_mesh(), and experts "
            "over get_expert_data_parallel_mesh()"
        )
    if len(groups) == 1:
        meshes[key] = DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    else:
        meshes[key] = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
    return meshes[key]


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
        ParallelConfigError: as :func:`global_view` does.
    """
    if values.ndim != 1 or not values.is_contiguous() or not 0 <= start <= start + len(values) <= param.numel():
        raise CheckpointError(
            f"values of shape {list(values.shape)} from element {start} on are no run of a parameter of shape "
            f"{list(param.shape)}; give a contiguous tensor of one dimension that ends within {param.numel()} elements"
        )
    origin = [part.start for part in local_slices(param)]
    boxes = boxes_of_range(tuple(param.shape), start, start + len(values))
    own_boxes = [(tuple(a + b for a, b in zip(origin, offsets, strict=True)), sizes) for offsets, sizes in boxes]
    return FlatRange(values.detach(), tuple(global_shape(param)), own_boxes)


def whole_view(tensor: Tensor) -> Tensor:
    """Returns the whole model's tensor whose piece a parameter or buffer is. Shares storage.

    :func:`global_view`, or `flat_range_view` where a wrapper keeps a range of the parameter.
    """
    kept_elements = kept_range(tensor)
    view = global_view(tensor) if kept_elements is None else flat_range_view(tensor, *kept_elements)
    return noting_copy(view, tensor)


def noting_copy(view: Tensor, param: Tensor) -> Tensor:
    """Returns the view of a tensor of `param`, marked if that is the copy of a weight of another pipeline stage
    (Megatron-LM's mark `shared`), or holds packed codes."""
    if getattr(param, "shared", False):
        view.shared = True  # type: ignore[attr-defined]
    if is_packed(param):
        view.holds_codes = True  # type: ignore[attr-defined]
    return view


def can_be_cast(dtype: torch.dtype, tensor: Tensor) -> bool:
    """Returns whether values of a dtype may be rounded to a tensor's dtype: both are floating, and no packed codes."""
    return dtype.is_floating_point and tensor.dtype.is_floating_point and not is_packed(tensor)


def is_copy(tensor: Tensor) -> bool:
    """Returns whether a view is of a copy: it is filled as others, and never written or counted, as stages may cut the
    weight in different ways."""
    return getattr(tensor, "shared", False)


def held_boxes(tensor: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Returns the boxes of a whole-model tensor that this rank holds: the offsets of each, and a view of its storage.

    Args:
        tensor: a result of :func:`global_view` or :func:`flat_range_view`; a plain tensor is the
            whole one.
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
    first, start_in_row = divmod(start, row)
    last, end_in_row = divmod(end, row)
    if first == last:  # the run ends in the row that it begins in
        return _inside_row(shape, first, start_in_row, end_in_row)
    boxes: list[Box] = []
    if start_in_row:
        boxes += _inside_row(shape, first, start_in_row, row)
        first += 1
    if first < last:
        boxes.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    if end_in_row:
        boxes += _inside_row(shape, last, 0, end_in_row)
    return boxes


def _inside_row(shape: Sequence[int], index: int, start: int, end: int) -> list[Box]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes_of_range(shape[1:], start, end)]


class FlatRange(Tensor):
    """A tensor with the whole model's shape and dtype. This rank has a run of its elements in one flat tensor.

    Made for checkpoints: `save` writes it and `load` fills it in place. It has no arithmetic; compute with `elements`.
    """

    elements: Tensor
    """`[n]`: the elements of this rank."""

    boxes: list[Box]
    """Boxes of `elements` in the whole tensor, in the same order."""

    @staticmethod
    def __new__(cls, elements: Tensor, shape: tuple[int, ...], boxes: list[Box]) -> FlatRange:
        tensor: FlatRange = Tensor._make_wrapper_subclass(cls, shape, dtype=elements.dtype, device=elements.device)
        tensor.elements = elements
        tensor.boxes = boxes
        return tensor

    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Returns for each box its offsets in the whole tensor and a view of `elements` in the box's shape."""
        sizes = [sizes for _, sizes in self.boxes]
        runs = self.elements.split([math.prod(size) for size in sizes]) if sizes else ()
        return [(offsets, run.view(size)) for (offsets, size), run in zip(self.boxes, runs, strict=True)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FlatRange(shape={list(self.shape)}, dtype={self.dtype}, {len(self.elements)} elements here)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            whole: FlatRange = args[0]
            return FlatRange(whole.elements, tuple(whole.shape), whole.boxes)
        raise CheckpointError(
            f"{func} was called on a tensor that this rank holds a flat range of; compute with its `elements`, or "
            "save it and load it into whole tensors; of a wrapped model's parameter, use it inside whole_parameters()"
        )


# A wrapper's state dict has them, and `torch.load` of such a file needs no code of it: `weights_only=True` stays.
torch.serialization.add_safe_globals([FlatRange])
