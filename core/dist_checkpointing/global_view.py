"""Views a rank's piece of a parameter as a piece of the whole model's parameter.

A parameter can be split twice. Tensor parallelism splits the layer: the rank holds a plain tensor, and Megatron's
attributes ``tensor_model_parallel`` and ``partition_dim`` say how it was split. Experts are split by dim 0 first, over
expert parallelism (``expert_model_parallel``), and then over tensor-parallel ranks of their own. FSDP then shards this
rank's piece: the parameter becomes a DTensor over the data-parallel mesh. :func:`global_view` joins both into one
DTensor of the whole parameter, without copies or communication. Every other file (checkpoints, gradient norms,
exports, initialisation) reads shapes and offsets from it instead of computing them.

The joint mesh has tp, or ep and the experts' tp, as *outer* axes, because DTensor applies placements from the left:
``(Shard(0), Shard(0))`` means the even tp split first and FSDP's split inside it, in the order in which they were
made, for any sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import parallel_state
from ..base.errors import ParallelConfigError
from ..base.local_parts import local_part

_OUTER_AXES = ("tp", "ep", "expert_tp")
_INNER_AXES = {1: ("dp",), 2: ("dp_replicate", "dp_shard")}


def global_view(param: torch.Tensor, tensor: torch.Tensor | None = None) -> torch.Tensor:
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
    value = _detached(param if tensor is None else tensor)
    local = local_part(value)
    held = local_part(_detached(param))
    if local.shape != held.shape:
        raise ParallelConfigError(
            f"a tensor of shape {tuple(local.shape)} cannot be viewed like a parameter whose piece on this rank has "
            f"shape {tuple(held.shape)}; give the tensor that belongs to this piece"
        )
    mesh, placements, shape = _layout(param, local.device.type)
    if mesh is None:
        return value
    if isinstance(value, DTensor) and value.device_mesh == mesh and value.placements == placements:
        return value
    _check_piece(local.shape, mesh, placements, shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def global_shape(param: torch.Tensor) -> torch.Size:
    """Returns the shape of the whole model's tensor whose piece `param` is. See :func:`global_view`."""
    return _layout(param, param.device.type)[2]


def local_slices(param: torch.Tensor) -> tuple[slice, ...]:
    """Returns the slices of the whole tensor that this rank holds: ``full[local_slices(param)]`` is the local piece.

    An empty piece has empty slices. Raises as :func:`global_view` does.
    """
    mesh, placements, shape = _layout(param, param.device.type)
    if mesh is None:
        return tuple(slice(0, size) for size in shape)
    sizes, offsets = _check_piece(
        param.to_local().shape if isinstance(param, DTensor) else param.shape, mesh, placements, shape
    )
    return tuple(slice(offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Returns this rank's piece of `value` as a plain, detached tensor that shares its storage."""
    return local_part(_detached(value))


def _layout(param: torch.Tensor, device_type: str) -> tuple[DeviceMesh | None, tuple[Placement, ...], torch.Size]:
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
        device_type = inner.device_type if inner is not None else parallel_state.get_device_mesh().device_type
    placements = (*(cut.placement for cut in outer), *inner_placements)
    return _mesh(outer, inner, device_type), placements, torch.Size(shape)


class _OuterCut(NamedTuple):
    """How ranks of one axis share a layer's parameter, before any sharding."""

    axis: str
    group: ProcessGroup
    placement: Placement


def _outer_cuts(param: torch.Tensor) -> list[_OuterCut]:
    """Returns the cuts of a parameter by its layer, the outer one first. There is none over a single rank."""
    groups: dict[str, ProcessGroup | None] = {}
    if getattr(param, "expert_model_parallel", False) and parallel_state.experts_are_apart():
        groups["ep"] = parallel_state.get_expert_model_parallel_group()
        groups["expert_tp"] = parallel_state.get_expert_tensor_parallel_group()
    elif parallel_state.model_parallel_is_initialized():
        groups["tp"] = parallel_state.get_tensor_model_parallel_group()
    several = {axis: group for axis, group in groups.items() if group is not None and group.size() > 1}
    return [_OuterCut(axis, group, _outer_placement(param, axis)) for axis, group in several.items()]


def _outer_placement(param: torch.Tensor, axis: str) -> Placement:
    if axis == "ep":
        return Shard(0)
    return Shard(_partition_dim(param)) if getattr(param, "tensor_model_parallel", False) else Replicate()


def is_piece(tensor: torch.Tensor) -> bool:
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


def _partition_dim(param: torch.Tensor) -> int:
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


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) else tensor


_JOINT_MESHES = "_joint_meshes"
"""An attribute of the mesh of the parallel state: the joint meshes with its groups. `_mesh` adds to it. A later state
with equal ranks has a mesh of its own, and does not get those of destroyed groups."""
_STATELESS: dict[str, Any] = {}
"""The same without a parallel state. Never cleared."""


def _mesh(outer: Sequence[_OuterCut], inner: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """Returns the mesh ``(*outer, *inner)`` of existing groups. `device_type` is that of the local tensors."""
    inner_groups = [] if inner is None else [inner.get_group(axis) for axis in range(inner.ndim)]
    groups = [*(cut.group for cut in outer), *inner_groups]
    key = (tuple(group.group_name for group in groups), device_type)
    is_initialized = parallel_state.model_parallel_is_initialized()
    owner = vars(parallel_state.get_device_mesh()) if is_initialized else _STATELESS
    meshes: dict[Any, DeviceMesh] = owner.setdefault(_JOINT_MESHES, {})
    if key not in meshes:
        meshes[key] = _build_mesh(outer, inner, groups, device_type)
    return meshes[key]


def _build_mesh(
    outer: Sequence[_OuterCut], inner: DeviceMesh | None, groups: list[ProcessGroup], device_type: str
) -> DeviceMesh:
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
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)
