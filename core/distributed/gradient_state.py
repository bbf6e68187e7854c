"""The phase of a wrapper's gradients in a step and the calls that each phase allows, and checks of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum

import torch
import torch.distributed as dist

from ..base.errors import ShardstackError
from ..comm.lane import HostRead


class Phase(Enum):
    """The contents of a wrapper's gradients."""

    ZEROED = "zeroed"
    """Nothing: no backward has run since they were zeroed."""

    ACCUMULATING = "accumulating"
    """Gradients of this rank's micro-batches. Some may be reduced already."""

    REDUCED = "reduced"
    """Global gradients, after `finish_grad_sync`."""

    FINALIZED = "finalized"
    """Global gradients, summed over sequence-parallel ranks and divided by tokens, after `finalize_model_grads`."""

    UNSCALED = "unscaled"
    """Used: an optimizer has divided them by its loss scale, in place."""

    LATE = "late"
    """Invalid: a backward brought a gradient after it could be reduced with the others, which was dropped."""

    BROKEN = "broken"
    """Invalid: a backward raised an error."""


class GradientState:
    """The phase of one wrapper's gradients::

        zeroed -> accumulating -> reduced -> finalized -> unscaled    then zeroed again, from any phase
                       |             |           |           |
                       +-------------+---------> late <------+        a backward without zeroing gradients first
                       +-> broken                                     a backward that raised

    The wrapper reports events; `finish_grad_sync`, `finalize_model_grads` and the optimizer's step check the phase
    before they act. Used by the training thread, and by autograd's thread for `note_backward`.
    """

    def __init__(self) -> None:
        # Set by the `note_` methods alone: by autograd's thread when a backward begins, else by the training thread.
        # Valid at any time.
        self.phase = Phase.ZEROED
        # The parameter whose gradient came too late, where it is known; valid only in the phase LATE.
        self._late_parameter = ""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients are global."""
        return self.phase in (Phase.REDUCED, Phase.FINALIZED)

    def note_zeroed(self) -> None:
        """Records that gradients are zero or None. Ends every other phase, invalid ones included."""
        self.phase = Phase.ZEROED

    def note_backward(self, opens: Callable[[], bool]) -> None:
        """Records that a backward of this step has begun. Called when its first gradient arrives.

        Args:
            opens: called where gradients are reduced; returns whether the backward may add to them, as in a plain
                module. The next reduction then reduces the sum.
        """
        if self.phase in (Phase.ACCUMULATING, Phase.LATE, Phase.BROKEN):
            return
        if self.phase is Phase.ZEROED or (self.is_reduced and opens()):
            self.phase = Phase.ACCUMULATING
        else:
            self.note_late()

    def note_late(self, parameter: str = "") -> None:
        """Records that a backward brought a gradient of `parameter` after the others had been sent."""
        self.phase, self._late_parameter = Phase.LATE, parameter

    def note_unscaled(self) -> None:
        """Records that an optimizer has divided gradients by its loss scale, so that no step may use them again."""
        self.phase = Phase.UNSCALED

    def note_skipped(self, before: Phase) -> None:
        """Records that the step was skipped, so that gradients were not divided. Restores the phase before the step.

        Args:
            before: the phase before the step. Ignored if gradients were zeroed or added to since.
        """
        if self.phase is Phase.UNSCALED:
            self.phase = before

    def note_broken(self) -> None:
        """Records that a backward raised, so that some gradients are missing."""
        self.phase = Phase.BROKEN

    def note_reduced(self) -> None:
        """Records that gradients are reduced. `finalize_model_grads` may still sum and scale them."""
        if self.phase in (Phase.ZEROED, Phase.ACCUMULATING):
            self.phase = Phase.REDUCED

    def note_finalized(self) -> None:
        """Records that gradients are final: the optimizer may read them."""
        self.phase = Phase.FINALIZED

    def check_may_reduce(self) -> None:
        """Raises unless `finish_grad_sync` would give the gradients of the step.

        Raises:
            ShardstackError: a backward ran late, or did not end.
        """
        if self.phase is Phase.LATE:
            first = f", the first of parameter {self._late_parameter}" if self._late_parameter else ""
            raise ShardstackError(
                f"a backward added gradients after those of the step had been reduced{first}; put every backward of a "
                "step but the last inside no_sync, and call zero_grad_buffer before the next step"
            )
        if self.phase is Phase.BROKEN:
            raise ShardstackError(
                "a backward of this step raised an error, so that some gradients are missing; call zero_grad_buffer "
                "and repeat the step"
            )

    def check_may_finalize(self) -> None:
        """Raises unless `finalize_model_grads` may run.

        Raises:
            ShardstackError: it ran already, and would divide or sum over sequence-parallel ranks a second time.
        """
        if self.phase in (Phase.FINALIZED, Phase.UNSCALED):
            raise ShardstackError(
                "finalize_model_grads was called twice for one step; call it once after the last backward, and "
                "zero_grad_buffer before the next step"
            )

    def check_may_step(self, optimizer: str) -> None:
        """Raises unless an optimizer may read the gradients.

        Raises:
            ShardstackError: they are not global yet, or invalid.
        """
        self.check_may_reduce()
        if self.phase is Phase.UNSCALED:
            raise ShardstackError(
                f"{optimizer}.step() was called twice for the gradients of one step, which the first call has divided "
                "by the loss scale; call zero_grad_buffer, and compute them again"
            )
        if not self.is_reduced:
            raise ShardstackError(
                f"{optimizer}.step() was called before the gradients of the step were reduced over ranks; call "
                "core.distributed.finalize_model_grads([model]) after the last backward and before the step, or build "
                "DistributedDataParallel with finish_in_backward=True, where each backward reduces them"
            )


class GradientChecks:
    """Raises on gradients that are not finite, where ``check_for_nan_in_grad`` asks for it.

    Checks them before they are reduced with those of other ranks, so that an error can name the rank at fault.
    """

    def __init__(self, for_nan: bool) -> None:
        self._for_nan = for_nan

    def check(self, gradients: Iterable[tuple[str, torch.Tensor]], step: int, *, are_reduced: bool = False) -> None:
        """Checks this rank's gradients of step `step`, counted from 0, by name. Waits once for the device.

        Args:
            are_reduced: gradients are reduced over ranks already, so that another rank may be at fault.

        Raises:
            ShardstackError: names rank, step and parameter.
        """
        if not self._for_nan:
            return
        named_gradients = [(name, gradient) for name, gradient in gradients if gradient.numel()]
        # Norms are in double, so only those of fp64 gradients can overflow: for them check every element.
        norms = HostRead(_norms([gradient for _, gradient in named_gradients])).wait() if named_gradients else []
        for (name, gradient), norm in zip(named_gradients, norms, strict=True):
            if not math.isfinite(norm) and not torch.isfinite(gradient).all():
                raise ShardstackError(
                    f"{_place(name, step, are_reduced)} is not finite; lower the learning rate, look at the batch, or "
                    "drop check_for_nan_in_grad to go on"
                )


def _norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns L2 norms in double, `[n]`, by one kernel where all gradients are of one dtype and device."""
    norms = torch._foreach_norm([gradient.detach() for gradient in gradients], 2, dtype=torch.float64)
    return torch.stack([norm.to(norms[0].device) for norm in norms])


def _place(name: str, step: int, is_reduced: bool) -> str:
    of = f"{name}, reduced over ranks that may each be at fault," if is_reduced else name
    return f"rank {dist.get_rank()}, step {step}: the gradient of {of}"
