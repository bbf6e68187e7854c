"""What the wrapper on flat buffers costs beside torch's own: time, wire bytes and peak memory of an optimizer step.

    python benchmarks/ddp_engine.py [--rounds 15] [--launches 3] [--only time|memory|wire] [--ranks 1 2 4]

A GPT of 8 layers, width 512, 8 heads, vocabulary 32k; a step is 4 micro-batches on gloo ranks with one thread each, of
2 x 256 tokens, or 1 x 64 where bytes on the wire are counted, accumulated under `no_sync`. The replicated form
stands beside `torch.nn.parallel.DistributedDataParallel` with `gradient_as_bucket_view` and torch's fused AdamW, the
sharded ones beside torch's `ZeroRedundancyOptimizer` over it. Bytes stand beside those of an ideal ring, peaks beside
the formula in `memory_formula`. Exits with 1 when a limit is exceeded.
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

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import MICRO_BATCHES, VOCABULARY, WIDTH, backward, build_model, micro_batches, parameter_bytes
from _measure import (
    CollectivePayload,
    PairedRatio,
    high_water_bytes,
    interleaved_seconds,
    machine,
    reset_high_water,
    run_on_ranks,
    section,
    wire_bytes_per_step,
)

RANKS = 2
BUCKET_ELEMENTS = 4_000_000  # of ZeRO-2, so that a model of this size has buckets to release
REPLICATED_LIMIT, SHARDED_LIMIT = 1.00, 0.95
WIRE_TOLERANCE, MEMORY_TOLERANCE = 0.02, 0.05
MIB = 2**20

Step = Callable[[], None]
Shape = tuple[int, int]
"""Samples of a micro-batch, and tokens of a sample."""

TIMED: Shape = (2, 256)
COUNTED: Shape = (1, 64)  # bytes on the wire are those of parameters, whatever the tokens


def accumulate(model: nn.Module, data: list[torch.Tensor]) -> None:
    for index, tokens in enumerate(data):
        with nullcontext() if index == len(data) - 1 or not hasattr(model, "no_sync") else model.no_sync():
            backward(model, tokens)


def torchs(shape: Shape, is_sharded: bool) -> Step:
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

    return step


def ours(shape: Shape, **fields: Any) -> Step:
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

    return step


def alone(shape: Shape) -> Step:
    """Without wrapper and optimizer: forward and backward, each gradient dropped as soon as it is there."""
    model, data = build_model(), micro_batches(*shape)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return lambda: accumulate(model, data)


@dataclass(frozen=True)
class Candidate:
    """One way to train, what it is compared with, and the largest ratio to that."""

    build: Callable[[Shape], Step]
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
    return interleaved_seconds({name: CANDIDATES[name].build(TIMED) for name in names}, rounds)


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
    step = CANDIDATES[name].build(COUNTED)
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

    `alone_bytes` holds parameters, activations and gradients in passing. To these come whole gradients, one unit, and
    Adam's moments, two; what is sharded counts for its part. ZeRO-2 holds whole gradients while micro-batches add up
    in them, and the shards of two buckets that are under way; where each micro-batch is reduced by itself, two whole
    buckets instead.
    """
    shard = 1.0 / ranks
    largest_bucket = max(BUCKET_ELEMENTS, VOCABULARY * WIDTH) * 4 / parameter_bytes
    kept = {
        "replicated": 1.0 + 2.0,
        "replicated overlap": 1.0 + 2.0,
        "ZeRO-1": 1.0 + 2.0 * shard,
        "ZeRO-1 overlap": 1.0 + 2.0 * shard,
        "ZeRO-2": 1.0 + (2 * largest_bucket * shard if ranks > 1 else 0.0) + 2.0 * shard,
        "ZeRO-2 every": (2 * largest_bucket + shard if ranks > 1 else 1.0) + 2.0 * shard,
    }[name]
    return kept * parameter_bytes + alone_bytes


def measure_memory(name: str) -> tuple[int, int]:
    import core.distributed  # imports belong to the base, not to the peak

    del core
    reset_high_water()
    base = high_water_bytes()
    step = alone(TIMED) if name == "alone" else CANDIDATES[name].build(TIMED)
    for _ in range(3):
        step()
    return high_water_bytes() - base, parameter_bytes()


def report_memory(launches: int, all_ranks: list[int], names: list[str]) -> bool:
    within = True
    for ranks in all_ranks:
        alone_bytes = _median_peak("alone", ranks, launches)[0]
        print(f"{ranks} rank(s), model alone {alone_bytes / MIB:8.1f} MiB", flush=True)
        for name in names:
            found, size = _median_peak(name, ranks, launches)
            line = f"  {name:19} {found / MIB:8.1f} MiB"
            if CANDIDATES[name].is_ours:
                formula = memory_formula(name, size, ranks, alone_bytes)
                holds = abs(found / formula - 1) <= MEMORY_TOLERANCE
                within &= holds
                line += f"   formula {formula / MIB:8.1f}   {found / formula:.3f} x{'' if holds else '   OFF'}"
            print(line, flush=True)
    return within


def _median_peak(name: str, ranks: int, launches: int) -> tuple[float, int]:
    runs = [run_on_ranks(measure_memory, ranks, name) for _ in range(launches)]
    return statistics.median(max(peak for peak, _ in run) for run in runs), runs[0][0][1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of the timing; a limit needs 15")
    parser.add_argument("--launches", type=int, default=3, help="processes a candidate for the memory peak")
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
        with section(f"Peak memory of the larger rank, median of {asked.launches} launches"):
            within &= report_memory(asked.launches, asked.ranks, asked.candidates)
    print("\nwithin limits" if within else "\nABOVE A LIMIT")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
