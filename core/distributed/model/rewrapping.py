"""Rejects a model that is wrapped twice, whose children were sharded by hand before, or that was changed after."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ...errors import WrapError

_sharded_here: weakref.WeakSet[FSDPModule] = weakref.WeakSet()
"""Modules that this library sharded. `note_sharded` adds them; freed modules drop out."""
_TORCH_WRAPPERS = (TorchDistributedDataParallel, FullyShardedDataParallel)


def note_sharded(modules: Iterable[FSDPModule]) -> None:
    """Records that this library sharded these modules, not a call of torch's `fully_shard`."""
    _sharded_here.update(modules)


def reject_wrapped(module: nn.Module, wrappers: tuple[type[nn.Module], ...] = ()) -> None:
    """Raises unless a model is plain: neither it nor a module in it is wrapped or sharded.

    Args:
        wrappers: classes that wrap a model, in addition to torch's.

    Raises:
        WrapError: names the module, who wrapped it, and what to do.
    """
    for name, submodule in module.named_modules():
        kind = _plain_name(submodule)
        where = f"its module {name!r} ({kind})" if name else f"it ({kind})"
        if isinstance(submodule, (*wrappers, *_TORCH_WRAPPERS)):
            raise WrapError(
                f"the model cannot be wrapped again: {where} is a data-parallel wrapper already; "
                + ("wrap its .module" if not name else "wrap the whole model once, from plain modules")
            )
        if not isinstance(submodule, FSDPModule):
            continue
        if submodule in _sharded_here:
            raise WrapError(
                f"the model cannot be sharded again: {where} is sharded already, by another wrapper of this library; "
                "wrap the plain model once, and keep what wrap_model returned"
            )
        raise WrapError(
            f"the model cannot be sharded again: {where} is sharded already, by a call of torch's fully_shard; drop "
            "that call: the wrapper shards children before their parents by itself. Name the class "
            f"{kind} in sub_modules_to_wrap, or in _fsdp_modules of the model, to make it a unit"
        )
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "has_buffer"):
            raise WrapError(
                f"parameter {name} is in the buffers of a wrapper already, a DistributedDataParallel of this "
                "library; wrap the plain model once"
            )


def reject_changed(module: nn.Module, names: Mapping[nn.Parameter, str]) -> None:
    """Raises unless a model has the parameters with which it was wrapped, and no more that are trained.

    Args:
        names: of the parameters that the wrapper trains; one may have several forms.

    Raises:
        WrapError: a parameter was replaced, added, removed, tied or made trainable since.
    """
    params = dict(module.named_parameters())
    held = {names.get(param) for param in params.values()}
    added = [name for name, param in params.items() if param.requires_grad and param not in names]
    removed = [name for name in names.values() if name not in held]
    if added or removed:
        change = "was replaced, added or made trainable" if added else "was removed, or tied to another,"
        raise WrapError(
            f"parameter {(added + removed)[0]} {change} after the model was wrapped, so that its gradient is never "
            "reduced; wrap the finished model"
        )


def _plain_name(module: nn.Module) -> str:
    """Returns the class's name, without the prefix that torch's `fully_shard` gives it."""
    name = type(module).__name__
    return name.removeprefix("FSDP") if isinstance(module, FSDPModule) else name
