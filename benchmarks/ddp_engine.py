"""Compares the wrapper on flat buffers with torch's own: time, wire bytes and peak memory of an optimizer step.

    python benchmarks/ddp_engine.py [--rounds 15] [--launches 5] [--only time|memory|wire] [--ranks 1 2 4]

A GPT of 8 layers, width 512, 8 heads, vocabulary 32k; a step is 4 micro-batches on gloo ranks with one thread each, of
2 x 256 tokens, or 1 x 64 where bytes on the wire are counted, accumulated under `no_sync`. The replicated form
is compared with `torch.nn.parallel.DistributedDataParallel` with `gradient_as_bucket_view` and torch's fused AdamW,
the sharded ones with torch's `ZeroRedundancyOptimizer` over it; bytes with those of an ideal ring, peaks with
the formula in `memory_formula`, resident ones and those of live tensors. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import MICRO_BATCHES, backward, build_model, micro_batches, parameter_bytes
from _measure import (
    CollectivePayload,
    PairedRatio,
    high_water_bytes,
    interleaved_seconds,
    live_tensor_bytes,
    machine,
    peak_allocation_above_start,
    reset_high_water,
    run_on_ranks,
    section,
    wire_bytes_per_step,
)
from _report import MIB, exit_status

RANKS = 2
BUCKET_ELEMENTS = 4_000_000  # of ZeRO-2, so that a model of this size has buckets to release
REPLICATED_LIMIT, SHARDED_LIMIT = 1.00, 0.95
WIRE_TOLERANCE, MEMORY_TOLERANCE = 0.02, 0.05

Shape = tuple[int, int]
"""Samples of a micro-batch, and tokens of a sample."""

TIMED: Shape = (2, 256)
COUNTED: Shape = (1, 64)  # bytes on the wire are those of parameters, for any number of tokens


@dataclass(frozen=True)
class Built:
    """A step, and what lives between two of them."""

    step: Callable[[], None]
    model: nn.Module
    live_tensors: Callable[[], list[torch.Tensor]]


def accumulate(model: nn.Module, data: list[torch.Tensor]) -> None:
    for index, tokens in enumerate(data):
        with nullcontext() if index == len(data) - 1 or not hasattr(model, "no_sync") else model.no_sync():
            backward(model, tokens)


def torchs(shape: Shape, is_sharded: bool) -> Built:
    """torch DDP with AdamW, or with the optimizer that shards AdamW's state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    settings: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01, "fused": True}
    optimizer: torch.optim.Optimizer
    if is_sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **settings)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    data = micro_batches(*shape)

    def step() -> None:
        accumulate(model, data)
        optimizer.step()
        optimizer.zero_grad()

    def live_tensors() -> list[torch.Tensor]:
        buckets = [bucket.buffer() for bucket in model.reducer._get_zeros_like_grad_buckets()]  # as large as its own
        return [*model.parameters(), *model.buffers(), *buckets, *_state(getattr(optimizer, "optim", optimizer))]

    return Built(step, model, live_tensors)


def ours(shape: Shape, **fields: Any) -> Built:
    from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    module = build_model()
    model = wrap_model(module, module.config, DistributedDataParallelConfig(**fields), process_group=dist.group.WORLD)
    config = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, adam_beta2=0.999, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model], no_weight_decay_cond=lambda *unused: False)
    data = micro_batches(*shape)

    def step() -> None:
        model.zero_grad_buffer()
        accumulate(model, data)
        finalize_model_grads([model])
        optimizer.step()

    def live_tensors() -> list[torch.Tensor]:
        return [tensor for held in model.held_tensors().values() for tensor in held] + _state(optimizer.optimizer)

    return Built(step, model, live_tensors)


def alone(shape: Shape) -> Built:
    """Without wrapper and optimizer: forward and backward, each gradient dropped as soon as it is there."""
    model, data = build_model(), micro_batches(*shape)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return Built(lambda: accumulate(model, data), model, lambda: [*model.parameters(), *model.buffers()])


def _state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


@dataclass(frozen=True)
class Candidate:
    """One way to train, what it is compared with, and the largest ratio to that."""

    build: Callable[[Shape], Built]
    baseline: str | None = None
    limit: float = float("inf")
    is_ours: bool = True


REPLICATED = {"overlap_grad_reduce": True}
ZERO1 = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
ZERO2 = {**ZERO1, "data_parallel_sharding_strategy": "optim_grads", "bucket_size": BUCKET_ELEMENTS}
ZERO2_LEAN = {**ZERO2, "reduce_every_micro_batch": True}

CANDIDATES = {
    "torch DDP": Candidate(lambda shape: torchs(shape, False), is_ours=False),
    "replicated": Candidate(lambda shape: ours(shape), "torch DDP", REPLICATED_LIMIT),
    "replicated overlap": Candidate(lambda shape: ours(shape, **REPLICATED), "torch DDP"),
    "torch ZeRO-1": Candidate(lambda shape: torchs(shape, True), is_ours=False),
    "ZeRO-1": Candidate(lambda shape: ours(shape, use_distributed_optimizer=True), "torch ZeRO-1", SHARDED_LIMIT),
    "ZeRO-1 overlap": Candidate(lambda shape: ours(shape, **ZERO1), "torch ZeRO-1"),
    "ZeRO-2": Candidate(lambda shape: ours(shape, **ZERO2), "torch ZeRO-1", SHARDED_LIMIT),
    "ZeRO-2 every": Candidate(lambda shape: ours(shape, **ZERO2_LEAN), "torch ZeRO-1"),
}


# ---- time


def measure_time(names: list[str], rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({name: CANDIDATES[name].build(TIMED).step for name in names}, rounds)


def report_time(rounds: int, names: list[str]) -> bool:
    seconds = run_on_ranks(measure_time, RANKS, names, rounds)[0]
    for name, values in seconds.items():
        print(f"{name:19} median {statistics.median(values):6.2f}   {min(values):.2f} to {max(values):.2f}")
    within = True
    for name, values in seconds.items():
        baseline, limit = CANDIDATES[name].baseline, CANDIDATES[name].limit
        if baseline in seconds:
            ratio = PairedRatio.of(values, seconds[baseline])
            within &= ratio.holds(limit)
            print(f"{name} / {baseline}: {ratio}{ratio.verdict(limit)}")
    return within


# ---- bytes on the wire


def ideal_wire_bytes(name: str, parameter_bytes: int, ranks: int) -> float:
    """What all ranks together send in a step if every collective is an ideal ring."""
    gathers_and_scatters = MICRO_BATCHES + 1 if name == "ZeRO-2 every" else 2
    return gathers_and_scatters * (ranks - 1) / ranks * parameter_bytes * ranks


def measure_wire(name: str) -> tuple[float, int, int]:
    step = CANDIDATES[name].build(COUNTED).step
    step()
    with CollectivePayload() as payload:
        step()
    return wire_bytes_per_step(step), payload.total(), parameter_bytes()


def report_wire(names: list[str]) -> bool:
    within = True
    for name in names:
        ranks = run_on_ranks(measure_wire, RANKS, name)
        found, payload = ranks[0][0], sum(own for _, own, _ in ranks)
        ideal = ideal_wire_bytes(name, ranks[0][2], RANKS)
        holds = not CANDIDATES[name].is_ours or max(found, payload) <= (1 + WIRE_TOLERANCE) * ideal
        within &= holds
        print(
            f"{name:19} loopback {found / MIB:8.1f} MiB   payload of the calls {payload / MIB:8.1f}   "
            f"ideal ring {ideal / MIB:8.1f}   {found / ideal:.3f} x, {payload / ideal:.3f} x",
            flush=True,
        )
    return within


# ---- peak memory


def memory_formula(name: str, parameter_bytes: int, ranks: int, alone_bytes: int) -> float:
    """Bytes a rank: what the strategy keeps for each parameter, and what the model needs anyway, with its weights.

    `alone_bytes` is the peak of the model without wrapper and optimizer: weights, activations, gradients in passing.
    To it come, with parameters of `P` bytes on `n` ranks:

    * Adam's two moments, `2 P`, or `2 P / n` where they are sharded;
    * whole gradients, `P`, wherever micro-batches add up in them. That holds for ZeRO-2 too, whose peak is that of
      ZeRO-1: what it frees it frees during the last micro-batch, and lacks until the next step's first backward;
    * the shards of reduced gradients, `P / n`, in place of whole ones, where ZeRO-2 reduces every micro-batch.

    Nothing else lives at the peak, which is in the backward of a micro-batch's loss, where logits and their gradient
    are alive together with all activations. (Measured at 2 and 4 ranks: what the allocator reports and what it has in
    use, sampled every 2 ms of a step.) In particular:

    * ZeRO-2's shards do not add to its whole gradients there. They are allocated as buckets are reduced, later in the
      last backward, in the memory of the logits and their gradient, which two shards do not fill;
    * where every micro-batch is reduced, no whole bucket is alive there. Backward allocates them later, in the same
      memory, at most two at a time, and the last one is reduced while the next forward begins.

    A rank also keeps 8 MiB to receive into (`collectives.CHUNK_BYTES`). What is resident beyond is memory that the C
    allocator holds after it was freed; `alone_bytes` has it too, as the peak of the model alone.
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
    from core.distributed import _BaseDataParallel
    from core.host_memory import passing_memory_seen_by_profilers

    lane = _late_lane()
    with mock.patch("core.distributed.flat_data_parallel.comm_lane", lambda device: lane):
        built = _build(name)
    built.model.register_forward_pre_hook(lambda *unused: lane.catch_up())
    with passing_memory_seen_by_profilers():
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
                line += f"   formula {formula / MIB:7.1f}, {found / formula:.3f} x{'' if holds else '   OFF'}"
                line += f"   of live tensors {of_live / MIB:7.1f}, {live[name] / of_live:.3f} x"
            print(line, flush=True)
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of the timing; a limit needs 15")
    parser.add_argument("--launches", type=int, default=5, help="interleaved launches for the memory peak")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="world sizes for the memory peak")
    parser.add_argument("--only", choices=("time", "memory", "wire"), help="measure one of the three")
    parser.add_argument("--candidates", nargs="+", choices=tuple(CANDIDATES), default=list(CANDIDATES), metavar="NAME")
    asked = parser.parse_args()
    print(machine())
    within = True
    if asked.only in (None, "time"):
        with section(f"Seconds a step, {asked.rounds} interleaved rounds, {RANKS} ranks"):
            within &= report_time(asked.rounds, asked.candidates)
    if asked.only in (None, "wire"):
        with section(f"Wire bytes a step, all of {RANKS} ranks"):
            within &= report_wire(asked.candidates)
    if asked.only in (None, "memory"):
        with section(f"Peak memory of the larger rank, {asked.launches} interleaved launches"):
            within &= report_memory(asked.launches, asked.ranks, asked.candidates)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
