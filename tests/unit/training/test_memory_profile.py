"""The memory of a step: its categories equal the known tensors, and its peak another measurement."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from core.base.device import current_device
from core.base.errors import ConfigError
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.training import memory_profile
from core.training.loop import train
from core.training.memory_profile import (
    CATEGORIES,
    PICTURE_FILE,
    SERIES_FILE,
    MemoryTimeline,
    measure_step,
    write_timeline,
)
from tests.unit._lane import lanes_that, run_at_once
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import build
from tests.unit.training._configs import small_config

WIDTH, ROWS, LAYERS = 256, 1024, 6
WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * WIDTH * ROWS  # bytes: 256 KiB and 1 MiB


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _model(kind: str) -> Any:
    module = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(current_device())
    model = build(kind, module, unit_classes=(Layer,))
    return model, get_megatron_optimizer(OptimizerConfig(lr=1e-4), [model])


def _step(model: Any, optimizer: Any, num_microbatches: int = 2) -> None:
    model.zero_grad_buffer()
    for index in range(num_microbatches):
        with model.no_sync() if index < num_microbatches - 1 else nullcontext():
            model(torch.ones(ROWS, WIDTH, device=current_device())).square().mean().backward()
    finalize_model_grads([model])
    optimizer.step()


def _most(timeline: MemoryTimeline, name: str) -> int:
    index = CATEGORIES.index(name)
    return max(row[index] for row in timeline.category_bytes)


@pytest.mark.parametrize("kind", quick(["ddp", "zero1", "zero2", "zero3", "fsdp2"], lambda kind: kind != "zero1"))
@on_ranks(2)
def test_each_category_holds_what_is_known_of_it(kind):
    with lanes_that(run_at_once):
        model, optimizer = _model(kind)
        for _ in range(2):
            _step(model, optimizer)
        _, timeline = measure_step(model, optimizer, lambda: _step(model, optimizer))
        _step(model, optimizer)  # nothing that measured is left behind
    whole = LAYERS * WEIGHT
    shards = whole // 2 if kind in ("zero3", "fsdp2") else whole
    state = 2 * whole if kind == "ddp" else whole  # AdamW keeps two moments of what a rank updates
    assert _most(timeline, "parameters") == shards
    assert state <= _most(timeline, "optimizer state") < state + 4096  # and step counts
    if kind == "fsdp2":
        # The last layer stays gathered; with one that is prefetched, one in use and the buffer of a gather under way.
        assert 2 * WEIGHT <= _most(timeline, "gathered parameters") <= 5 * WEIGHT
    elif kind == "zero3":  # the slot in use, and one for the unit that is gathered ahead
        assert _most(timeline, "gathered parameters") == 2 * WEIGHT
    else:
        assert _most(timeline, "gathered parameters") == 0
    # Between micro-batches gradients are whole under every wrapper; in addition there are shards, and what is sent,
    # which a thread of the process group may free after the step has gone on.
    assert whole <= _most(timeline, "gradients") <= whole + whole // 2 + whole
    # Backward begins with the input of every layer and the output of the last, and computes a few more.
    assert LAYERS * ACTIVATION <= _most(timeline, "activations and other") <= (LAYERS + 5.1) * ACTIVATION
    ends = [dict(zip(CATEGORIES, timeline.category_bytes[i], strict=True)) for i in (0, -1)]
    for name in CATEGORIES[:4]:  # a step ends as it began
        assert ends[0][name] == ends[1][name], name
    assert ends[1]["activations and other"] <= 4096
    assert list(timeline.times_s) == sorted(timeline.times_s)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@on_ranks(2)
def test_the_peak_is_that_of_another_measure(kind):
    with lanes_that(run_at_once), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = _model(kind)
        for _ in range(2):
            _step(model, optimizer)
        tracker = MemTracker()
        tracker.track_external(model, optimizer.optimizer, *model.engine.held()["gradients"])
        with tracker:
            _step(model, optimizer, num_microbatches=1)
        _, timeline = measure_step(model, optimizer, lambda: _step(model, optimizer, num_microbatches=1))
    seen = sum(held["Total"] for held in tracker.get_tracker_snapshot("peak").values())
    seen, measured = seen, timeline.peak_bytes
    # Threads of process groups free gradients that were sent, which the profiler then believes to live longer.
    assert 0 <= measured - seen <= (0 if kind == "ddp" else LAYERS * WEIGHT), (seen, measured)


def _measures_and_asks_the_allocator(kind: str) -> tuple[MemoryTimeline, int]:
    model, optimizer = _model(kind)
    for _ in range(2):
        _step(model, optimizer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _, timeline = measure_step(model, optimizer, lambda: _step(model, optimizer))
    return timeline, torch.cuda.max_memory_allocated()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_gpus_peak_is_that_of_its_allocator(kind):
    with one_rank_on_a_gpu():
        timeline, seen = _measures_and_asks_the_allocator(kind)
    whole = LAYERS * WEIGHT
    assert timeline.device == "cuda"
    assert abs(timeline.peak_bytes - seen) <= whole, (timeline.peak_bytes, seen)
    assert _most(timeline, "parameters") == whole
    assert 2 * whole <= _most(timeline, "optimizer state") < 2 * whole + 2**16  # and step counts
    assert whole <= _most(timeline, "gradients") <= 3 * whole
    assert _most(timeline, "activations and other") >= LAYERS * ACTIVATION
    assert list(timeline.times_s) == sorted(timeline.times_s)


@on_ranks(1)
def test_a_run_without_a_folder_is_refused_at_its_start():
    for name, flag in (("profile_memory", "--profile-memory"), ("profile", "--profile")):
        with pytest.raises(ConfigError, match=rf"^{flag} writes into the run's folder.*add --save"):
            train(None, small_config(**{name: True}), None)


_EVENTS = torch._C._profiler._EventType


def _mark(at: int) -> SimpleNamespace:
    """Returns the profiler's event of a record that begins `at` so many ns."""
    return SimpleNamespace(name=memory_profile._MARK, tag=_EVENTS.TorchOp, start_time_ns=at, end_time_ns=at + 10)


def _change(at: int, address: int, nbytes: int) -> SimpleNamespace:
    """Returns the profiler's event of an allocation, or with negative bytes of a release."""
    fields = SimpleNamespace(ptr=address, alloc_size=nbytes, device=torch.device("cpu"))
    return SimpleNamespace(name="[memory]", tag=_EVENTS.Allocation, start_time_ns=at, extra_fields=fields, parent=None)


def test_records_unseen_by_the_profiler_are_placed_by_the_clock():
    weight, activation, gradient = range(3)  # addresses
    changes = [
        _change(50, 3, 77),  # before the step begins
        _change(150, activation, 1000),
        _change(200, gradient, 500),
        _change(400, activation, -1000),
    ]
    first, later = {weight: (0, 4096)}, {weight: (0, 4096), gradient: (2, 500)}
    notes = [
        memory_profile._Note(held, is_complete=True, time_ns=at + 3)  # the clock of the process is not the profiler's
        for held, at in ((first, 100), (later, 300), (later, 500))
    ]
    marked = memory_profile._timeline([*map(_mark, (100, 300, 500)), *changes], notes, "cpu", None)
    unmarked = memory_profile._timeline(changes, notes, "cpu", None)
    begins = (4096, 0, 0, 0, 0)
    ends = (4096, 0, 500, 0, 0)
    assert [*map(tuple, marked.category_bytes)] == [begins, (4096, 0, 0, 0, 1000), (4096, 0, 500, 0, 1000), ends, ends]
    assert (unmarked.category_bytes == marked.category_bytes).all()
    assert [round(1e9 * time) for time in marked.times_s] == [0, 50, 100, 300, 410]
    assert [round(1e9 * time) for time in unmarked.times_s] == [0, 47, 97, 297, 400]


def test_the_picture_and_the_series_show_the_peak(tmp_path):
    held = np.array([(5, 0, 1, 2, 100 if i == 4321 else i % 7) for i in range(10_000)])
    timeline = MemoryTimeline("cpu", np.arange(10_000.0), held)
    write_timeline(timeline, tmp_path, 3)
    series = json.loads((tmp_path / SERIES_FILE).read_text())
    assert series["peak_bytes"] == timeline.peak_bytes == 108
    assert series["peak_at_s"] == 4321.0
    assert series["bytes_at_peak"]["activations and other"] == 100
    assert max(series["bytes"]["activations and other"]) == 100
    assert len(series["time_s"]) == len(series["bytes"]["parameters"]) == 2000
    assert (tmp_path / PICTURE_FILE).stat().st_size > 1000
