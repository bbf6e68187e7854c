"""Estimates how long a simulated step takes: computation in one queue, and collectives in one queue for each group.
Copies between an accelerator and its host are a group of their own.

A collective starts when its queue is free and the computation has reached it. Computation waits for it where it first
reads its result. For the reductions of a wrapper that overlaps them it waits at the end of backward. Groups are taken
not to slow each other down, nor computation.

Pipeline stages take as long for each pass as in their own simulated step. Torch's schedule says which passes each
waits for: what a stage waits for its neighbours is the bubble.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..base.errors import ShardstackError
from .hardware import Hardware
from .recorder import HOST, Event, Mark, Ranks, Transfer
from .simulation import Pass, Simulation


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step."""

    step_s: float
    compute_s: float
    communication_s: float
    """Seconds of all collectives, one after the other."""
    exposed_s: float
    """Seconds in which computation waits for collectives."""
    latency_s: float
    """Seconds that all collectives would take without bytes."""
    bubble_s: float = 0.0
    """Seconds in which the slowest pipeline stage waits for others."""

    @property
    def hidden_s(self) -> float:
        """Communication while something is computed, or while other groups communicate."""
        return max(self.communication_s - self.exposed_s, 0.0)


def step_time(simulations: Sequence[Simulation], hardware: Hardware) -> StepTime:
    """Estimates a step that follows an equal one, some of whose collectives may still run when it begins.

    Args:
        simulations: of one rank; of a pipeline those of `pipeline_ranks`. Other ranks take as long as the second.
    """
    times, passes = zip(*(_time_alone(simulation, hardware) for simulation in simulations), strict=True)
    slowest: StepTime = max(times, key=lambda time: time.step_s)
    schedule = simulations[0].schedule
    if not schedule:
        return slowest
    sends = [e for s in simulations for _, e in s.events if isinstance(e, Transfer) and e.kind == "send"]
    send_s = max(map(hardware.collective_seconds, sends), default=0.0)
    index_of = [min(rank, 1) for rank in schedule]
    index_of[-1] = len(simulations) - 1
    seconds = [passes[index] for index in index_of]
    ends = _ends(schedule, [{key: statistics.median(each) for key, each in own.items()} for own in seconds], send_s)
    rests = [times[index].step_s - sum(map(sum, passes[index].values())) for index in index_of]
    step_s = max(end + rest for end, rest in zip(ends, rests, strict=True))
    return replace(slowest, step_s=step_s, bubble_s=max(step_s - slowest.step_s, 0.0))


def drawn_times(
    simulation: Simulation, hardware: Hardware
) -> tuple[Sequence[float], Mapping[str, Sequence[tuple[float, float]]]]:
    """Returns the end of each of `Simulation.drawn_events`, and by queue the begin and length of all that is in it.

    In seconds since the step began, on a rank that waits for no other pipeline stage.
    """
    clock = _Clock(simulation, hardware)
    clock.run(simulation.first_events)
    begin, drawn = clock.now, len(clock.ends)
    clock.queues.clear()
    clock.run(simulation.drawn_events)
    queues = {name: [(start - begin, length) for start, length in spans] for name, spans in clock.queues.items()}
    return [end - begin for end in clock.ends[drawn:]], queues


Turn = tuple[int, bool]
"""One of the rank's stages, counted from 0, and whether the pass is its forward."""


def _time_alone(simulation: Simulation, hardware: Hardware) -> tuple[StepTime, dict[Turn, list[float]]]:
    """Returns the time of a rank that waits for no other stage, and the seconds of each pass."""
    clock = _Clock(simulation, hardware)
    clock.run(simulation.first_events)
    before = clock.totals()
    clock.passes.clear()
    clock.run(simulation.events)
    own = sorted({stage for stage, _ in clock.passes})
    passes = {(own.index(stage), is_forward): each for (stage, is_forward), each in clock.passes.items()}
    return StepTime(*(after - first for after, first in zip(clock.totals(), before, strict=True))), passes


def _ends(
    schedule: Mapping[int, Sequence[Pass]], seconds: Sequence[Mapping[Turn, float]], send_s: float
) -> list[float]:
    """Returns when each pipeline rank has ended its passes, if the first begins at 0.

    Args:
        seconds: of each rank.
        send_s: of what a stage sends to another rank.
    """
    remaining = {rank: deque(passes) for rank, passes in schedule.items()}
    rank_of = {stage: rank for rank, passes in schedule.items() for stage, _, _ in passes}
    own = {rank: sorted({stage for stage, _, _ in passes}) for rank, passes in schedule.items()}
    ends, now = dict[Pass, float](), dict.fromkeys(schedule, 0.0)
    while any(remaining.values()):
        before = len(ends)
        for rank, passes in remaining.items():
            while passes:
                stage, is_forward, micro_batch = passes[0]
                source = stage - 1 if is_forward else stage + 1
                ready = 0.0
                if source in rank_of or not is_forward:
                    needs = (source, is_forward, micro_batch) if source in rank_of else (stage, True, micro_batch)
                    if needs not in ends:
                        break
                    ready = ends[needs] + send_s * (rank_of[needs[0]] != rank)
                now[rank] = max(now[rank], ready) + seconds[rank][own[rank].index(stage), is_forward]
                ends[passes.popleft()] = now[rank]
        if len(ends) == before:
            raise ShardstackError("the passes of the pipeline's ranks wait for each other; take another schedule")
    return list(now.values())


class _Clock:
    """The times of both kinds of queues, while events go by."""

    def __init__(self, simulation: Simulation, hardware: Hardware) -> None:
        self._simulation, self._hardware = simulation, hardware
        self.now = self.compute = self.exposed = self.communication = self.latency = 0.0
        self._free = defaultdict[Ranks, float](float)  # by group
        self._end: dict[Transfer, float] = {}
        # By group: the value of `now` when the last gather was queued.
        self._queued = defaultdict[Ranks, float](float)
        # Reductions that backward has queued and the computation has not waited for.
        self._late: list[Transfer] = []
        # Seconds of each pass of each stage, and the one that runs, with its begin.
        self.passes = defaultdict[Turn, list[float]](list)
        self._running: tuple[Turn, float] | None = None
        # For pictures: the value of `now` after each event, and the begin and length of what is in each queue.
        self.ends: list[float] = []
        self.queues = defaultdict[str, list[tuple[float, float]]](list)

    def totals(self) -> tuple[float, ...]:
        """Returns seconds since the beginning, in the order of `StepTime`."""
        return self.now, self.compute, self.communication, self.exposed, self.latency

    def run(self, events: Iterable[tuple[str, Event]]) -> None:
        for where, event in events:
            self._take(where, event)
            self.ends.append(self.now)

    def _take(self, where: str, event: Event) -> None:
        in_backward = where.startswith("backward")
        if self._running is not None and (isinstance(event, Mark) or not where.startswith(("forward", "backward"))):
            self.passes[self._running[0]].append(self.now - self._running[1])
            self._running = None
        if isinstance(event, Mark):
            self._running = (event.stage, event.is_forward), self.now
            return
        if not in_backward and self._late:
            self._wait_for(self._late)
            self._late = []
        if isinstance(event, Transfer):
            self._start(event)
            if in_backward and event.kind != "all-gather" and event.ranks in self._simulation.waits_late:
                self._late.append(event)
            return
        self._wait_for(each for each in event.awaits if each not in self._late)
        seconds = self._hardware.work_seconds(event)
        self.queues["computation"].append((self.now, seconds))
        self.now, self.compute = self.now + seconds, self.compute + seconds

    def _start(self, collective: Transfer) -> None:
        ranks, start = collective.ranks, self.now
        if collective.kind == "all-gather":
            if self._simulation.gathers_ahead and ranks in self._simulation.waits_late:
                start = self._queued[ranks]  # at most one unit ahead
            self._queued[ranks] = self.now
        seconds = self._hardware.collective_seconds(collective)
        start = max(start, self._free[ranks])
        self._free[ranks] = self._end[collective] = start + seconds
        self.queues["host copies" if ranks == HOST else f"collectives of {len(ranks)}"].append((start, seconds))
        self.communication += seconds
        self.latency += self._hardware.collective_seconds(replace(collective, nbytes=0))

    def _wait_for(self, collectives: Iterable[Transfer]) -> None:
        until = max((self._end.get(each, 0.0) for each in collectives), default=0.0)
        waits = max(until - self.now, 0.0)
        self.now, self.exposed = self.now + waits, self.exposed + waits
