"""Peak memory of the candidates of `ddp_engine.py`, compared with what the strategy has to keep."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from _ddp_candidates import CANDIDATES, TIMED, Built, alone
from _gpt import parameter_bytes
from _history import record
from _measure import high_water_bytes, live_tensor_bytes, peak_allocation_above_start, reset_high_water, run_on_ranks
from _report import MIB
from torch import nn

MEMORY_TOLERANCE = 0.05


def memory_formula(name: str, parameter_bytes: int, ranks: int, alone_bytes: int) -> float:
    """Bytes a rank: what the strategy keeps for each parameter, and what the model needs anyway, with its weights.

    `alone_bytes` is the peak of the model without wrapper and optimizer: weights, activations, gradients in passing.
    To it come, with parameters of `P` bytes on `n` ranks:

    * Adam's two moments, `2 P`, or `2 P / n` where they are sharded;
    * whole gradients, `P`, where micro-batches add up in them. That holds for ZeRO-2 too, whose peak is that of
      ZeRO-1: what it frees it frees during the last micro-batch, and lacks until the next step's first backward;
    * the shards of reduced gradients, `P / n`, in place of whole ones, where ZeRO-2 reduces every micro-batch.

    Nothing else lives at the peak, which is in the backward of a micro-batch's loss, where logits and their gradient
    are alive together with all activations. (Measured at 2 and 4 ranks: what the allocator reports and what it has in
    use, sampled every 2 ms of a step.) In particular:

    * ZeRO-2's shards do not add to its whole gradients there. They are allocated as buckets are reduced, later in the
      last backward, in the memory of the logits and their gradient, which two shards do not fill;
    * where every micro-batch is reduced, no whole bucket is alive there. Backward allocates them later, in the same
      memory, at most two at a time, and the last one is reduced while the next forward begins.

    A rank also keeps 8 MiB to receive into (two chunks of `core.comm.gloo.CHUNK_BYTES`). What is resident beyond is
    memory that the C allocator holds after it was freed; `alone_bytes` has it too, as the peak of the model alone.
    """
    shard = 1.0 / ranks
    gradients = shard if name == "ZeRO-2 every" else 1.0
    moments = 2.0 if name.startswith("replicated") else 2.0 * shard
    return (gradients + moments) * parameter_bytes + alone_bytes


def measure_resident(name: str) -> int:
    _import_all()
    reset_high_water()
    base = high_water_bytes()
    step = _build(name).step
    for _ in range(3):
        step()
    return high_water_bytes() - base


def _import_all() -> None:
    """Imports belong to the base and not to the peak, also what torch imports at an optimizer's first step: 30 MiB."""
    import core.distributed
    import core.optimizer  # noqa: F401

    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], fused=True).step()


def measure_live(name: str) -> int:
    """With collectives in this thread, for the allocator reports what one thread does; none lives longer elsewhere.

    Whole gradients that come and go are torch's memory here, for what is not is not reported.
    """
    from core.base.host_memory import transient_memory_seen_by_profilers
    from core.distributed import _BaseDataParallel

    lane = _late_lane()
    with mock.patch("core.distributed.flat.flat_engine.comm_lane", lambda device, number: lane):
        built = _build(name)
    built.model.register_forward_pre_hook(lambda *unused: lane.catch_up())
    with transient_memory_seen_by_profilers():
        for _ in range(2):  # the first makes the optimizer's state
            built.step()
        if isinstance(built.model, _BaseDataParallel):
            built.model.zero_grad_buffer()  # what lives before it is reported is not reported when it goes
        return live_tensor_bytes(built.live_tensors()) + peak_allocation_above_start(built.step)


def _build(name: str) -> Built:
    return alone(TIMED) if name == "alone" else CANDIDATES[name].build(TIMED)


def _late_lane() -> Any:
    from core.comm.lane import CommLane, Handle

    class LateLane(CommLane):
        """Runs what it was given when that is waited for, or at the next forward."""

        def __init__(self) -> None:
            self.waiting: dict[Handle, Callable[[], None]] = {}

        def submit(self, run: Callable[[], None]) -> Handle:
            handle = Late()
            self.waiting[handle] = run
            return handle

        def catch_up(self, until: Handle | None = None) -> None:
            while self.waiting and (until is None or until in self.waiting):
                self.waiting.pop(next(iter(self.waiting)))()

    class Late(Handle):
        def wait(self) -> None:
            lane.catch_up(self)

    lane = LateLane()
    return lane


def report_memory(launches: int, all_ranks: list[int], names: list[str]) -> bool:
    within, size = True, parameter_bytes()
    for ranks in all_ranks:
        resident: dict[str, list[int]] = {name: [] for name in ("alone", *names)}
        for index in range(launches):
            for name in resident if index % 2 == 0 else reversed(resident):
                resident[name].append(max(run_on_ranks(measure_resident, ranks, name)))
        live = {name: max(run_on_ranks(measure_live, ranks, name)) for name in resident}
        print(f"{ranks} rank(s), MiB", flush=True)
        for name, peaks in resident.items():
            found, least, most = statistics.median(peaks), min(peaks), max(peaks)
            line = f"  {name:19} median {found / MIB:7.1f}   {least / MIB:.1f} to {most / MIB:.1f}"
            line += f"   live tensors {live[name] / MIB:7.1f}"
            if name != "alone" and CANDIDATES[name].is_ours:
                formula = memory_formula(name, size, ranks, int(statistics.median(resident["alone"])))
                of_live = memory_formula(name, size, ranks, live["alone"])
                holds = abs(found / formula - 1) <= MEMORY_TOLERANCE
                within &= holds
                record(f"{name} / formula, {ranks} ranks", found / formula)
                line += f"   formula {formula / MIB:7.1f}, {found / formula:.3f} x{'' if holds else '   OFF'}"
                line += f"   of live tensors {of_live / MIB:7.1f}, {live[name] / of_live:.3f} x"
            print(line, flush=True)
    return within
