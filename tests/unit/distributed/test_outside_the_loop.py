"""The rule of the contract: what works on a plain module gives that result under every wrapper, or raises.

Each scenario, of `outside_the_loop`, is a function that trains `run` in some way that no documented loop does. It runs
once on a plain module in one process, which is the oracle, and once under every wrapper on two ranks: the weights, and
the gradients that the scenario compares, must be bitwise equal, or the error must be the one that the scenario names
for this wrapper.
"""

from __future__ import annotations

import functools
import re
import traceback
from contextlib import nullcontext

import pytest
from torch import Tensor

from tests.streams.late_lane import late_lanes
from tests.unit._quick import quick
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import run_distributed
from tests.unit.distributed.outside_the_loop import SCENARIOS
from tests.unit.distributed.outside_the_loop.scenario import Plain, Wrapped, largest


@functools.cache
def _plain(name: str, adds_ranks_first: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns weights of a plain module after a scenario, and gradients; ranks are reused, for every wrapper."""
    case = SCENARIOS[name]
    run = Plain(case.make(), case.optimizer, adds_ranks_first=adds_ranks_first)
    case.go(run)
    return run.weights(), run.reduced


def _run_scenarios(names: list[str], kind: str) -> dict[str, str]:
    """Returns by scenario what was wrong."""
    return {name: _outcome(name, kind) for name in names}


def _outcome(name: str, kind: str) -> str:
    case = SCENARIOS[name]
    pattern = case.raises.get(kind)
    lanes = late_lanes() if "overlap" in kind else nullcontext()  # code that does not wait reads old values
    try:
        with lanes:
            run = Wrapped(kind, case.make(), case.optimizer, **case.settings.get(kind, {}))
            case.go(run)
            found = run.weights()
    except Exception as error:
        if pattern and re.search(pattern, str(error)):
            return "as expected"
        return f"raised {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
    if pattern:
        return f"did not raise {pattern!r}"
    expected, reduced = _plain(name, adds_ranks_first=kind == "zero2_every_micro_batch")
    wrong = {key: largest(found[key].double() - expected[key].double()) for key in expected}
    rtol = case.rtol_of.get(kind, case.rtol)
    wrong = {key: off for key, off in wrong.items() if not off <= rtol * largest(expected[key])}
    try:
        assert_same_sums(run.reduced, reduced, case.additions_of.get(kind, 0))
    except AssertionError as error:
        return f"gradients differ: {error}, and weights: {wrong}"
    return f"differs: {wrong}" if wrong else "as expected"


CASES = [(name, kind) for name, case in SCENARIOS.items() for kind in case.only]


def is_brief(case: tuple[str, str]) -> bool:
    """Returns whether a case runs each time: replicas do where other things are expected of them than of ZeRO-2."""
    name, kind = case
    if kind != "ddp_overlap":
        return kind in ("zero2_overlap", "zero3", "fsdp2")
    of = SCENARIOS[name]
    return "zero2_overlap" not in of.only or of.raises.get(kind) != of.raises.get("zero2_overlap")


@functools.cache
def outcomes(kind: str, is_short: bool) -> list[dict[str, str]]:
    names = [case[0] for case in CASES if case[1] == kind and is_brief(case) == is_short]
    return run_distributed(_run_scenarios, 2, names, kind)


@pytest.mark.parametrize(("name", "kind"), quick(CASES, is_brief))
def test_usage_of_a_plain_module_gives_its_result_or_raises(name: str, kind: str) -> None:
    found = {outcome[name] for outcome in outcomes(kind, is_brief((name, kind)))}
    assert found == {"as expected"}, "\n".join(found)
