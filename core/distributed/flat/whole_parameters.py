"""Whole parameters on every rank: gathered in place after ranks have updated their shards (ZeRO-1, ZeRO-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ...base.errors import ShardstackError
from ...base.memory_categories import Held
from ...comm.lane import comm_lane
from ..engine.engine import Parameters
from ..model.forward_hooks import WrapperHook
from ..plan import Plan
from .unit import Unit


class WholeParameters(Parameters):
    """Parameters that are whole on every rank. Without sharding nothing is ever gathered.

    With ``overlap_param_gather`` gathers run while forward does, and a module's forward waits for the parameters that
    it holds. Main thread only.

    Args:
        module: the wrapper's module, whose forwards wait.
        units: in the plan's order, the root last.
    """

    def __init__(self, plan: Plan, module: nn.Module, units: Sequence[Unit]) -> None:
        self._module, self._overlaps = module, plan.settings.overlap_param_gather
        # Buckets of parameters, in the order in which forward reads them. Gathered where ranks update shards.
        by_place = {piece.bucket: unit for unit in units for piece in unit.plan.pieces}
        self._in_forward_order = [by_place[place] for place in reversed(plan.reduction_order)]
        self._is_sharded = not plan.is_replicated
        # Handles of the hooks that make forwards wait. `enable_hooks` adds them, `disable_hooks` removes them.
        self._hooks: list[Any] = []

    def publish(self, *, waits: bool = False) -> None:
        """Gathers updated parameters, in the order in which forward reads them.

        Args:
            waits: return only when all parameters are gathered, also where forwards would wait.
        """
        waits = waits or not (self._hooks and self._overlaps)
        for unit in self._in_forward_order if self._is_sharded else ():
            unit.wait_until_readable()
            unit.start_gather(comm_lane(unit.buckets[0].buffer.device), waits=waits)

    def settle(self) -> None:
        # Nothing is freed: every rank keeps whole parameters. Those that are still being gathered are waited for.
        for unit in self._in_forward_order:
            unit.wait_until_readable()

    def invalidate(self) -> None:
        """Does nothing: parameters are written in place."""

    def receivers(self) -> list[nn.Parameter]:
        return list(self._module.parameters())

    def held(self) -> dict[Held, list[Tensor]]:
        parameters = [*self._module.parameters(), *self._module.buffers()]
        return {"parameters": parameters, "gathered parameters": []}

    def enable_hooks(self) -> None:
        """Makes each module's forward wait for the parameters that it reads.

        Raises:
            ShardstackError: the hooks are enabled.
        """
        if self._hooks:
            raise ShardstackError(
                "enable_forward_pre_hook was called while the hooks are enabled; call disable_forward_pre_hook() first"
            )
        unit_of = {param: unit for unit in self._in_forward_order for param in unit.name_of}
        for submodule in self._module.modules():
            # All other code that reads a parameter waits too (`base.parameters`). A module of torch with children may
            # read its children's weights itself, and choose a kernel by them: it waits for all below it.
            is_torchs = type(submodule).__module__.startswith("torch.nn.modules.")
            reads_children = is_torchs and not isinstance(submodule, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            params = submodule.parameters(recurse=reads_children)
            for unit in {unit_of[param]: None for param in params if param in unit_of}:
                # Before all other hooks, which may read parameters.
                hook = WrapperHook(unit.wait_until_readable)
                self._hooks.append(submodule.register_forward_pre_hook(hook, prepend=True))

    def disable_hooks(self) -> None:
        """Removes the hooks. Parameters may still be being gathered.

        Raises:
            ShardstackError: the hooks are not enabled.
        """
        if not self._hooks:
            raise ShardstackError("there are no forward pre-hooks to disable; overlap_param_gather sets them")
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
