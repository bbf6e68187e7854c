"""Finds the mesh that an adapter shards a model over, and the units that it shards.

The mesh has axes found by name, all ranks, or a hybrid of machines. Units are chosen by parameter count, by class or
by the dotted path of a class.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ... import parallel_state
from ...base import device
from ...base.errors import ParallelConfigError, WrapError
from ...base.text import choices
from ...distributed.plan.units import CONTAINERS, class_names, resolve_names
from ...rendezvous import default_group

TENSOR_AXES = ("tensor_parallel", "tp")
CONTEXT_AXES = ("context_parallel", "cp")
REPLICATE_AXIS = "dp_replicate"
SHARD_AXES_OF_HYBRID = ("dp_shard_cp", "dp_shard")
SHARD_AXES = ("dp_cp", "data_parallel", "dp_shard_cp", "dp_shard", "dp")
_HYBRID = ("dp_replicate", "dp_shard")
_WITH_CONTEXT = ("dp_cp", "dp_shard_cp")
"""Axes that have context parallelism in them already."""


@dataclass(frozen=True)
class MeshAxes:
    """The axes of a mesh that a wrapper works over.

    Attributes:
        data: the ranks that share parameters, context parallelism included: one axis, or with hybrid sharding
            ``(replicate, shard)``.
        tensor: the tensor-parallel axis; None where it has one rank, or there is none.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None


def mesh_axes(device_mesh: DeviceMesh) -> MeshAxes:
    """Finds axes by name (`SHARD_AXES` and the others), flattened ones first.

    An axis ``dp_replicate`` of several ranks makes it a hybrid. A context-parallel axis of several ranks is flattened
    into the one that is sharded over, unless that has been done (``dp_cp``, ``dp_shard_cp``).

    Raises:
        ParallelConfigError: no axis to shard over.
    """
    axis_names = tuple(device_mesh.mesh_dim_names or ())
    tensor = next((device_mesh[name] for name in TENSOR_AXES if name in axis_names), None)
    has_replicas = REPLICATE_AXIS in axis_names and device_mesh[REPLICATE_AXIS].size() > 1
    allowed = SHARD_AXES_OF_HYBRID if has_replicas else SHARD_AXES
    if (shard := next((name for name in allowed if _axis(device_mesh, name) is not None), None)) is None:
        strays = [name for name in axis_names if name not in (*TENSOR_AXES, *CONTEXT_AXES, REPLICATE_AXIS)]
        raise ParallelConfigError(
            f"the mesh has the axes {', '.join(axis_names) or '(without names)'}, none of which is a data-parallel "
            f"one that parameters could be sharded over: {choices(strays[0] if strays else '', allowed)}"
            + (f", next to {REPLICATE_AXIS}" if has_replicas else "")
            + "; tensor parallelism is the axis tensor_parallel or tp"
        )
    context = next((name for name in CONTEXT_AXES if name in axis_names and device_mesh[name].size() > 1), None)
    if context is not None and shard not in _WITH_CONTEXT:
        joined = tuple(name for name in axis_names if name in (shard, context))
        shard = "dp_shard_cp" if shard == "dp_shard" else "dp_cp"
        device_mesh[joined]._flatten(shard)
    data = _sliced(device_mesh, (REPLICATE_AXIS, shard) if has_replicas else shard)
    return MeshAxes(data, tensor if tensor is not None and tensor.size() > 1 else None)


def axis_sizes(device_mesh: DeviceMesh) -> str:
    """Returns the mesh's axes as a message shows them."""
    names: Iterable[str] = device_mesh.mesh_dim_names or map(str, range(device_mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, device_mesh.shape, strict=True))


def _axis(device_mesh: DeviceMesh, name: str) -> DeviceMesh | None:
    try:
        return _sliced(device_mesh, name)
    except (KeyError, RuntimeError):  # torch has no public way to ask for the names of flattened axes
        return None


def _sliced(device_mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
    with warnings.catch_warnings():  # torch would have flattened axes kept by who makes them: here that is the user
        warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
        return device_mesh[names]


def data_parallel_mesh(device_mesh: DeviceMesh | None, *, hybrid: bool) -> DeviceMesh:
    """Returns the mesh that a model is sharded over.

    Args:
        device_mesh: the user's, whose axes are found by name; else that of `shardstack.parallel_state` where it is
            initialised; else all ranks, by ``LOCAL_WORLD_SIZE`` in a hybrid.
        hybrid: two axes, ``(replicate, shard)``; otherwise one.

    Raises:
        ParallelConfigError: ranks that ``LOCAL_WORLD_SIZE`` does not divide, or a mesh without axes for it.
    """
    default_group.init_process_group()
    if device_mesh is not None:
        data = mesh_axes(device_mesh).data
    elif parallel_state.model_parallel_is_initialized():
        data = parallel_state.get_data_parallel_mesh()
    else:
        data = world_mesh(1)
    if hybrid and data.ndim == 1:
        world, local_size = data.size(), os.environ.get("LOCAL_WORLD_SIZE", str(data.size()))
        if not local_size.isdecimal() or not 0 < int(local_size) <= world or world % int(local_size):
            raise ParallelConfigError(
                f"LOCAL_WORLD_SIZE is {local_size!r}, which does not divide the {world} data-parallel ranks; set "
                "it to a machine's ranks, give a device_mesh, or choose a strategy that is not hybrid"
            )
        return _of_two_axes(data, int(local_size))
    return data._flatten() if data.ndim == 2 and not hybrid else data


def fully_replicated(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the same ranks, each with a whole copy: the mesh of a hybrid whose shards have one rank each."""
    return _of_two_axes(mesh, 1)


def world_mesh(num_replicas: int) -> DeviceMesh:
    """Returns the mesh of all ranks. It has one axis, or with several replicas ``(dp_replicate, dp_shard)``.

    Raises:
        ParallelConfigError: a number that does not divide the ranks.
    """
    ranks = dist.get_world_size()
    if ranks % num_replicas:
        raise ParallelConfigError(
            f"num_distributed_optimizer_instances {num_replicas} does not divide {ranks} ranks; take a divisor"
        )
    mesh = init_device_mesh(device.device_type(), (ranks,), mesh_dim_names=("dp_shard",))
    return mesh if num_replicas == 1 else _of_two_axes(mesh, ranks // num_replicas)


def _of_two_axes(mesh: DeviceMesh, shard_size: int) -> DeviceMesh:
    if mesh.size() != dist.get_world_size():  # new groups are made by all processes, in one order
        raise ParallelConfigError(
            f"the mesh has {mesh.size()} data-parallel ranks of {dist.get_world_size()} in one axis; give it two, "
            "dp_replicate and dp_shard, for a hybrid or for replicas in mixed precision"
        )
    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, shard_size), mesh_dim_names=_HYBRID)


def units_by_size(model: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Returns the modules with at least `min_num_params` parameters outside of the units inside them.

    As torch's `size_based_auto_wrap_policy`: looked for from the inside out; `nn.ModuleList` and `nn.ModuleDict` are
    none, and an `nn.MultiheadAttention` is not cut.
    """
    units: list[nn.Module] = []

    def choose(module: nn.Module) -> int:  # number of parameters of the units in a module, which may be one itself
        total = sum(parameter.numel() for parameter in module.parameters())
        if total < min_num_params or isinstance(module, nn.MultiheadAttention):
            return 0
        inside = sum(map(choose, module.children()))
        if total - inside < min_num_params or isinstance(module, CONTAINERS):
            return inside
        units.append(module)
        return total

    choose(model)
    return [module for module in units if module is not model]


def units_by_class(model: nn.Module, names: str | None, asked_by: str) -> list[type[nn.Module]]:
    """Returns the classes that `names` lists, separated by commas, or the classes of the repeated layers.

    A dotted name is imported; a plain one is looked for among the model's modules.

    Raises:
        WrapError: no module has a named class; lists the classes of the model.
    """
    if names is None:
        return _guessed(model, asked_by)
    classes = list[Any]()
    for name in filter(None, map(str.strip, names.split(","))):
        classes += [_import_class(name)] if "." in name else resolve_names(model, [name], asked_by)
    check_classes_are_in(model, classes, asked_by)
    return classes


def _guessed(model: nn.Module, asked_by: str) -> list[type[nn.Module]]:
    """Returns the classes that the model declares whole, as Hugging Face's do, or the largest class in its lists."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    classes = {type(module) for module in model.modules() if type(module).__name__ in names}
    if not classes:
        weights: Counter[type[nn.Module]] = Counter()
        lists = (module for module in model.modules() if isinstance(module, CONTAINERS))
        for item in (item for items in lists for item in items.children() if not isinstance(item, CONTAINERS)):
            weights[type(item)] += sum(parameter.numel() for parameter in item.parameters())
        classes = {kind for kind, _ in weights.most_common(1)}
    if not classes:
        raise WrapError(
            f"{asked_by} is not given, and {type(model).__name__} has no list of layers to guess it from; name the "
            f"class of its layers: {choices('', class_names(model))}"
        )
    return sorted(classes, key=lambda kind: kind.__name__)


def import_classes_from_paths(class_paths: Iterable[str | type[nn.Module]]) -> list[type[nn.Module]]:
    """Returns the module classes of these dotted paths, as ``"torch.nn.Linear"``. A class is taken as it is.

    Raises:
        WrapError: a path that does not import, or is not that of a module class; it names the path, what the module
            has, and the nearest name.
    """
    if isinstance(class_paths, str):
        raise WrapError(f"class paths are given as a list of dotted paths, and got the string {class_paths!r}")
    return [path if isinstance(path, type) else _import_class(path) for path in class_paths]


def check_classes_are_in(model: nn.Module, classes: Sequence[type[nn.Module]], asked_by: str) -> None:
    """Raises unless the model has a module of each of these classes.

    Args:
        asked_by: the setting that named them.

    Raises:
        WrapError: naming the class, the classes that the model has, and the nearest of them.
    """
    for unit_class in classes:
        if not any(isinstance(module, unit_class) for module in model.modules()):
            raise WrapError(
                f"{asked_by} names the class {unit_class.__module__}.{unit_class.__qualname__}, but "
                f"{type(model).__name__} has no module of it; {choices(unit_class.__name__, class_names(model))}"
            )


def _import_class(path: str) -> type[nn.Module]:
    module_path, _, name = path.rpartition(".") if isinstance(path, str) else ("", "", "")
    if not module_path:
        raise WrapError(f"class path {path!r} is not a dotted one; write the module too, as torch.nn.Linear")
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        raise WrapError(
            f"class path {path!r} does not import: there is no module {error.name}; correct its name, or install its "
            "package"
        ) from error
    value = getattr(module, name, None)
    classes = {n: kind for n, kind in vars(module).items() if isinstance(kind, type) and issubclass(kind, nn.Module)}
    if name in classes:
        return classes[name]
    what = "has no such class" if value is None else f"has {name} as a {type(value).__name__}, not a module class"
    raise WrapError(f"class path {path!r} does not import: {module_path} {what}; {choices(name, classes)}")
