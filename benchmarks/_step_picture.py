"""Where a step went: splits its wall time from a profile, and draws it on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

Interval = tuple[int, int]
"""Start and end, ns."""

PARTS = ("optimizer", "compute", "exposed communication", "host gaps")
_COLOURS = {"optimizer": "#8e6bbf", "compute": "#3b7dd8", "exposed communication": "#d8653b", "host gaps": "#b8b8b8"}
_COLLECTIVES = ("nccl", "gloo:", "c10d::", "c10d_functional")
_WIDTH, _LEFT, _ROW, _LINE = 1000, 20, 46, 19


@dataclass(frozen=True)
class StepTimes:
    """The wall time of a step, each moment in exactly one part; ns."""

    start: int
    end: int
    intervals: dict[str, list[Interval]]
    """By the names of `PARTS`."""
    largest: list[tuple[str, int]]
    """Kernels (on a CPU operations without those inside them) that took most time in sum."""

    def nanoseconds(self, part: str) -> int:
        return sum(end - start for start, end in self.intervals[part])

    def shares(self) -> dict[str, float]:
        """Of the step's wall time; they add up to 1."""
        return {part: self.nanoseconds(part) / max(1, self.end - self.start) for part in PARTS}


@dataclass(frozen=True)
class Work:
    """One kernel, or on a CPU one operation."""

    name: str
    start: int
    end: int


def split(work: Iterable[Work], step: Interval, optimizer: Iterable[Interval]) -> StepTimes:
    """Splits the time of a step.

    What runs in an interval of `optimizer` is the optimizer's; computation elsewhere is compute; a collective while
    nothing computes is exposed; the rest is a gap, in which the device waits for the host.
    """
    work = [one for one in work if one.end > step[0] and one.start < step[1]]
    communicates = [one.name.lower().startswith(_COLLECTIVES) for one in work]
    whole = [step]
    computing = intersect(
        united((w.start, w.end) for w, sends in zip(work, communicates, strict=True) if not sends), whole
    )
    sending = intersect(united((w.start, w.end) for w, sends in zip(work, communicates, strict=True) if sends), whole)
    updating = united(optimizer)
    busy = united([*computing, *sending])
    totals: Counter[str] = Counter()
    for name, nanoseconds in _self_times(work):
        totals[name] += nanoseconds
    return StepTimes(
        *step,
        intervals={
            "optimizer": intersect(busy, updating),
            "compute": subtract(computing, updating),
            "exposed communication": subtract(subtract(sending, computing), updating),
            "host gaps": subtract(whole, busy),
        },
        largest=totals.most_common(15),
    )


def from_profile(profiler: torch.profiler.profile, step: str, optimizer: str) -> StepTimes:
    """Splits the profiled step that `record_function` marked as `step`, whose update is marked as `optimizer`.

    With GPU activity the kernels are counted, and the marks as the device saw them; else operations on the host.
    """
    events = list(profiler.profiler.kineto_results.events())  # type: ignore[union-attr]
    on_device = [e for e in events if e.device_type() != torch.autograd.DeviceType.CPU]
    marks = {name: _spans(on_device, name) or _spans(events, name) for name in (step, optimizer)}
    source = on_device or [e for e in events if e.name().startswith(("aten::", *_COLLECTIVES))]
    work = [Work(e.name(), *_span(e)) for e in source if e.name() not in marks and not _is_annotation(e)]
    whole = _spans(events, step)  # the host's: with the time until the device is done
    return split(work, (min(s for s, _ in whole), max(e for _, e in whole)), marks[optimizer])


def as_svg(times: StepTimes, title: str) -> str:
    """Returns the page: a bar of the parts' shares, their order in time, and the largest kernels."""
    wall = max(1, times.end - times.start)
    scale = (_WIDTH - 2 * _LEFT) / wall
    drawn = [f'<text x="{_LEFT}" y="28" font-size="18">{escape(title)}</text>']
    left, top = float(_LEFT), 50
    for part in PARTS:
        width = times.nanoseconds(part) * scale
        drawn.append(_box(left, top, width, 30, _COLOURS[part], part))
        left += width
    top += _ROW
    for part in PARTS:
        drawn += [
            _box(_LEFT + (a - times.start) * scale, top, (b - a) * scale, 30, _COLOURS[part], part)
            for a, b in times.intervals[part]
        ]
    top += _ROW
    for part, share in times.shares().items():
        drawn.append(_box(_LEFT, top, 12, 12, _COLOURS[part], part))
        text = f"{part}: {times.nanoseconds(part) / 1e6:.2f} ms, {share:.1%} of {wall / 1e6:.2f} ms"
        drawn.append(f'<text x="{_LEFT + 20}" y="{top + 11}">{text}</text>')
        top += _LINE
    top += _LINE
    for name, nanoseconds in times.largest:
        drawn.append(f'<text x="{_LEFT}" y="{top}">{nanoseconds / 1e6:9.2f} ms  {escape(name[:110])}</text>')
        top += _LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" font-family="monospace" font-size="13">'
    )
    return "\n".join([head, *drawn, "</svg>", ""])


def _box(left: float, top: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{left:.2f}" y="{top}" width="{max(width, 0.0):.2f}" height="{height}" fill="{colour}">'
        f"<title>{title}</title></rect>"
    )


def _span(event: Any) -> Interval:
    return event.start_ns(), event.start_ns() + event.duration_ns()


def _spans(events: Iterable[Any], name: str) -> list[Interval]:
    return [_span(event) for event in events if event.name() == name]


def _is_annotation(event: Any) -> bool:
    """Returns whether it is a range that somebody marked, and no work.

    A GPU's timeline repeats the ranges of the host (FSDP2's, torch's optimizers' and profiler's, NCCL's ``nccl:`` with
    its kernels inside), from the first kernel queued in one to the last: they cover gaps. On a CPU gloo's collectives
    are such ranges and nothing else.
    """
    if event.name().startswith(("Optimizer.", "ProfilerStep", "## ", "FSDP::")):
        return True
    if event.device_type() == torch.autograd.DeviceType.CPU:
        return False
    kind = event.activity_type() if hasattr(event, "activity_type") else ""  # torch 2.11 has only the other method
    return event.is_user_annotation() or kind == "gpu_user_annotation"


def _self_times(work: list[Work]) -> Iterable[tuple[str, int]]:
    """Yields each piece of work with its time less that of pieces inside it, which are longest where they nest."""
    open_: list[tuple[Work, int]] = []
    for one in sorted(work, key=lambda w: (w.start, -w.end)):
        while open_ and open_[-1][0].end <= one.start:
            yield _closed(open_)
        if open_ and one.end <= open_[-1][0].end:
            outer, inside = open_.pop()
            open_.append((outer, inside + one.end - one.start))
        open_.append((one, 0))
    while open_:
        yield _closed(open_)


def _closed(open_: list[tuple[Work, int]]) -> tuple[str, int]:
    one, inside = open_.pop()
    return one.name, max(0, one.end - one.start - inside)


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns disjoint intervals in order that cover the same."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def intersect(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """Returns what is in both; each is disjoint and in order."""
    found, index = [], 0
    for start, end in some:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            found.append((max(start, others[at][0]), min(end, others[at][1])))
            at += 1
    return found


def subtract(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """Returns what is in `some` and not in `others`; each is disjoint and in order."""
    found = []
    for start, end in some:
        for other_start, other_end in others:
            if other_end <= start or other_start >= end:
                continue
            if other_start > start:
                found.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            found.append((start, end))
    return found
