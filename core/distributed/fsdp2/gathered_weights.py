"""Gathers units of FSDP2 ahead of their use, and keeps the gathered weights of freed units readable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ...base._torch_compat import NO_BACKWARD, current_backward
from ...base.errors import ShardstackError, warn_once
from ..forward_hooks import SavedWeights, in_use_message, watch_outputs
from ..gathered_units import UnitOrder
from ..plan import Plan, UnitPlan
from .torch_private import as_fsdp, begin_backward, end_backward, gather_for_forward, gathered_tensors_of


def reject_graph_of_gradients(reached: str) -> None:
    """Raises in a backward whose gradients keep a graph.

    Args:
        reached: what the backward has reached, for the message.

    Raises:
        ShardstackError: says what to use instead.
    """
    if torch.is_grad_enabled() and current_backward() != NO_BACKWARD:
        raise ShardstackError(
            f"a backward with create_graph=True reached {reached} under FSDP2, which frees parameters during "
            "backward, so that no second backward could go through it; use DistributedDataParallel for losses that "
            "contain gradients"
        )


class FreedWeights:
    """`SavedWeights` of one unit, whose gathered weights torch frees after each forward.

    A unit stays gathered after its forwards from the first one on that leaves a view of a weight in use.

    Args:
        unit: the unit, sharded.

    Raises:
        ShardstackError: in a backward whose gradients keep a graph (``create_graph=True``).
    """

    def __init__(self, unit: UnitPlan) -> None:
        self._unit, self._module = unit, as_fsdp(unit.modules[0])
        # Hooks of autograd around each forward; they live as long as the module.
        self._saved = SavedWeights(self._memory, self._gather)
        for module in unit.modules:
            module.register_forward_pre_hook(self._before)  # after torch has gathered
            module.register_forward_hook(self._after, prepend=True, always_call=True)  # before torch frees

    def end_all(self) -> None:
        """Ends forwards that were interrupted."""
        self._saved.end_all()

    def _before(self, module: nn.Module, args: Any) -> None:
        self._saved.begin()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saved.end()
        if current_backward() == NO_BACKWARD and output is not None and self._saved.are_in_use():
            warn_once(in_use_message(" + ".join(self._unit.names)))
            self._module.set_reshard_after_forward(False, recurse=False)

    def _memory(self) -> Sequence[torch.Tensor]:
        return gathered_tensors_of(self._module)

    def _gather(self) -> None:
        reject_graph_of_gradients(f"unit {' + '.join(self._unit.names)}")
        if not self._unit.is_needed_in_backward:
            self._module.set_unshard_in_backward(True)  # it is, in this model
        self._module.unshard()


def prefetch_units(plan: Plan) -> UnitOrder[nn.Module]:
    """Puts hooks on the units of a sharded model, before FSDP2's own, which read what is set here.

    Returns:
        the order of units, each known by its first module. The hooks keep it up to date.
    """
    units = {unit.modules[0]: unit for unit in plan.units[:-1]}
    # Units whose inputs needed no gradient when they last ran: torch reduces them when the backward ends. `enter`
    # keeps it up to date.
    first: set[nn.Module] = set()
    # Units that a backward has passed by since the last forward began. `pass_by` adds, `begin` clears.
    passed: set[nn.Module] = set()

    def pass_by(module: nn.Module, begins: bool) -> None:
        if begins:
            # Where others have run the unit, the one after it has an input with a gradient, and is reduced before.
            for before in units:
                if before in first and before not in passed:
                    end_backward(as_fsdp(before))
            passed.add(module)
            begin_backward(as_fsdp(module))
        elif module not in first:
            end_backward(as_fsdp(module))

    order = UnitOrder(plan, units, pass_by)

    def begin(root: nn.Module, args: Any) -> None:
        if current_backward() == NO_BACKWARD:
            passed.clear()
            _set_forward(root, order.begin())

    def end(root: nn.Module, args: Any, output: Any) -> None:
        if current_backward() == NO_BACKWARD:
            gather_skipped()
            _set_backward(root, order.before())

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_backward() == NO_BACKWARD:
            gather_skipped(module)
            if torch.is_grad_enabled():
                inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
                (first.discard if any(leaf.requires_grad for leaf in inputs) else first.add)(module)
        begin_forward(module)

    def begin_forward(module: nn.Module) -> None:
        _set_forward(module, order.enter(module))
        if current_backward() == NO_BACKWARD:
            _set_backward(module, order.before(module))

    def gather_skipped(module: nn.Module | None = None) -> None:
        for skipped in order.skipped_before(module):
            begin_forward(skipped)
            gather_for_forward(as_fsdp(skipped))
            order.leave_skipped(skipped)

    def reach(module: nn.Module, args: Any, output: Any) -> None:
        if module in units:
            order.leave(module, output, module.parameters())
        if current_backward() == NO_BACKWARD:
            watch_outputs(output, lambda gradient: order.reach(module))

    # Hooks on outputs run in the order in which they are set: these before torch's, which gather a unit.
    for module in (*units, plan.root.modules[0]):
        module.register_forward_hook(reach, prepend=True)
    plan.root.modules[0].register_forward_pre_hook(begin, prepend=True)
    plan.root.modules[0].register_forward_hook(end)
    for unit in units:
        unit.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    return order


def _set_forward(module: nn.Module, ahead: list[nn.Module]) -> None:
    as_fsdp(module).set_modules_to_forward_prefetch([as_fsdp(unit) for unit in ahead])


def _set_backward(module: nn.Module, ahead: list[nn.Module]) -> None:
    # An empty list would mean FSDP2's default, the unit before; a unit that is gathered already means none.
    as_fsdp(module).set_modules_to_backward_prefetch([as_fsdp(unit) for unit in ahead or [module]])
