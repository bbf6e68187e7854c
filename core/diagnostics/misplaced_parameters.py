"""Names a sharded parameter that is used as if this rank had it whole.

Outside its unit's forward a module holds only this rank's shard. Torch says "got mixed torch.Tensor and DTensor" and
names neither. The parameter is found through the traceback: in the line of code that failed, or among the variables of
its frame, by the storage that its views share.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..base.errors import UnitError
from ..base.parameters import local_part

_SAYS_MIXED = "mixed torch.Tensor and DTensor"
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent.parent)


def raise_misplaced(error: BaseException, root: nn.Module) -> None:
    """Explains an error about mixed tensors and DTensors. Returns if `error` is another one.

    Args:
        root: the model inside its wrapper.

    Raises:
        UnitError: from `error`, with the parameter, its unit, the line, and the ways out.
    """
    if not isinstance(error, RuntimeError) or _SAYS_MIXED not in str(error):
        return
    name = _parameter_in(list(walk_tb(error.__traceback__)), root)
    what = f"parameter {name}" if name else "a sharded parameter"
    unit = f"its unit, {_unit_of(name, root)}," if name else "its unit"
    raise UnitError(
        f"{what} was used outside the forward of {unit} where a rank holds only its shard{_place(error)}. Call that "
        "unit's forward, put both modules into one unit through sub_modules_to_wrap, or name the method that uses it "
        "in forward_methods of TorchFullyShardedDataParallelConfig"
    ) from error


def _parameter_in(frames: list[tuple[FrameType, int]], root: nn.Module) -> str | None:
    """Returns the name of the sharded parameter that the innermost possible frame uses, or None."""
    parameters = dict(root.named_parameters())
    by_identity = {id(parameter): name for name, parameter in parameters.items()}
    by_storage = {
        _storage(parameter): name
        for name, parameter in parameters.items()
        if isinstance(parameter, DTensor) and parameter.to_local().numel()
    }
    for frame, line in reversed(frames):
        for value in (*_values_in_line(frame, line), *frame.f_locals.values()):
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(item, DTensor):
                    name = by_identity.get(id(item), by_storage.get(_storage(item)))
                    if name is not None:
                        return name
    return None


def _values_in_line(frame: FrameType, line: int) -> Iterator[Any]:
    """Yields the values that the line reads through modules, such as ``self.blocks[0].weight``, without running
    code."""
    for path in _PATH.findall(linecache.getline(frame.f_code.co_filename, line)):
        steps = [step.strip("[]") for step in _STEP.findall(path)]
        value = frame.f_locals.get(steps[0])
        for step in steps[1:]:
            step = str(frame.f_locals.get(step, step)) if isinstance(value, (nn.ModuleList, nn.Sequential)) else step
            value = _child(value, step)
        yield value


def _child(module: Any, name: str) -> Any:
    if not isinstance(module, nn.Module):
        return None
    return module._parameters.get(name, module._modules.get(name))


_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\w+\])*")
_STEP = re.compile(r"\w+|\[\w+\]")


def _storage(tensor: torch.Tensor) -> int:
    return int(local_part(tensor).untyped_storage().data_ptr())


def _unit_of(parameter: str, root: nn.Module) -> str:
    path = parameter.split(".")[:-1]
    for length in range(len(path), 0, -1):
        name = ".".join(path[:length])
        if isinstance(root.get_submodule(name), FSDPModule):
            return name
    return "the root"


def _place(error: BaseException) -> str:
    """Formats the place in the caller's code that failed."""
    own = [
        (frame, line)
        for frame, line in walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith((_TORCH, _OWN, "<"))
    ]
    if not own:
        return ""
    frame, line = own[-1]
    path = frame.f_code.co_filename
    code = linecache.getline(path, line).strip()
    return f" ({path}:{line}, in {frame.f_code.co_name}" + (f": {code})" if code else ")")
