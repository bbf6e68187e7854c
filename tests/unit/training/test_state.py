"""The schedule that a run's settings mean."""

from __future__ import annotations

import pytest

from core.training.state import build_scheduler
from tests.unit.training._configs import small_config


class Groups:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0}]


def course(steps: int, **settings) -> tuple[list[float], list[float]]:
    """Returns learning rate and weight decay in each step."""
    groups = Groups()
    scheduler = build_scheduler(small_config(**settings), groups)
    rates, decays = [], []
    for _ in range(steps):
        rates.append(groups.param_groups[0]["lr"])
        decays.append(groups.param_groups[0]["weight_decay"])
        scheduler.step(1)
    return rates, decays


def test_the_run_is_as_long_as_the_decay_unless_given():
    assert course(5, lr=1.0, min_lr=0.5)[0] == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5])
    assert course(3, lr=1.0, lr_decay_iters=2)[0] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize("warmup", [{"lr_warmup_iters": 2}, {"lr_warmup_fraction": 0.5}])
def test_a_warm_up_rises_from_its_start(warmup):
    assert course(4, lr=1.0, lr_warmup_init=0.2, **warmup)[0] == pytest.approx([0.2, 0.6, 1.0, 0.5])


def test_weight_decay_is_constant_or_goes_its_way():
    assert course(2, weight_decay=0.3)[1] == [0.3, 0.3]
    way = {"start_weight_decay": 0.0, "end_weight_decay": 0.4, "weight_decay_incr_style": "linear"}
    assert course(5, **way)[1] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


def test_a_wsd_schedule_stays_before_it_falls():
    wsd = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 2, "lr_wsd_decay_style": "linear"}
    assert course(5, lr=1.0, **wsd)[0] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0])
