"""The watch of a run, and its skipped steps, which are reported once, and end it when they do not stop."""

import warnings

import pytest

from core.base.errors import OptimizerError
from core.training.loop import LIMIT, SkippedSteps


def test_the_first_is_warned_of_and_a_row_ends_the_run():
    skipped = SkippedSteps(scale_adapts=False)
    with pytest.warns(UserWarning, match="iteration 3 is skipped") as caught:
        for iteration in range(3, 2 + LIMIT):
            skipped.note(iteration, False)
        skipped.note(2 + LIMIT, True)  # the count starts again
        for iteration in range(LIMIT - 1):
            skipped.note(iteration, False)
    assert len(caught) == 1
    with pytest.raises(OptimizerError, match=r"iteration 99.*--lr"):
        skipped.note(99, False)


def test_with_a_dynamic_loss_scale_it_is_normal():
    skipped = SkippedSteps(scale_adapts=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in range(2 * LIMIT):
            skipped.note(iteration, False)
