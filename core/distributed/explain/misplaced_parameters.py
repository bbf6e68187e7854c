"""A sharded parameter that is used outside the forward of its unit, where the module holds only this rank's shard.

Torch then says "got mixed torch.Tensor and DTensor" and names neither. The parameter is found in the frames of the
traceback, by its storage, which views of it share.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...errors import UnitError

_SAYS_MIXED = "mixed torch.Tensor and DTensor"
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)


def raise_misplaced(error: BaseException, root: nn.Module) -> None:
    """Raises what a mixture of tensors and DTensors means; returns where `error` is something else.

    Args:
        root: the model inside its wrapper.

    Raises:
        UnitError: from `error`, with the parameter, its unit, the line, and the ways out.
    """
    if not isinstance(error, RuntimeError) or _SAYS_MIXED not in str(error):
        return
    frames = [frame for frame, _ in _frames(error.__traceback__)]
    names = _parameters_in(frames, root)
    what = f"parameter {names[0]}" if names else "a sharded parameter"
    unit = f"its unit, {_unit_of(names[0], root)}," if names else "its unit"
    raise UnitError(
        f"{what} was used outside the forward of {unit} where a rank holds only its shard{_place(error)}. Call that "
        "unit's forward instead of reading its weight; or put both modules into one unit, or leave them to the root, "
        "through sub_modules_to_wrap; or, if it is used in a method other than forward, name the method in "
        "forward_methods of TorchFullyShardedDataParallelConfig"
    ) from error


def _parameters_in(frames: list[FrameType], root: nn.Module) -> list[str]:
    """Names of sharded parameters that the frames hold, those of the innermost frame first."""
    by_storage = {
        _storage(parameter): name
        for name, parameter in root.named_parameters()
        if isinstance(parameter, DTensor) and parameter.to_local().numel()
    }
    by_identity = {id(parameter): name for name, parameter in root.named_parameters()}
    found: dict[str, None] = {}
    for frame in reversed(frames):
        for value in _dtensors_in(frame.f_locals):
            name = by_identity.get(id(value), by_storage.get(_storage(value)))
            if name is not None:
                found[name] = None
    if found:
        return list(found)
    modules = {module: name for name, module in root.named_modules()}
    for frame in reversed(frames):  # not in the frames of Python: the module whose forward failed holds it
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module) and module in modules:
            prefix = f"{modules[module]}." if modules[module] else ""
            for name, parameter in module.named_parameters(recurse=False):
                if isinstance(parameter, DTensor):
                    return [prefix + name]
    return []


def _dtensors_in(values: dict[str, Any]) -> Iterator[DTensor]:
    for value in values.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, DTensor):
                yield item


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage().data_ptr())


def _unit_of(parameter: str, root: nn.Module) -> str:
    path = parameter.split(".")[:-1]
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        if isinstance(root.get_submodule(name), FSDPModule):
            return name
    return "the root"


def _place(error: BaseException) -> str:
    """The line of the caller's own code that failed."""
    own = [
        (frame, line)
        for frame, line in _frames(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_TORCH, _OWN, "<"))
    ]
    if not own:
        return ""
    frame, line = own[-1]
    path = frame.f_code.co_filename
    code = linecache.getline(path, line).strip()
    return f" ({path}:{line}, in {frame.f_code.co_name}" + (f": {code})" if code else ")")


def _frames(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found
