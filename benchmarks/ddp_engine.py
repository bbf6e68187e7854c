"""Compares the wrapper on flat buffers with torch's own: time, wire bytes and peak memory of an optimizer step.

    python benchmarks/ddp_engine.py [--rounds 15] [--launches 5] [--only time|memory|wire] [--ranks 1 2 4]

A GPT of 8 layers, width 512, 8 heads, vocabulary 32k; a step is 4 micro-batches on gloo ranks with one thread each, of
2 x 256 tokens, or 1 x 64 where bytes on the wire are counted, accumulated under `no_sync`. The replicated form
is compared with `torch.nn.parallel.DistributedDataParallel` with `gradient_as_bucket_view` and torch's fused AdamW,
the sharded ones with torch's `ZeroRedundancyOptimizer` over it; bytes with those of an ideal ring, peaks with
the formula in `_ddp_memory.py`, resident ones and those of live tensors. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _ddp_candidates import CANDIDATES, COUNTED, TIMED
from _ddp_memory import report_memory
from _gpt import MICRO_BATCHES, parameter_bytes
from _history import Parser, record
from _measure import (
    CollectivePayload,
    PairedRatio,
    interleaved_seconds,
    machine,
    run_on_ranks,
    section,
    wire_bytes_per_step,
)
from _report import MIB, exit_status

RANKS = 2
WIRE_TOLERANCE = 0.02


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
            record(f"{name} / {baseline}", ratio)
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
        record(f"{name} / ideal ring", found / ideal)
        print(
            f"{name:19} loopback {found / MIB:8.1f} MiB   payload of the calls {payload / MIB:8.1f}   "
            f"ideal ring {ideal / MIB:8.1f}   {found / ideal:.3f} x, {payload / ideal:.3f} x",
            flush=True,
        )
    return within


def main() -> int:
    parser = Parser(__doc__)
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
