"""The rule of the contract: what works on a plain module gives that result under every wrapper, or raises.

Each scenario, of `outside_the_loop`, is a function that trains `run` in some way that no documented loop does. It runs
once on a plain module in one process, which is the oracle, and once under every wrapper on two ranks: the weights must
be bitwise equal, or the error must be the one that the scenario names for this wrapper.
"""

from __future__ import annotations

import functools
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from core.comm import collectives
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed
from tests.unit.distributed._toys import build, toy
from tests.unit.distributed.outside_the_loop import SCENARIOS
from tests.unit.distributed.outside_the_loop.scenario import Plain, Wrapped, largest


@functools.cache
def _plain(name: str, adds_ranks_first: bool) -> dict[str, Tensor]:
    """Returns the weights of a plain module after a scenario; ranks are reused, and have them for every wrapper."""
    case = SCENARIOS[name]
    run = Plain(case.make(), case.optimizer, adds_ranks_first=adds_ranks_first)
    case.go(run)
    return run.weights()


def _all_scenarios(kind: str) -> dict[str, str]:
    """Returns by scenario what was wrong; empty where nothing was."""
    return {name: _outcome(name, kind) for name, case in SCENARIOS.items() if kind in case.only}


def _gathering_slowly() -> Any:
    """Delays each all-gather, so that code that does not wait for parameters reads old values."""
    all_gather = collectives.all_gather

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.01)
        all_gather(*args, **options)

    return mock.patch.object(collectives, "all_gather", slow)


def _outcome(name: str, kind: str) -> str:
    case = SCENARIOS[name]
    pattern = case.raises.get(kind)
    gathers = _gathering_slowly() if "overlap" in kind else nullcontext()
    try:
        with gathers:
            run = Wrapped(kind, case.make(), case.optimizer, **case.settings.get(kind, {}))
            case.go(run)
            found = run.weights()
    except Exception as error:
        if pattern and re.search(pattern, str(error)):
            return "as expected"
        return f"raised {type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
    if pattern:
        return f"did not raise {pattern!r}"
    expected = _plain(name, adds_ranks_first=kind == "zero2_every_micro_batch")
    wrong = {key: largest(found[key].double() - expected[key].double()) for key in expected}
    rtol = case.rtol_of.get(kind, case.rtol)
    wrong = {key: off for key, off in wrong.items() if not off <= rtol * largest(expected[key])}
    return f"differs: {wrong}" if wrong else "as expected"


@functools.cache
def outcomes(kind: str) -> list[dict[str, str]]:
    return run_distributed(_all_scenarios, 2, kind)


def cases() -> Iterator[tuple[str, str]]:
    for name, case in SCENARIOS.items():
        for kind in case.only:
            yield name, kind


BRIEF = ("ddp_overlap", "zero2_overlap", "zero3", "fsdp2")
"""Wrappers that run each time."""


@pytest.mark.parametrize(("name", "kind"), quick(cases(), lambda case: case[1] in BRIEF))
def test_usage_of_a_plain_module_gives_its_result_or_raises(name: str, kind: str) -> None:
    found = {outcome[name] for outcome in outcomes(kind)}
    assert found == {"as expected"}, "\n".join(found)


def _wraps_other_ties(kind: str) -> str:
    try:
        build(kind, toy(tied=dist.get_rank() == 0))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ties_that_differ_between_ranks_are_refused(kind: str) -> None:
    for message in run_distributed(_wraps_other_ties, 2, kind):
        assert "wrap different models" in message
