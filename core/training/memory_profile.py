"""Measures memory over one step by category, at every allocation, and draws it.

Torch's profiler reports each allocation and release, on the CPU and on a GPU, with its address. Hooks record at many
moments of the step which addresses have tensors of the wrapper and the optimizer (`Engine.held`). A block of memory
belongs to the category that was recorded for it last. Blocks without a record are activations, their gradients and
scratch. No communication.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from ..base import device
from ..base import memory_categories as memory
from ..base.errors import import_extra
from ..base.host_memory import transient_memory_seen_by_profilers
from ..distributed import _BaseDataParallel
from ..optimizer import MegatronOptimizer

PICTURE_FILE, SERIES_FILE = "memory.png", "memory.json"

CATEGORIES = (memory.PARAMETERS, memory.GATHERED, memory.GRADIENTS, memory.OPTIMIZER_STATE, memory.REST)
"""From the bottom of the picture to its top."""

MAX_POINTS = 2000
"""Most points of a series. Of moments that are closer together, the one with the most memory is kept."""

_COLORS = ("#3b76c9", "#8fb8ec", "#d9822b", "#8256c4", "#9aa5b1")


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of each category on this rank at moments of a step."""

    device: str
    times_s: NDArray[np.float64]
    """`[n]`, seconds since the step began."""
    category_bytes: NDArray[np.int64]
    """`[n, categories]`, bytes of each of `CATEGORIES`."""

    @property
    def peak(self) -> int:
        """Index of the moment with the most memory."""
        return int(self.category_bytes.sum(1).argmax())

    @property
    def peak_bytes(self) -> int:
        """Bytes of all categories at the peak."""
        return int(self.category_bytes[self.peak].sum())

    def thin(self, num_points: int = MAX_POINTS) -> MemoryTimeline:
        """Returns at most `num_points` moments, each the one with the most memory of its neighbourhood."""
        parts = np.array_split(self.category_bytes.sum(1), min(num_points, len(self.category_bytes)))
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        peaks = [start + int(part.argmax()) for start, part in zip(starts, parts, strict=False)]
        return MemoryTimeline(self.device, self.times_s[peaks], self.category_bytes[peaks])


def write_timeline(timeline: MemoryTimeline, folder: Path, iteration: int) -> None:
    """Writes the picture and the series of a step into a run's folder. Both are thinned, and contain the peak.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    series = timeline.thin()
    values = {
        "iteration": iteration,
        "device": timeline.device,
        "peak_bytes": timeline.peak_bytes,
        "peak_at_s": float(timeline.times_s[timeline.peak]),
        "bytes_at_peak": dict(zip(CATEGORIES, timeline.category_bytes[timeline.peak].tolist(), strict=True)),
        "time_s": series.times_s.tolist(),
        "bytes": dict(zip(CATEGORIES, series.category_bytes.T.tolist(), strict=True)),
    }
    (folder / SERIES_FILE).write_text(json.dumps(values), encoding="utf-8")
    _draw(series, folder / PICTURE_FILE, f"iteration {iteration}, rank 0, {timeline.device}")


def _draw(series: MemoryTimeline, picture: Path, title: str) -> None:
    """Draws the categories as stacked areas over the time of the step."""
    figure = import_extra("matplotlib.figure", "train", "The picture of memory").Figure(
        figsize=(9, 5), dpi=120, layout="constrained"
    )
    axes = figure.subplots()
    layers, peak = series.category_bytes.T / 2**20, series.peak_bytes / 2**20
    axes.stackplot(series.times_s, layers, labels=CATEGORIES, colors=_COLORS, step="post", linewidth=0)
    axes.axhline(peak, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(f"peak {peak:,.1f} MiB", (series.times_s[-1], peak), ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="time in the step (s)", ylabel="memory (MiB)", title=title, ylim=(0, 1.25 * peak))
    axes.margins(x=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", fontsize=8, ncols=2)
    figure.savefig(picture)


_REST = len(CATEGORIES) - 1
_ORIGINS = {"FSDP::all_gather": 1, "FSDP::post_backward_reduce": 2}
"""Ranges that FSDP2 marks in a profile, and the category of allocations in them."""

_MARK = "shardstack: memory"

Result = TypeVar("Result")


def measure_step(
    model: _BaseDataParallel, optimizer: MegatronOptimizer, step: Callable[[], Result]
) -> tuple[Result, MemoryTimeline]:
    """Runs `step` and measures its memory. The step takes longer than usual.

    On the CPU torch does not count memory. There, blocks from before the step without a record, such as a loader's
    data, are counted only if the step releases them.
    """
    # Read when the profiler is first used; without it the profiler prints to stderr that it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    kind = device.device_type()
    notes = _Notes(model, optimizer)
    before = torch.cuda.memory_allocated() if kind == "cuda" else None
    with ExitStack() as hooks, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        hooks.enter_context(transient_memory_seen_by_profilers())
        for handle in notes.watch():
            hooks.callback(handle.remove)
        notes.take()
        result = step()
        notes.take()
    events = list(_flat(profiler.profiler.kineto_results.experimental_event_tree()))
    return result, _timeline(events, notes.entries, kind, before)


@dataclass(frozen=True)
class _Note:
    """A record of the tensors at one moment."""

    blocks: dict[int, tuple[int, int]]
    """Category and bytes of each storage, by address."""
    is_complete: bool
    """Whether it has all tensors of wrapper and optimizer, or only one that changed."""
    time_ns: int
    """By this process's clock, which the profiler's follows to a few microseconds."""


class _Notes:
    """Records of the tensors at many moments. A marker in the profile gives the time of each."""

    def __init__(self, model: _BaseDataParallel, optimizer: MegatronOptimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self.entries: list[_Note] = []  # in the order of the markers; `take` and the hooks of `watch` append

    def take(self, *_: Any) -> None:
        """Records the current tensors of wrapper and optimizer."""
        with record_function(_MARK):
            held = self._model.engine.held()
            of_wrapper = (held[memory.PARAMETERS], held[memory.GATHERED], held[memory.GRADIENTS])
            kinds = enumerate([*of_wrapper, memory.optimizer_tensors(self._optimizer.optimizer)])
            note = memory.held_storages(kinds, device.device_type())  # nothing offloaded
            self.entries.append(_Note(note, is_complete=True, time_ns=time.time_ns()))

    def watch(self) -> Iterator[Any]:
        """Installs hooks, which change nothing, on every module and every gradient. Removes them on exit."""
        for module in self._model.module.modules():
            yield module.register_forward_pre_hook(self.take)
            yield module.register_forward_hook(self._after_forward)
        for parameter in self._model.engine.parameters.receivers():
            if parameter.requires_grad:
                yield parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self.take()
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self.take)  # called when backward reaches the module

    def _note_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            with record_function(_MARK):
                note = memory.held_storages([(2, [parameter.grad])], device.device_type())
                self.entries.append(_Note(note, is_complete=False, time_ns=time.time_ns()))


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    """Yields all events of a tree, without recursion, because modules are nested deeply."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


@dataclass
class _Block:
    """A block of memory from its allocation to its release."""

    address: int
    nbytes: int
    start: int
    end: int
    """Time of its release in ns. It is the end of the step until `_blocks` or `_end_what_is_missed` finds an earlier
    one."""
    category: int = _REST
    """Index in `CATEGORIES`. `_sort_into_categories` sets it, from the last record of the block's address."""


def _timeline(events: Sequence[Any], notes: Sequence[_Note], kind: str, before: int | None) -> MemoryTimeline:
    marks = sorted((event.start_time_ns, event.end_time_ns) for event in events if event.name == _MARK)
    if len(marks) == len(notes):
        notes_by_time = [(time_ns, note) for (time_ns, _), note in zip(marks, notes, strict=True)]
        start, end = marks[0][0], marks[-1][1]
    else:  # the profiler does not see each thread on which autograd calls the hooks, as a GPU's
        notes_by_time = [(note.time_ns, note) for note in notes]
        start, end = notes[0].time_ns, notes[-1].time_ns
    changes = sorted(
        (event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, _category_by_origin(event))
        for event in events
        if event.tag == torch._C._profiler._EventType.Allocation
        and event.extra_fields.device.type == kind
        and event.start_time_ns >= start
    )
    blocks = _blocks(changes, notes[0], start, end)
    _sort_into_categories(blocks, notes_by_time)
    if kind == "cpu":
        _end_what_is_missed([p for p in blocks if p.end == end and p.category != _REST], notes_by_time)
    start_bytes = sum(block.nbytes for block in blocks if block.start == start)

    moments = sorted({start, end, *(block.start for block in blocks), *(block.end for block in blocks)})
    index_of = {moment: index for index, moment in enumerate(moments)}
    changes_of = np.zeros((len(moments), len(CATEGORIES)), np.int64)
    changes_of[0, _REST] = 0 if before is None else max(before - start_bytes, 0)
    for block in blocks:
        changes_of[index_of[block.start], block.category] += block.nbytes
        if block.end < end:
            changes_of[index_of[block.end], block.category] -= block.nbytes
    return MemoryTimeline(kind, (np.array(moments) - start) / 1e9, changes_of.cumsum(0))


def _blocks(changes: Iterable[tuple[int, int, int, int]], at_start: _Note, start: int, end: int) -> list[_Block]:
    """Returns all blocks alive during the step. Blocks allocated earlier count from the step's start."""
    alive = {place: _Block(place, nbytes, start, end, kind) for place, (kind, nbytes) in at_start.blocks.items()}
    blocks = list(alive.values())
    for moment, address, nbytes, category in changes:
        if nbytes > 0:
            if address in alive:  # its release was not reported
                alive[address].end = moment
            alive[address] = _Block(address, nbytes, moment, end, category)
            blocks.append(alive[address])
        elif (block := alive.pop(address, None)) is not None:
            block.end = moment
        else:
            blocks.append(_Block(address, -nbytes, start, moment))
    return blocks


def _sort_into_categories(blocks: Iterable[_Block], notes_by_time: Iterable[tuple[int, _Note]]) -> None:
    """Gives each block the category of the last record of its address during its life."""
    notes_of: dict[int, list[tuple[int, int]]] = {}
    for moment, note in notes_by_time:
        for address, (category, _) in note.blocks.items():
            notes_of.setdefault(address, []).append((moment, category))
    for block in blocks:
        times = notes_of.get(block.address, [])
        last = bisect.bisect_right(times, (block.end, _REST)) - 1
        if last >= 0 and times[last][0] >= block.start:
            block.category = times[last][1]


def _category_by_origin(event: Any) -> int:
    """Returns the category of memory that FSDP2 allocates for a collective and may free before a record is made."""
    while (event := event.parent) is not None:
        for name, category in _ORIGINS.items():
            if event.name.startswith(name):
                return category
    return _REST


def _end_what_is_missed(blocks: Iterable[_Block], notes_by_time: Sequence[tuple[int, _Note]]) -> None:
    """Ends blocks whose release was not reported at the first moment without a tensor in them.

    On the CPU torch reports releases only of blocks allocated while the profiler ran, and not from the threads of a
    process group, which may hold the last reference to a tensor that they sent.
    """
    complete = [(moment, note.blocks) for moment, note in notes_by_time if note.is_complete]
    for block in blocks:
        ends = (moment for moment, tensors in complete if moment > block.start and block.address not in tensors)
        block.end = min(block.end, next(ends, block.end))
