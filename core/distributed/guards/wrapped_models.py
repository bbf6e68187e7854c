"""Refuses models that are wrapped or sharded already, by this library or by torch."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from ...base.errors import WrapError
from ..fsdp2.shard_model import SHARDED_HERE

_TORCH_WRAPPERS = (TorchDistributedDataParallel, FullyShardedDataParallel)


def reject_wrapped(module: nn.Module, wrappers: tuple[type[nn.Module], ...] = ()) -> None:
    """Raises unless a model is plain: neither it nor a module in it is wrapped or sharded.

    Args:
        wrappers: classes that wrap a model, in addition to torch's.

    Raises:
        WrapError: names the module, who wrapped it, and what to do.
    """
    for name, submodule in module.named_modules():
        kind = type(submodule).__name__.removeprefix("FSDP" if isinstance(submodule, FSDPModule) else "")
        where = f"its module {name!r} ({kind})" if name else f"it ({kind})"
        if isinstance(submodule, (*wrappers, *_TORCH_WRAPPERS)):
            raise WrapError(
                f"the model cannot be wrapped again: {where} is a data-parallel wrapper already; "
                + ("wrap its .module" if not name else "wrap the whole model once, from plain modules")
            )
        if not isinstance(submodule, FSDPModule):
            continue
        if submodule in SHARDED_HERE:
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
