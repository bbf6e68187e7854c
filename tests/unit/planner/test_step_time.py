"""Times of steps that are written out, event by event."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from core.planner import Simulation
from core.planner.hardware import PRESETS
from core.planner.recorder import Mark, Ranks, Transfer, Work
from core.planner.step_time import step_time
from tests.unit.planner._lines import simulated

GROUP = Ranks(range(8))
HARDWARE = replace(PRESETS["h100"], link_bandwidth=1e9)
SENT = int(8e9)  # 7 s in a ring of eight ranks
FORWARD, BACKWARD, UPDATE = "forward of a, micro-batch 1", "backward of a, micro-batch 1", "the update"


@functools.cache
def _simulation() -> Simulation:
    """Returns a simulation whose events the tests replace."""
    return simulated("")


def _computes(seconds: float, *awaits: Transfer) -> Work:
    return Work("mm", int(seconds * HARDWARE.matmul_flops), 0, 2, awaits)


def _exposed(events: list[tuple[str, Any]], **settings: Any) -> tuple[float, float, float]:
    """Returns seconds of the step, and of exposed and hidden communication."""
    planned = replace(_simulation(), first_events=(), events=tuple(events), **settings)
    time = step_time([planned], HARDWARE)
    return time.step_s, time.exposed_s, time.hidden_s


def test_computation_waits_for_what_it_reads():
    gather = Transfer("all-gather", SENT, GROUP)
    late = [(FORWARD, gather), (FORWARD, _computes(5)), (FORWARD, _computes(1, gather))]
    assert _exposed(late) == pytest.approx((8, 2, 5), abs=0.001)
    at_once = [(FORWARD, gather), (FORWARD, _computes(1, gather)), (FORWARD, _computes(5))]
    assert _exposed(at_once) == pytest.approx((13, 7, 0), abs=0.001)


def test_overlapped_reductions_are_waited_for_at_the_end():
    reduction = Transfer("reduce-scatter", SENT, GROUP)
    events = [
        (BACKWARD, reduction),
        (BACKWARD, _computes(1, reduction)),
        (BACKWARD, _computes(4)),
        (UPDATE, _computes(1)),
    ]
    assert _exposed(events, waits_late=frozenset({GROUP})) == pytest.approx((8, 2, 5), abs=0.001)
    assert _exposed(events, waits_late=frozenset()) == pytest.approx((13, 7, 0), abs=0.001)


def test_collectives_of_a_group_queue():
    first, second = Transfer("all-gather", SENT, GROUP), Transfer("all-gather", SENT, GROUP)
    other = Transfer("all-gather", SENT, Ranks(range(8, 16)))
    assert _exposed([(FORWARD, first), (FORWARD, second), (FORWARD, _computes(1, second))])[0] == pytest.approx(
        15, 0.01
    )
    assert _exposed([(FORWARD, first), (FORWARD, other), (FORWARD, _computes(1, other))])[0] == pytest.approx(8, 0.01)


def test_a_host_that_runs_ahead_gathers_during_the_unit_before():
    first, second = Transfer("all-gather", SENT // 7, GROUP), Transfer("all-gather", SENT // 7, GROUP)
    events = [(FORWARD, first), (FORWARD, _computes(5, first)), (FORWARD, second), (FORWARD, _computes(5, second))]
    ahead = {"gathers_ahead": True, "waits_late": frozenset({GROUP})}
    assert _exposed(events, **ahead) == pytest.approx((11, 1, 1), abs=0.001)
    assert _exposed(events) == pytest.approx((12, 2, 0), abs=0.001)


def test_a_gather_that_a_step_leaves_running_delays_the_next():
    left = Transfer("all-gather", SENT, GROUP)
    planned = replace(_simulation(), first_events=((UPDATE, left),), events=((FORWARD, _computes(1, left)),))
    assert step_time([planned], HARDWARE).step_s == pytest.approx(8, 0.01)


def _passes(text: str) -> list[tuple[int, bool, int]]:
    """Returns passes from words such as F0, the forward of micro-batch 0; the first word is the stage."""
    stage, *words = text.split()
    return [(int(stage), word[0] == "F", int(word[1:])) for word in words]


def test_a_pipeline_waits_for_its_other_stages():
    """1F1B of two stages and three micro-batches, each forward 1 s and backward 2 s: 3 x 3 s, and once 3 s more."""
    update = (UPDATE, _computes(0.5))
    events = [
        event
        for number in range(3)
        for is_forward, where, seconds in ((True, FORWARD, 1), (False, BACKWARD, 2))
        for event in ((where, Mark(0, is_forward, number)), (where, _computes(seconds)))
    ]
    first = replace(_simulation(), first_events=(), events=(*events, update))
    last = replace(
        first, events=tuple((w, replace(e, stage=1) if isinstance(e, Mark) else e) for w, e in first.events)
    )
    schedule = {0: _passes("0 F0 F1 B0 F2 B1 B2"), 1: _passes("1 F0 B0 F1 B1 F2 B2")}
    time = step_time([replace(each, schedule=schedule) for each in (first, last)], HARDWARE)
    assert (time.step_s, time.bubble_s) == pytest.approx((12.5, 3), abs=0.001)
