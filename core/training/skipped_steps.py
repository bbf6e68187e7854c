"""Counts steps that are skipped because a gradient is not finite, when no dynamic loss scale adapts."""

from __future__ import annotations

import warnings

from ..errors import OptimizerError

LIMIT = 10
"""Skipped steps in a row that end a run: only the data changes in between."""


class SkippedSteps:
    """Warns about the first skipped step, and ends the run after `LIMIT` in a row; all ranks skip the same steps.

    Args:
        scale_adapts: the loss scale is dynamic, so that overflows are normal: do nothing.
    """

    def __init__(self, *, scale_adapts: bool) -> None:
        self._scale_adapts = scale_adapts
        self.in_a_row = 0
        """Skipped steps in a row, up to the last step. `note` counts; a step that was made resets it."""
        self._warned = False
        """Whether a skipped step was warned about. `note` sets it, for the rest of the run."""

    def note(self, iteration: int, updated: bool) -> None:
        """Counts one step.

        Raises:
            OptimizerError: the limit is reached.
        """
        self.in_a_row = 0 if updated or self._scale_adapts else self.in_a_row + 1
        if self.in_a_row >= LIMIT:
            raise OptimizerError(
                f"gradients have been infinite or NaN for {LIMIT} steps, up to iteration {iteration}, and nothing was "
                "learned; lower --lr, lengthen the warm-up, or find the parameter with --check-for-nan-in-grad"
            )
        if self.in_a_row and not self._warned:
            self._warned = True
            warnings.warn(
                f"iteration {iteration} is skipped: its gradients are infinite or NaN; the run ends after {LIMIT} "
                "such steps in a row",
                stacklevel=2,
            )
