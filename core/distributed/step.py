"""The order of calls in a step: what a wrapper's gradients are, and which calls may use them as they are."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ..base.errors import ShardstackError


class Phase(Enum):
    """The contents of a wrapper's gradients."""

    ZEROED = "zeroed"
    """No gradients: no backward has run since they were zeroed."""

    ACCUMULATING = "accumulating"
    """Gradients of this rank's micro-batches. Some may be reduced already."""

    REDUCED = "reduced"
    """Global gradients, after `finish_grad_sync`."""

    FINALIZED = "finalized"
    """Global gradients, summed over sequence-parallel ranks and divided by tokens, after `finalize_model_grads`."""

    UNSCALED = "unscaled"
    """Used: `shard_optimizer`'s step has divided them by its loss scale, in place."""

    LATE = "late"
    """Invalid: a backward brought a gradient after it could be reduced with the others, which was dropped."""

    BROKEN = "broken"
    """Invalid: a backward raised an error."""


class Call(Enum):
    """A call that uses gradients, in the order of a step."""

    REDUCE = "finish_grad_sync"
    SCALE = "scale_gradients"
    FINALIZE = "finalize_model_grads"
    STEP = "step"
    """The ``step()`` of any optimizer, torch's too."""


class Step:
    """The phase of one wrapper's gradients::

        zeroed -> accumulating -> reduced -> finalized -> unscaled    then zeroed again, from any phase
                       |             |           |           |
                       +-------------+---------> late <------+        a backward without zeroing gradients first
                       +-> broken                                     a backward that raised

    A call that uses gradients asks `check` first, and whoever has changed them says so by `enter` afterwards:

    ============  ============================================================
    accumulating  a backward's first gradient (`note_backward`)
    late          an engine, at a gradient that it has to drop
    broken        an engine that finds a backward which did not end
    reduced       `finish_grad_sync`; FSDP2, whose last backward has reduced all
    finalized     `finalize_model_grads`
    unscaled      an optimizer of `shard_optimizer` with a loss scale
    zeroed        `zero_grad_buffer`, from any phase
    ============  ============================================================
    """

    def __init__(self) -> None:
        # `enter` alone sets it: on autograd's thread during a backward, else on the training thread.
        self.phase = Phase.ZEROED
        # Number of steps whose gradients were reduced, for messages. `enter` counts.
        self.number = 0
        # What `_BaseDataParallel.release` has released; `restore` takes it out.
        self.released = set[str]()
        # The parameter whose gradient came too late, where it is known; valid only in the phase LATE.
        self._late_parameter = ""

    @property
    def is_reduced(self) -> bool:
        """Whether gradients are global."""
        return self.phase in (Phase.REDUCED, Phase.FINALIZED)

    def reject_released(self, use: str, *parts: str) -> None:
        """Raises if one of these parts of a model is released, and cannot be used.

        Raises:
            ShardstackError: names it.
        """
        if self.released and (released := [part for part in parts if part in self.released]):
            raise ShardstackError(
                f"{use} needs the {' and the '.join(released)} of a wrapped model, whose memory is released; call the "
                "wrapper's restore() first"
            )

    def reject_mid_step(self, use: str) -> None:
        """Raises if a backward has run whose gradients are not reduced yet.

        Args:
            use: what is refused, as the beginning of a sentence.

        Raises:
            ShardstackError: says how a step ends.
        """
        if self.phase is Phase.ACCUMULATING:
            raise ShardstackError(
                f"{use} in mid-step, after a backward; finish the step first (finalize_model_grads and "
                "optimizer.step), or call zero_grad_buffer"
            )

    def check(self, call: Call, optimizer: str = "") -> None:
        """Raises unless gradients are what a call needs.

        Args:
            optimizer: whose `Call.STEP` it is, for the message.

        Raises:
            ShardstackError: says which call is missing, or was made twice.
        """
        use = f"{optimizer}.step()" if call is Call.STEP else call.value
        self.reject_released(use, "model", "gradients", *(("optimizer",) if call is Call.STEP else ()))
        if (message := _REFUSALS[call].get(self.phase)) is not None:
            late = f", the first of parameter {self._late_parameter}" if self._late_parameter else ""
            raise ShardstackError(message.format(call=call.value, phase=self.phase.value, of=optimizer, late=late))

    def enter(self, phase: Phase, parameter: str = "") -> None:
        """Sets the phase. Gradients that are reduced, used or invalid do not become reduced by another reduction.

        Args:
            parameter: whose gradient was too late.
        """
        if phase is Phase.REDUCED and self.phase not in (Phase.ZEROED, Phase.ACCUMULATING):
            return
        self.phase, self._late_parameter = phase, parameter
        if phase is Phase.REDUCED:
            self.number += 1

    def note_backward(self, opens: Callable[[], bool]) -> None:
        """Records that a backward of this step has begun. Called when its first gradient arrives.

        Args:
            opens: called where gradients are reduced; returns whether the backward may add to them, as in a plain
                module. The next reduction then reduces the sum.
        """
        self.reject_released("a backward", "model", "gradients")
        if self.phase in (Phase.ACCUMULATING, Phase.LATE, Phase.BROKEN):
            return
        if self.phase is Phase.ZEROED or (self.is_reduced and opens()):
            self.enter(Phase.ACCUMULATING)
        else:
            self.enter(Phase.LATE)


_INVALID = {
    Phase.LATE: "a backward added gradients after those of the step had been reduced{late}; put every backward of a "
    "step but the last inside no_sync, and call zero_grad_buffer before the next step",
    Phase.BROKEN: "a backward of this step raised an error, so that some gradients are missing; call zero_grad_buffer "
    "and repeat the step",
}
_NOT_REDUCED = (
    "{of}.step() was called before the gradients of the step were reduced over ranks; call "
    "shardstack.distributed.finalize_model_grads([model]) after the last backward and before the step, or build "
    "DistributedDataParallel with finish_in_backward=True, where each backward reduces them"
)
_ZEROED = _NOT_REDUCED + (
    "; of several optimizers of a model step all before zero_grad of one, which zeroes the gradients of the model"
)
_TO_SCALE = "{call} was called while gradients are {phase}; call finish_grad_sync first"
_TWICE = (
    "{call} was called twice for one step; call it once after the last backward, and zero_grad_buffer before the next "
    "step"
)
_STEP_TWICE = (
    "{of}.step() was called twice for the gradients of one step, which the first call has divided by the loss scale; "
    "call zero_grad_buffer, and compute them again"
)

_REFUSALS: dict[Call, dict[Phase, str]] = {
    Call.REDUCE: _INVALID,
    Call.SCALE: {phase: _TO_SCALE for phase in Phase if phase not in (Phase.REDUCED, Phase.FINALIZED)},
    Call.FINALIZE: {Phase.FINALIZED: _TWICE, Phase.UNSCALED: _TWICE},
    Call.STEP: _INVALID | {Phase.UNSCALED: _STEP_TWICE, Phase.ZEROED: _ZEROED, Phase.ACCUMULATING: _NOT_REDUCED},
}
"""What a call raises in a phase in which it would compute something else than the step's gradients."""
