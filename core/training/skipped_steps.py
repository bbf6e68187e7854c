"""Steps that are skipped because a gradient is not finite, where no loss scale falls until it is."""

from __future__ import annotations

import warnings

from ..errors import OptimizerError

LIMIT = 10
"""Skipped steps in a row that end a run: nothing changes in between but the data."""


class SkippedSteps:
    """Warns of the first skipped step, and ends the run at a row of `LIMIT`; all ranks skip the same steps.

    Args:
        scale_adapts: with a dynamic loss scale an overflow is normal, and nothing is said.
    """

    def __init__(self, *, scale_adapts: bool) -> None:
        self._scale_adapts = scale_adapts
        self.in_a_row = 0
        """Skipped steps up to the last one, where the loss scale does not adapt."""
        self._warned = False

    def note(self, iteration: int, updated: bool) -> None:
        """Takes notice of one step.

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
