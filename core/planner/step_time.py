"""Estimates how long a simulated step takes: computation in one queue, and collectives in one queue for each group.

A collective starts when its queue is free and the computation has reached it. Computation waits for it where it first
reads its result. For the reductions of a wrapper that overlaps them it waits at the end of backward. Groups are taken
not to slow each other down, nor computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .hardware import Hardware
from .phantom import Collective, Ranks
from .simulation import Event, Simulation


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    step_s: float
    compute_s: float
    communication_s: float
    """Of all collectives, one after the other."""
    exposed_s: float
    """While computation waits for collectives."""
    latency_s: float
    """What all collectives would take without bytes."""

    @property
    def hidden_s(self) -> float:
        """Communication while something is computed, or while other groups communicate."""
        return max(self.communication_s - self.exposed_s, 0.0)


def step_time(simulation: Simulation, hardware: Hardware) -> StepTime:
    """Estimates a step that follows an equal one, some of whose collectives may still run when it begins."""
    clock = _Clock(simulation, hardware)
    clock.run(simulation.first_events)
    before = clock.totals()
    clock.run(simulation.events)
    return StepTime(*(after - first for after, first in zip(clock.totals(), before, strict=True)))


class _Clock:
    """The times of both kinds of queues, while events go by."""

    def __init__(self, simulation: Simulation, hardware: Hardware) -> None:
        self._simulation, self._hardware = simulation, hardware
        self.now = self.compute = self.exposed = self.communication = self.latency = 0.0
        self._free = defaultdict[Ranks, float](float)  # by group
        self._end: dict[Collective, float] = {}
        # By group: where the computation was when the last gather was queued, and reductions that nobody waited for.
        self._queued = defaultdict[Ranks, float](float)
        self._late: list[Collective] = []

    def totals(self) -> tuple[float, ...]:
        """Returns seconds since the beginning, in the order of `StepTime`."""
        return self.now, self.compute, self.communication, self.exposed, self.latency

    def run(self, events: Iterable[tuple[str, Event]]) -> None:
        for where, event in events:
            in_backward = where.startswith("backward")
            if not in_backward and self._late:
                self._wait_for(self._late)
                self._late = []
            if isinstance(event, Collective):
                self._start(event)
                if in_backward and event.kind != "all-gather" and event.ranks in self._simulation.waits_late:
                    self._late.append(event)
                continue
            self._wait_for(each for each in event.awaits if each not in self._late)
            seconds = self._hardware.work_seconds(event)
            self.now, self.compute = self.now + seconds, self.compute + seconds

    def _start(self, collective: Collective) -> None:
        ranks, start = collective.ranks, self.now
        if collective.kind == "all-gather":
            if self._simulation.gathers_ahead and ranks in self._simulation.waits_late:
                start = self._queued[ranks]  # at most one unit ahead
            self._queued[ranks] = self.now
        seconds = self._hardware.collective_seconds(collective)
        self._free[ranks] = self._end[collective] = max(start, self._free[ranks]) + seconds
        self.communication += seconds
        self.latency += self._hardware.collective_seconds(replace(collective, nbytes=0))

    def _wait_for(self, collectives: Iterable[Collective]) -> None:
        until = max((self._end.get(each, 0.0) for each in collectives), default=0.0)
        waits = max(until - self.now, 0.0)
        self.now, self.exposed = self.now + waits, self.exposed + waits
