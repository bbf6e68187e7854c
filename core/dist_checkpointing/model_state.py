"""Returns a module's parameters and buffers as tensors of the whole model, and loads such tensors in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from ..base.device import current_device
from ..base.dtypes import dtype_name
from ..base.errors import CheckpointError
from ..base.parameters import is_packed
from .agreement import Ranks, is_of_first_rank, of_first_rank, pipeline_ranks, refuse
from .global_view import FlatRange, can_be_cast, global_shape, held_boxes, local_tensor, whole_view


def model_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """Returns ``module.state_dict()`` with a :func:`global_view` of each tensor, for ``save`` and ``load``.

    The values share storage with the module. Buffers are saved as the first rank has them. A tensor with several names
    (tied weights) has only the first.

    Raises:
        CheckpointError: the module's state has an entry that is no tensor.
    """
    views = {names[0]: whole_view(tensor) for names, tensor in _targets(module)}
    for names, tensor in _targets(module):
        if not isinstance(tensor, nn.Parameter):
            views[names[0]] = of_first_rank(views[names[0]])
    return views


def stages_state_dict(modules: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Returns `model_state_dict` of this rank's pipeline stages, and a place for each tensor of other ranks' stages.

    Names and their order are the same on every rank: a tensor that this rank has no part of is a `FlatRange` without
    elements. With one stage it is `model_state_dict`. Collective over the pipeline if there are several.
    """
    stages = [modules] if isinstance(modules, nn.Module) else modules
    own = {name: view for stage in stages for name, view in model_state_dict(stage).items()}
    pipeline = pipeline_ranks()
    if pipeline.size == 1:
        return own
    views: dict[str, torch.Tensor] = {}
    kinds = {name: (is_of_first_rank(view), is_packed(view) or None) for name, view in own.items()}
    descriptions = [(name, view.dtype, tuple(view.shape), *kinds[name]) for name, view in own.items()]
    for of_rank in pipeline.all_gather(descriptions):
        for name, dtype, shape, is_buffer, has_codes in of_rank:
            absent = FlatRange(torch.empty(0, dtype=dtype, device=current_device()), shape, [])
            absent.holds_codes = has_codes  # type: ignore[attr-defined]
            views.setdefault(name, own.get(name, of_first_rank(absent) if is_buffer else absent))
    return views


MODEL, OPTIMIZER, _MASTER = "model.", "optimizer.", "master."
"""How names of tensors begin in a checkpoint of a model and its optimizer, and those of fp32 masters in the latter."""


def named_for_checkpoint(
    model: Mapping[str, torch.Tensor], optimizer: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns tensors of a model and its optimizer by their names in a checkpoint.

    A master takes its parameter's place, so that the checkpoint loads in any precision.
    """
    tensors = {f"{MODEL}{name}": optimizer.get(f"{_MASTER}{name}", tensor) for name, tensor in model.items()}
    return tensors | {f"{OPTIMIZER}{name}": t for name, t in optimizer.items() if not name.startswith(_MASTER)}


class ShardedStateDict(dict[str, torch.Tensor]):
    """`model_state_dict` of a module, which `load` fills and returns as the module's `load_state_dict` takes it."""

    def __init__(self, module: nn.Module, prefix: str) -> None:
        super().__init__({prefix + name: tensor for name, tensor in model_state_dict(module).items()})
        self._module, self._prefix = module, prefix

    def as_loaded(self) -> dict[str, Any]:
        """Returns the module's own tensors, under its names."""
        return {self._prefix + name: value for name, value in self._module.state_dict().items()}


def sharded_state_dict(
    module: nn.Module, prefix: str = "", sharded_offsets: Sequence[Any] = (), metadata: Any = None
) -> ShardedStateDict:
    """Returns a module's state for `save` and `load`: Megatron-LM's name for `model_state_dict`.

    Args:
        prefix: goes before each name.
        sharded_offsets: none: tensors know which part of the whole model they are.
        metadata: ignored; Megatron-LM's choice of formats, of which there is one here.

    Raises:
        CheckpointError: offsets are given.
    """
    if sharded_offsets:
        raise CheckpointError(
            f"sharded_state_dict was given sharded_offsets={tuple(sharded_offsets)!r}; leave them out: a tensor knows "
            "which part of the whole model it is"
        )
    return ShardedStateDict(module, prefix)


def load_model_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, *, process_group: ProcessGroup | None = None
) -> _IncompatibleKeys:
    """Copies a state dict into a module's own storage, under any layout.

    The module's tensors may be plain, split by tensor parallelism, sharded by FSDP2, or both. A value of the dict is

    * a plain tensor of the whole model, from which each rank takes its piece; or
    * a DTensor of the whole model on any mesh, as :func:`model_state_dict` returns it; or
    * a DTensor in the layout of the module's own, as ``module.state_dict()`` of an FSDP2 module returns it.

    Values are rounded to the module's dtype where both are floating point (an fp32 file into a bf16 model) and no
    packed codes; other differences of dtype are errors. One of several tied names suffices; several must agree. Holds
    at most one whole tensor in addition to the dict. Local if all values are plain, else collective over
    `process_group`.

    Hooks of the module and its submodules run, as in `torch.nn.Module.load_state_dict`: those registered to run before
    get a copy of the dict, and may rename and convert its values; those registered to run after see the filled module.

    Args:
        strict: names must match exactly. If False, the names in common are loaded; there must be at least one.

    Returns:
        torch's named tuple ``(missing_keys, unexpected_keys)``; both empty if strict.

    Raises:
        CheckpointError: names all problems together, on all ranks if collective, before anything is written. Also a
            module that loads by a method of its own class, which copies what it is given by itself.
    """
    targets = _targets(module)
    ranks = Ranks(process_group, alone=not any(isinstance(value, DTensor) for value in state_dict.values()))
    values, keys = ranks.on_all(lambda: _run_hooks_before(module, state_dict))
    names_of_targets = {name for names, _ in targets for name in names}
    keys.missing_keys.extend(name for names, _ in targets if values.keys().isdisjoint(names) for name in names)
    keys.unexpected_keys.extend(name for name in values if name not in names_of_targets)
    ranks.on_all(lambda: _check(targets, values, keys, strict))
    with torch.no_grad():
        for names, target in targets:
            name = next((name for name in names if name in values), None)
            if name is not None:
                _copy(values[name], target)
    _run_hooks_after(module, keys)
    return keys


class ValuesToLoad(dict[str, Any]):
    """A state dict on its way through the hooks of a module. Its values need not be laid out as the module's own."""


def _run_hooks_before(module: nn.Module, state_dict: Mapping[str, Any]) -> tuple[ValuesToLoad, _IncompatibleKeys]:
    """Returns the state dict as the hooks leave it, and the names that they report as missing and unexpected."""
    values, keys, errors = ValuesToLoad(state_dict), _IncompatibleKeys([], []), list[str]()
    versions = getattr(state_dict, "_metadata", {})
    for name, member in module.named_modules(remove_duplicate=False):
        loaders = {"_load_from_state_dict", "load_state_dict"} if member is module else {"_load_from_state_dict"}
        if own := [loader for loader in sorted(loaders) if not _is_known(getattr(member, loader))]:
            raise CheckpointError(
                f"{name or 'the module'} ({type(member).__name__}) has a {own[0]} of its own, which cannot be given "
                "whole tensors where it has shards; convert them in a hook in its place "
                "(register_load_state_dict_pre_hook), or call module.load_state_dict with tensors laid out as its own"
            )
        for hook in member._load_state_dict_pre_hooks.values():
            arguments = (versions.get(name, {}), True, keys.missing_keys, keys.unexpected_keys, errors)
            hook(values, f"{name}." if name else "", *arguments)
    if errors:
        raise CheckpointError(
            f"hooks of the module refuse the state dict, and nothing was loaded: {'; '.join(errors)}"
        )
    return values, keys


def _is_known(loader: Callable[..., Any]) -> bool:
    """Returns whether a method of a module copies tensors as `nn.Module` does: torch's own, and this library's."""
    return getattr(loader, "__module__", "").startswith(("torch.nn.", f"{__name__.partition('.')[0]}."))


def _run_hooks_after(module: nn.Module, keys: _IncompatibleKeys) -> None:
    for child in module.children():
        _run_hooks_after(child, keys)
    for hook in module._load_state_dict_post_hooks.values():
        hook(module, keys)


def _targets(module: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Returns the module's tensors with their attributes, each with all of its names, in the order of the state
    dict."""
    by_identity: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{type(module).__name__} has {name} in its state, a {type(value).__name__}; only tensors are kept "
                "here, so keep it in the checkpoint's metadata"
            )
        by_identity.setdefault(id(value), ([], value))[0].append(name)
    return list(by_identity.values())


def _check(
    targets: list[tuple[list[str], torch.Tensor]], values: Mapping[str, Any], keys: _IncompatibleKeys, strict: bool
) -> None:
    problems = []
    if strict:
        problems += [f"missing: {name}" for name in keys.missing_keys]
        problems += [f"unexpected: {name}" for name in keys.unexpected_keys]
    if not strict and targets and not any(name in values for names, _ in targets for name in names):
        problems.append(f"no name in common: the module has {len(targets)} tensors, the state dict {len(values)}")
    for names, target in targets:
        present = [name for name in names if name in values]
        problems += [problem for name in present if (problem := _mismatch(name, values[name], target))]
        if target.is_meta and present:
            problems.append(f"{present[0]} is on the meta device in the module: materialise it first")
        if any(not _same(values[present[0]], values[other]) for other in present[1:]):
            problems.append(f"{' and '.join(present)} are one tensor in the module and differ in the state dict")
    refuse("the state dict does not fit the module, and nothing was loaded", problems)


def _mismatch(name: str, value: Any, target: torch.Tensor) -> str | None:
    if not isinstance(value, torch.Tensor):
        return f"{name} is a {type(value).__name__} where a tensor is needed"
    if value.dtype != target.dtype and not can_be_cast(value.dtype, target):
        return f"{name} is {dtype_name(value.dtype)} where the module has {dtype_name(target.dtype)}"
    whole = tuple(global_shape(target))
    if tuple(value.shape) == whole or _has_same_layout(value, target):
        return None
    return f"{name} has shape {list(value.shape)} where the whole model's tensor has {list(whole)}"


def _has_same_layout(value: Any, target: torch.Tensor) -> bool:
    """Returns whether `value` has on every rank the piece that the module has there."""
    if not (isinstance(value, DTensor) and isinstance(target, DTensor)):
        return False
    return (value.shape, value.device_mesh, value.placements) == (target.shape, target.device_mesh, target.placements)


def _same(one: Any, other: Any) -> bool:
    if one is other or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return True  # given twice; other types were reported before
    return one.shape == other.shape and torch.equal(local_tensor(one), local_tensor(other))


def _copy(value: torch.Tensor, target: torch.Tensor) -> None:
    """Fills this rank's piece. Gathers a DTensor on another mesh whole, one tensor at a time."""
    own = whole_view(target)
    if isinstance(value, FlatRange):  # laid out as the target's own, which it may be itself
        if not isinstance(own, FlatRange) or own.boxes != value.boxes:
            raise CheckpointError(
                "a state dict holds flat ranges of another wrapper's; save it with shardstack.dist_checkpointing, and "
                "load that"
            )
        own.elements.copy_(value.elements)
    elif _has_same_layout(value, target) or _has_same_layout(value, own):
        local_tensor(target).copy_(local_tensor(value))
    else:
        whole = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for offsets, part in held_boxes(own):
            part.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))])
