"""Global batches that grow, by Megatron-LM's rules, and its global calculator."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from core.base.errors import ConfigError, ParallelConfigError
from core.num_microbatches_calculator import batch_schedule, num_microbatches
from tests.unit.training._configs import small_config


def _size(consumed: int, start: int, increment: int, samples: int, last: int) -> int:
    """Computes the size after `consumed` samples as Megatron-LM 0.16 does, from the number of the interval."""
    if consumed > samples:
        return last
    per_increment = samples / ((last - start) // increment)
    return min(last, start + int(consumed / per_increment) * increment)


@pytest.mark.parametrize("rampup", [(16, 16, 5859375), (384, 384, 97656250), (4, 2, 10), (2, 4, 7)])
def test_a_ramp_has_megatron_lms_sizes(rampup: tuple[int, int, int]):
    start, increment, samples = rampup
    last = start + 12 * increment
    schedule = batch_schedule(last, rampup, None, 8)
    for first, _ in schedule:
        for consumed in {max(0, first - 1), first, first + 1}:
            ours = max(entry for entry in schedule if entry[0] <= consumed)[1]
            assert ours == _size(consumed, *rampup, last), consumed
    assert (schedule[0], schedule[-1]) == ((0, start), (samples, last)) and len(schedule) == 13


def test_steps_are_by_tokens_in_one_word_or_several():
    expected = ((0, 16), (1171875, 320), (5859375, 1536))
    assert batch_schedule(1536, None, ("0:16", "2.4B:320", "12B:1536"), 2048) == expected
    assert batch_schedule(None, None, ("0:16 2.4B:320, 12B:1.536K",), 2048) == expected
    assert batch_schedule(6, None, None, 8) == ((0, 6),)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rampup_batch_size": (2, 2, 8)}, "2 2 8 and global_batch_size None; give START INCREMENT SAMPLES"),
        ({"rampup_batch_size": (2, 2), "global_batch_size": 8}, "rampup_batch_size is 2 2 and"),
        ({"rampup_batch_size": (2, 4, 8), "global_batch_size": 8}, "INCREMENT divides global_batch_size - START"),
        ({"rampup_batch_size": (8, 4, 8), "global_batch_size": 8}, "rampup_batch_size is 8 4 8"),
        ({"step_batch_size_schedule": ("8:2",)}, "is '8:2' and global_batch_size None; write TOKENS:SIZE"),
        ({"step_batch_size_schedule": ("0:2", "8")}, "is '0:2 8'"),
        ({"step_batch_size_schedule": ("0:2", "4:4", "6:6")}, "rising numbers of tokens"),
        ({"step_batch_size_schedule": ("0:2", "8:4"), "global_batch_size": 8}, "global_batch_size 8; write"),
        ({"step_batch_size_schedule": ()}, "is '' and"),
        ({"step_batch_size_schedule": ("0:16.7",)}, "is '0:16.7' and"),
        ({"step_batch_size_schedule": ("0:inf",)}, "is '0:inf' and"),
    ],
)
def test_schedules_that_cannot_be_are_one_line(settings: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        small_config(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_has_the_sizes_of_its_schedule(world_size: int):
    config = small_config(rampup_batch_size=(4, 4, 20), global_batch_size=12, train_iters=None, train_samples=57)
    sizes, consumed = [], 0
    for _ in range(config.train_iters(world_size)):
        size = config.global_batch_size(world_size, consumed)
        assert config.num_microbatches(world_size, consumed) == size // 2 // world_size
        sizes.append(size)
        consumed += size
    assert sizes == [4, 4, 4, 8, 12, 12, 12] and 57 - consumed < 12
    assert config.global_batch_size(world_size) == 12 and config.train_samples(world_size) == 57
    assert small_config(train_iters=None, train_samples=57, global_batch_size=8).train_iters(world_size) == 7
    assert small_config(rampup_batch_size=(4, 4, 20), global_batch_size=12).train_samples(world_size) == 48


def _iterations_of_megatron_lm(settings: dict[str, Any], sizes: Callable[[int], int]) -> int:
    """Computes `update_train_iters` of Megatron-LM, in its loops: 0.16's for a ramp, else 0.19's and 0.20's."""
    total, iterations, consumed = settings["train_samples"], 0, 0
    if ramp := settings.get("rampup_batch_size"):
        while consumed <= ramp[2] and consumed <= total:
            consumed += sizes(consumed)
            iterations += 1
        return iterations + (max(0, total - consumed) // settings["global_batch_size"])
    if "step_batch_size_schedule" not in settings:
        return total // settings["global_batch_size"]
    while consumed < total:
        consumed += sizes(consumed)
        iterations += 1
    return iterations


@pytest.mark.parametrize("total", [4, 12, 13, 19, 20, 21, 31, 32, 57, 64])
@pytest.mark.parametrize(
    "settings",
    [
        {"global_batch_size": 4},
        {"rampup_batch_size": (4, 4, 20), "global_batch_size": 12},
        {"rampup_batch_size": (2, 2, 12), "global_batch_size": 8},
        {"rampup_batch_size": (4, 8, 31), "global_batch_size": 12},
        {"step_batch_size_schedule": ("0:4 64:8 192:12",)},
        {"step_batch_size_schedule": ("0:4", "400:8")},
    ],
    ids=str,
)
def test_a_run_has_megatron_lms_iterations(settings: dict[str, Any], total: int):
    settings = settings | {"train_samples": total}
    config = small_config(**settings, train_iters=None)
    expected = _iterations_of_megatron_lm(settings, lambda consumed: config.global_batch_size(1, consumed))
    assert config.train_iters(1) == expected
    consumed = 0
    for _ in range(expected):
        consumed += config.global_batch_size(1, consumed)
    assert (config.train_samples(1), config.data_samples(1)) == (total, max(total, consumed))


def test_micro_batches_divide_the_global_batch():
    assert num_microbatches(12, 2, 3) == 2
    with pytest.raises(ParallelConfigError, match="12 is no multiple of micro_batch_size 5 x"):
        num_microbatches(12, 5, 1)
