"""PEFT's adapters on whole tensors: which tensors they add to a model, and what PEFT's own `merge` makes of a layer.

A layer is merged on a copy, so that the model's own tensors, which may be shards, stay as they are: nothing has to be
unmerged, and nothing drifts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.text import first_line

Merge = tuple[tuple[str, ...], Callable[[Mapping[str, Tensor]], Tensor]]
"""Names of the tensors that a merged one is made of, the first of the same dtype, and what makes it of them."""


def added_names(model: nn.Module, names: Container[str]) -> set[str]:
    """Returns the names of tensors that adapters of PEFT add to a model, or that an active one takes the place of.

    Raises:
        ConfigError: an adapter that replaces a part of a module.
    """
    added = set[str]()
    for stem, module in model.named_modules():
        if _is_adapted(module):
            kept = f"{stem}.base_layer."
        elif "modules_to_save" in module._modules:
            active: Any = not module.disable_adapters and module.active_adapters
            kept = f"{stem}.modules_to_save.{active[0]}." if active else f"{stem}.original_module."
        elif "original_module" in module._modules:
            raise ConfigError(
                f"{stem} is trained in part by an adapter of PEFT, and cannot be merged here; merge it by PEFT"
            )
        else:
            continue
        added.update(name for name in _names_in(module, stem) if name in names and not name.startswith(kept))
    return added


def merges_of(model: nn.Module, views: Mapping[str, Tensor]) -> Iterator[tuple[str, Merge]]:
    """Yields the names of the weights that adapters of PEFT change, and how each is merged: to the bit as
    `merge_adapter` merges it.

    Args:
        views: tensors of the whole model, by name.

    Raises:
        ConfigError: PEFT cannot merge an adapter, or it needs tensors of other layers.
    """
    added, outer = added_names(model, views), "."
    for stem, module in model.named_modules():
        if not _is_adapted(module) or stem.startswith(outer):
            continue
        outer = f"{stem}."  # what is adapted twice is merged at once
        names = [name for name in _names_in(module, stem) if name in views]
        metas = {name: torch.empty(views[name].shape, dtype=views[name].dtype, device="meta") for name in names}
        for name in names:
            if name in added:
                continue
            try:
                _merged(module, stem, name, metas)
            except Exception as error:
                raise ConfigError(
                    f"{name} has an adapter that cannot be merged here ({type(error).__name__}: {first_line(error)}); "
                    "merge it by PEFT, or use adapters='only'"
                ) from error
            sources = (name, *(other for other in names if other != name))
            yield name, (sources, partial(_merged, module, stem, name))


def _is_adapted(module: nn.Module) -> bool:
    return "base_layer" in module._modules and hasattr(module, "merged_adapters")


def _names_in(module: nn.Module, stem: str) -> list[str]:
    tensors = chain(module.named_parameters(stem, remove_duplicate=False), module.named_buffers(stem))
    return [name for name, _ in tensors]


@torch.no_grad()
def _merged(layer: nn.Module, stem: str, name: str, wholes: Mapping[str, Tensor]) -> Tensor:
    """Returns a tensor of a layer after PEFT's `merge` of the active adapters."""
    filled = _with_tensors(layer, stem, wholes)
    for module in filter(_is_adapted, filled.modules()):
        cast(Any, module).merge()
    return filled.get_parameter(name.removeprefix(f"{stem}."))


def _with_tensors(module: nn.Module, stem: str, wholes: Mapping[str, Tensor]) -> nn.Module:
    """Returns a copy of a module that has copies of whole tensors in the place of its own."""
    filled = copy.copy(module)
    vars(filled).update({key: copy.copy(v) for key, v in vars(module).items() if type(v) in (dict, list)})
    for name, parameter in module._parameters.items():
        if parameter is not None:
            filled._parameters[name] = nn.Parameter(wholes[f"{stem}.{name}"].clone(), requires_grad=False)
    for name, buffer in module._buffers.items():
        filled._buffers[name] = wholes.get(f"{stem}.{name}", buffer)
    for name, child in module._modules.items():
        if child is not None:
            filled._modules[name] = _with_tensors(child, f"{stem}.{name}", wholes)
    return filled
