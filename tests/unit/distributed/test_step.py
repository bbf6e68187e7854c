"""The order of calls in a step, as a table."""

from __future__ import annotations

import pytest

from core.base.errors import ShardstackError
from core.distributed.step import Call, Phase, Step

REDUCED = {Phase.REDUCED, Phase.FINALIZED}
ALLOWED = {
    Call.REDUCE: set(Phase) - {Phase.LATE, Phase.BROKEN},
    Call.SCALE: REDUCED,
    Call.FINALIZE: set(Phase) - {Phase.FINALIZED, Phase.UNSCALED},
    Call.STEP: REDUCED,
}
"""The phases in which each call may use gradients. `finalize_model_grads` calls `finish_grad_sync` too."""


@pytest.mark.parametrize("call", Call)
@pytest.mark.parametrize("phase", Phase)
def test_a_call_is_refused_in_each_other_phase(call: Call, phase: Phase) -> None:
    step = Step()
    step.enter(Phase.ACCUMULATING)
    step.enter(phase)
    if phase in ALLOWED[call]:
        step.check(call, "SGD")
        return
    with pytest.raises(ShardstackError, match=r"call|put every backward"):  # what to do
        step.check(call, "SGD")


def test_a_step_before_the_reduction_names_both_ways_to_reduce():
    step = Step()
    step.note_backward(lambda: True)
    with pytest.raises(
        ShardstackError, match=r"^SGD.step.*shardstack.distributed.finalize_model_grads.*finish_in_backward"
    ):
        step.check(Call.STEP, "SGD")


def test_a_late_gradient_names_its_parameter():
    step = Step()
    step.enter(Phase.LATE, "head.weight")
    with pytest.raises(
        ShardstackError, match=r"been reduced, the first of parameter head\.weight; put every backward"
    ):
        step.check(Call.REDUCE)


@pytest.mark.parametrize(
    ("phase", "opens", "after"),
    [
        (Phase.ZEROED, False, Phase.ACCUMULATING),
        (Phase.REDUCED, True, Phase.ACCUMULATING),
        (Phase.FINALIZED, False, Phase.LATE),
        (Phase.UNSCALED, True, Phase.LATE),
        (Phase.BROKEN, True, Phase.BROKEN),
    ],
)
def test_a_backward_opens_what_may_be_added_to(phase: Phase, opens: bool, after: Phase) -> None:
    step = Step()
    step.enter(phase)
    step.note_backward(lambda: opens)
    assert step.phase is after


@pytest.mark.parametrize("phase", [Phase.LATE, Phase.BROKEN, Phase.UNSCALED, Phase.FINALIZED])
def test_another_reduction_ends_no_later_phase(phase: Phase) -> None:
    step = Step()
    step.enter(phase)
    step.enter(Phase.REDUCED)
    assert step.phase is phase


def test_a_step_is_counted_when_its_gradients_are_reduced():
    step = Step()
    for number in (1, 2):
        step.enter(Phase.ACCUMULATING)
        step.enter(Phase.REDUCED)
        step.enter(Phase.REDUCED)  # a second reduction of one step
        step.enter(Phase.FINALIZED)
        step.enter(Phase.REDUCED)
        step.enter(Phase.ZEROED)
        assert step.number == number
