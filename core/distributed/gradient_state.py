"""Where a wrapper's gradients are in a step, and the order of calls that this allows."""

from __future__ import annotations

from enum import Enum

from ..errors import ShardstackError


class Phase(Enum):
    """What the gradients of a wrapper hold."""

    ZEROED = "zeroed"
    """Nothing: no backward has run since they were zeroed."""

    ACCUMULATING = "accumulating"
    """Those of this rank's micro-batches; some may have been reduced already."""

    REDUCED = "reduced"
    """The global ones, by `finish_grad_sync`."""

    FINALIZED = "finalized"
    """The global ones, summed over sequence-parallel ranks and divided by the tokens, by `finalize_model_grads`."""

    UNSCALED = "unscaled"
    """Used: an optimizer with a loss scale has divided them by it, in place."""

    LATE = "late"
    """Useless: a backward added to them after they were reduced."""

    BROKEN = "broken"
    """Useless: a backward raised on its way."""


class GradientState:
    """The phase of one wrapper's gradients::

        zeroed -> accumulating -> reduced -> finalized        then zeroed again, from any phase
                                     |           |
                                     +---> late <+            a backward before which they were not zeroed

    The wrapper reports what happens; `finish_grad_sync`, `finalize_model_grads` and the optimizer's step ask before
    they act. Used by the thread that trains, and by autograd's for `note_backward`.
    """

    def __init__(self) -> None:
        self.phase = Phase.ZEROED

    @property
    def is_reduced(self) -> bool:
        """Whether gradients are the global ones."""
        return self.phase in (Phase.REDUCED, Phase.FINALIZED)

    def note_zeroed(self) -> None:
        """Gradients are zero or None; a failure before this no longer counts."""
        self.phase = Phase.ZEROED

    def note_backward(self, *, may_add: bool) -> None:
        """A backward of this step has begun.

        Args:
            may_add: gradients that were reduced may be added to, as those of a plain module: what is reduced next is
                then the sum of both.
        """
        if self.phase is Phase.ZEROED or (self.is_reduced and may_add):
            self.phase = Phase.ACCUMULATING
        elif self.is_reduced or self.phase is Phase.UNSCALED:
            self.phase = Phase.LATE

    def note_unscaled(self) -> None:
        """An optimizer has divided them by its loss scale, so that none may step by them again."""
        self.phase = Phase.UNSCALED

    def note_broken(self) -> None:
        """A backward raised, and left gradients of some parameters only."""
        self.phase = Phase.BROKEN

    def note_reduced(self) -> None:
        """Gradients are the global ones, but for what `finalize_model_grads` does beyond reducing."""
        if self.phase in (Phase.ZEROED, Phase.ACCUMULATING):
            self.phase = Phase.REDUCED

    def note_finalized(self) -> None:
        """The optimizer may read them."""
        self.phase = Phase.FINALIZED

    def check_may_reduce(self) -> None:
        """Raises unless `finish_grad_sync` would leave the gradients of the step.

        Raises:
            ShardstackError: a backward came late, or did not end.
        """
        if self.phase is Phase.LATE:
            raise ShardstackError(
                "a backward added gradients after those of the step had been reduced; put every backward of a step "
                "but the last inside no_sync, and call zero_grad_buffer before the next step"
            )
        if self.phase is Phase.BROKEN:
            raise ShardstackError(
                "a backward of this step raised on its way, so that some gradients are missing; call zero_grad_buffer "
                "and repeat the step"
            )

    def check_may_finalize(self) -> None:
        """Raises unless `finalize_model_grads` may run.

        Raises:
            ShardstackError: it ran already: it would divide, or sum over sequence-parallel ranks, a second time.
        """
        if self.phase in (Phase.FINALIZED, Phase.UNSCALED):
            raise ShardstackError(
                "finalize_model_grads was called twice for one step; call it once after the last backward, and "
                "zero_grad_buffer before the next step"
            )

    def check_may_step(self, optimizer: str) -> None:
        """Raises unless an optimizer may read the gradients.

        Raises:
            ShardstackError: they are not global yet, or useless.
        """
        self.check_may_reduce()
        if self.phase is Phase.UNSCALED:
            raise ShardstackError(
                f"{optimizer}.step() was called twice for the gradients of one step, which the first call has divided "
                "by the loss scale; call zero_grad_buffer, and compute them anew"
            )
        if not self.is_reduced:
            raise ShardstackError(
                f"{optimizer}.step() was called before the gradients of the step were reduced over ranks; call "
                "core.distributed.finalize_model_grads([model]) after the last backward and before the step"
            )
