"""FSDP2's own objects for the units and parameters of a sharded model.

Relies on ``module._get_fsdp_state()``, on the groups of the state (`_torch_compat.fsdp_param_groups`), which
`fully_shard` makes and nothing changes later, and on their ``fsdp_params``. Without these names wrapping raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...._torch_compat import fsdp_param_groups
from ....errors import WrapError


def fsdp_parameters(root: nn.Module) -> Iterator[Any]:
    """Yields torch's `FSDPParam` of every sharded parameter, with its shard, its gathered form and its gradients."""
    for group in param_groups(root):
        yield from group.fsdp_params


_GROUPS = "_param_groups_of_shardstack"
"""An attribute of torch's state of a sharded model: all groups below it. `fully_shard` makes the groups, and nothing
changes them. `param_groups` sets it at its first call. Cached, because walking the modules costs more than most uses.
"""


def param_groups(root: nn.Module) -> Sequence[Any]:
    """Returns the groups of parameters that are gathered together, each once, though all modules of a unit share its
    state.

    Args:
        root: a sharded model; what is sharded in it later is not found.
    """
    of_root = state_of(root)
    if not hasattr(of_root, _GROUPS):
        states = {id(state): state for m in root.modules() if isinstance(m, FSDPModule) for state in [state_of(m)]}
        setattr(of_root, _GROUPS, [group for state in states.values() for group in fsdp_param_groups(state)])
    groups: Sequence[Any] = getattr(of_root, _GROUPS)
    return groups


def state_of(module: nn.Module) -> Any:
    """Returns torch's `FSDPState` of a sharded module."""
    return module._get_fsdp_state()  # type: ignore[operator]


def as_fsdp(module: nn.Module) -> FSDPModule:
    """Returns the same module, by the type that `fully_shard` has given it.

    Raises:
        WrapError: it is not sharded.
    """
    if not isinstance(module, FSDPModule):
        raise WrapError(f"{type(module).__name__} is not sharded; apply fully_shard to it first")
    return module


def communication_of(module: FSDPModule) -> tuple[Any, Any] | None:
    """Returns the collectives of a module; None where it has no parameters of its own."""
    for group in fsdp_param_groups(state_of(module)):  # type: ignore[arg-type]
        return group._all_gather_comm, group._reduce_scatter_comm
    return None


def name_of_parameter(parameter: Any) -> str:
    """Returns the name below the root, of torch's object for a sharded parameter."""
    return str(parameter._param_fqn or parameter._module_info.param_name)
