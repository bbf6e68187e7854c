"""The numbers do not change: every wrapper trains a GPT to the weights that the others, and one process, reach.

At two ranks there is one order to add in, so curves are equal to the last bit, in every precision; at four too, as all
add in one tree, hybrids included. Where micro-batches are reduced one by one, torch's collectives add, or one process
does all, losses agree to 1e-6 and gradients to 1e-5; `test_reproducible` has the mode in which these are equal too, on
any number of ranks.
"""

from __future__ import annotations

import math

import pytest

from tests.functional._equality import BRIEF_FP16_STEPS, FOUR_RANKS, SERIAL, TWO_RANKS, Case, curves_of
from tests.unit._gpt import Training
from tests.unit._runs import Curve


def _params(cases: list[Case]) -> list:
    return [pytest.param(case, id=str(case), marks=[pytest.mark.long] if case.is_long else []) for case in cases]


def assert_worth_comparing(curve: Curve, training: Training) -> None:
    """Asserts that the run learned, that clipping bit in some steps and not in others, and that the norm is of all
    gradients."""
    assert curve.losses[-1] < (0.5 if training.steps > BRIEF_FP16_STEPS else 0.8) * curve.losses[0]
    assert min(curve.grad_norms) < training.optimizer["clip_grad"] < max(curve.grad_norms)
    if training.precision == "fp16":
        assert 0 in curve.skipped and any(step > 10 for step in curve.skipped)  # the scale fell, grew and fell again
    else:
        norm = math.sqrt(sum(gradient.double().square().sum().item() for gradient in curve.gradients.values()))
        assert curve.grad_norms[-1] == pytest.approx(norm, rel=1e-7)


@pytest.mark.parametrize("case", _params(TWO_RANKS))
def test_wrappers_are_equal_bitwise_on_two_ranks(case: Case):
    _assert_equal(case)


@pytest.mark.parametrize("case", _params(FOUR_RANKS))
def test_wrappers_are_equal_on_four_ranks(case: Case):
    _assert_equal(case)


@pytest.mark.parametrize("case", _params(SERIAL))
def test_a_wrapper_equals_the_serial_run(case: Case):
    _assert_equal(case)


def _assert_equal(case: Case) -> None:
    expected = case.expected()
    assert_worth_comparing(expected, case.settings)
    case.compare(curves_of(case.wrapper, case.settings, case.ranks), expected)
