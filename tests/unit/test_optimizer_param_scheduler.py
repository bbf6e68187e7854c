"""The schedule against values worked out by hand, and the rules for resuming one."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from core.base.errors import CheckpointError, ConfigError
from core.optimizer_param_scheduler import OptimizerParamScheduler

SETTINGS: dict[str, Any] = {
    "init_lr": 0.1,
    "max_lr": 1.1,
    "min_lr": 0.3,
    "lr_warmup_steps": 4,
    "lr_decay_steps": 12,
    "lr_decay_style": "linear",
    "start_wd": 0.2,
    "end_wd": 0.6,
    "wd_incr_steps": 8,
    "wd_incr_style": "linear",
}


def _scheduler(*groups: dict[str, Any], **changes: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(SimpleNamespace(param_groups=list(groups) or [{}]), **(SETTINGS | changes))


def _course(scheduler: OptimizerParamScheduler, name: str, steps: int) -> list[float]:
    values = []
    for _ in range(steps):
        values.append(scheduler.optimizer.param_groups[0][name])
        scheduler.step(1)
    return values


WARM_UP = [0.1, 0.35, 0.6, 0.85, 1.1]
HALF = math.sqrt(0.5)
COURSES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "linear": ({}, [*WARM_UP, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.3, 0.3]),
    # cos(pi k / 8) for k = 0..8 is 1, .9239, .7071, .3827, 0 and the same negated
    "cosine": (
        {"lr_decay_style": "cosine"},
        [*WARM_UP, 1.0695518, 0.9828427, 0.8530734, 0.7, 0.5469266, 0.4171573, 0.3304482, 0.3, 0.3],
    ),
    "constant": ({"lr_decay_style": "constant"}, [*WARM_UP, *[1.1] * 10]),
    # 1.1 sqrt(4 / 5), ..., 1.1 sqrt(4 / 12), then the floor
    "inverse-square-root": (
        {"lr_decay_style": "inverse-square-root"},
        [*WARM_UP, 0.9838699, 0.8981462, 0.8315218, 0.7778175, 0.7333333, 0.6957011, 0.6633250, 0.6350853, 0.3],
    ),
    "inverse-square-root, floor": (
        {"lr_decay_style": "inverse-square-root", "min_lr": 0.75},
        [*WARM_UP, 0.9838699, 0.8981462, 0.8315218, 0.7778175, 0.75, 0.75, 0.75, 0.75, 0.75],
    ),
    "WSD linear": (
        {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "linear"},
        [*WARM_UP, 1.1, 1.1, 1.1, 1.1, 0.9, 0.7, 0.5, 0.3, 0.3],
    ),
    "WSD cosine": (
        {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "cosine"},
        [*WARM_UP, 1.1, 1.1, 1.1, 1.1, 0.7 + 0.4 * HALF, 0.7, 0.7 - 0.4 * HALF, 0.3, 0.3],
    ),
    # 2 * .5 ** (1/2) - 1 of the way at half time
    "WSD exponential": (
        {"lr_decay_style": "WSD", "wsd_decay_steps": 2, "lr_wsd_decay_style": "exponential"},
        [*WARM_UP, 1.1, 1.1, 1.1, 1.1, 1.1, 1.1, 0.3 + 0.8 * (2 * HALF - 1), 0.3, 0.3],
    ),
    "WSD minus_sqrt": (
        {"lr_decay_style": "WSD", "wsd_decay_steps": 4, "lr_wsd_decay_style": "minus_sqrt"},
        [*WARM_UP, 1.1, 1.1, 1.1, 1.1, 0.7, 0.3 + 0.8 * (1 - HALF), 0.3 + 0.8 * (1 - math.sqrt(0.75)), 0.3, 0.3],
    ),
    "no warm-up": ({"lr_warmup_steps": 0}, [1.1, 1.1 - 0.8 / 12, 1.1 - 1.6 / 12]),
}


@pytest.mark.parametrize("course", COURSES)
def test_learning_rate(course: str):
    changes, wanted = COURSES[course]
    assert _course(_scheduler(**changes), "lr", len(wanted)) == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.6]),
        ({"wd_incr_style": "cosine", "wd_incr_steps": 4}, [0.2, 0.4 - 0.2 * HALF, 0.4, 0.4 + 0.2 * HALF, 0.6, 0.6]),
        ({"wd_incr_style": "constant", "start_wd": 0.6, "wd_incr_steps": 0}, [0.6, 0.6]),
    ],
)
def test_weight_decay(changes: dict[str, Any], wanted: list[float]):
    assert _course(_scheduler(**changes), "weight_decay", len(wanted)) == pytest.approx(wanted)


def test_groups_multiply_and_may_have_a_range_of_their_own():
    groups = [{"lr_mult": 0.5, "wd_mult": 0.0, "max_lr": None, "min_lr": None}, {"max_lr": 2.1, "min_lr": 0.1}]
    scheduler = _scheduler(*groups)
    scheduler.step(2)
    assert [group["lr"] for group in groups] == pytest.approx([0.3, 1.1])
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.0, 0.3])
    scheduler.step(10)
    assert [group["lr"] for group in groups] == pytest.approx([0.15, 0.1])


def test_steps_may_be_samples():
    iterations, samples = _scheduler(), _scheduler(lr_warmup_steps=400, lr_decay_steps=1200, wd_incr_steps=800)
    for _ in range(9):
        iterations.step(1)
        samples.step(100)
    assert samples.optimizer.param_groups == iterations.optimizer.param_groups


def test_a_schedule_in_samples_follows_batches_that_grow():
    constant, growing = (_scheduler(lr_warmup_steps=400, lr_decay_steps=1200, wd_incr_steps=800) for _ in range(2))
    course = {}
    for consumed in range(50, 1301, 50):
        constant.step(50)
        course[consumed] = dict(constant.optimizer.param_groups[0])
    consumed = 0
    for batch in (50, 50, 100, 100, 200, 200, 200, 400):
        growing.step(batch)
        consumed += batch
        assert growing.optimizer.param_groups[0] == course[consumed]


@pytest.mark.parametrize("course", ["cosine", "WSD minus_sqrt"])
def test_a_resumed_course_goes_on_where_it_stopped(course: str):
    changes, wanted = COURSES[course]
    stopped = _scheduler(**changes)
    stopped.step(7)
    resumed = _scheduler(**changes)
    resumed.step(3)
    resumed.load_state_dict(stopped.state_dict())
    assert _course(resumed, "lr", 5) == pytest.approx(wanted[7:12])


def test_resuming_another_schedule_follows_the_rules():
    other = _scheduler(max_lr=0.8, lr_decay_steps=20, min_lr=0.2, end_wd=0.4)
    other.step(6)
    state = other.state_dict()

    with pytest.raises(CheckpointError, match=r"max_lr is 1.1, but the checkpoint has 0.8; set use_checkpoint"):
        _scheduler(use_checkpoint_opt_param_scheduler=False).load_state_dict(state)

    group = {"max_lr": 1.1, "min_lr": 0.3}  # as an optimizer built for the same peak and floor has
    ours = _scheduler(group)
    ours.load_state_dict(state)
    assert ours.state_dict() == state
    assert group["lr"] == pytest.approx(other.optimizer.param_groups[0]["lr"]) == pytest.approx(0.8 - 0.6 / 8)
    assert group["weight_decay"] == pytest.approx(0.35)

    kept = _scheduler(use_checkpoint_opt_param_scheduler=False, override_opt_param_scheduler=True)
    kept.load_state_dict(state)
    assert kept.optimizer.param_groups[0]["lr"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_decay_style": "step"}, "lr_decay_style is 'step'; it takes one of"),
        ({"wd_incr_style": "step"}, "wd_incr_style is 'step'"),
        ({"min_lr": -0.1}, "min_lr is -0.1"),
        ({"max_lr": 0.2}, "max_lr is 0.2"),
        ({"init_lr": 2.0}, "init_lr is 2.0"),
        ({"lr_warmup_steps": 12}, "lr_warmup_steps is 12"),
        ({"lr_decay_steps": 0}, "lr_decay_steps is 0"),
        ({"start_wd": 0.7}, "start_wd is 0.7"),
        ({"wd_incr_style": "constant"}, "start_wd 0.2 and end_wd 0.6 have to be equal"),
        ({"wd_incr_steps": 0}, "wd_incr_steps is 0"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_style": "linear"}, "wsd_decay_steps is None"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 9, "lr_wsd_decay_style": "linear"}, "WSD takes from 1 to 8"),
        ({"lr_decay_style": "WSD", "wsd_decay_steps": 2}, "lr_wsd_decay_style is None"),
        ({"override_opt_param_scheduler": True}, "choose one"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        _scheduler(**changes)


def test_a_peak_that_no_group_would_read_is_refused():
    with pytest.raises(ConfigError, match=r"max_lr is 1.1, but every parameter group has its own, \[0.5\]"):
        _scheduler({"max_lr": 0.5, "min_lr": 0.3}, {"max_lr": 0.5, "min_lr": 0.3})
