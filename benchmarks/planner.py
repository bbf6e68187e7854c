"""Predicted peak memory and wire bytes of a step compared with those of the same step, run for real on gloo ranks.

    .venv/bin/python benchmarks/planner.py

Runs 30 configurations on 1, 2 and 4 ranks, with every wrapper: depth, width, batch, recomputation, accumulation,
precision and topology change. Exits with 1 if a predicted peak is below the measured one by more than 1 %, or above it
by more than 3 %, or if other bytes are sent than predicted.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO

from _measure import machine, run_on_ranks, section
from _planned_step import real_steps

from core.planner.simulation import simulate
from core.training.config import validate
from core.training.config.arguments import parse_arguments

BASE = "--num-attention-heads 8 --train-iters 10 --lr 1e-3 --vocab-size 1000 --hidden-dropout 0 --attention-dropout 0"
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
WRAPPERS = {
    "replicated": "",
    "ZeRO-1": "--data-parallel-sharding-strategy optim",
    "ZeRO-2": "--data-parallel-sharding-strategy optim_grads",
    "ZeRO-3": "--data-parallel-sharding-strategy optim_grads_params",
    "FSDP2": "--use-torch-fsdp2",
}
SMALL = "--num-layers 2 --hidden-size 128 --seq-length 128 --micro-batch-size 2"
DEEP = "--num-layers 8 --hidden-size 128 --seq-length 128 --micro-batch-size 1"
WIDE = "--num-layers 2 --hidden-size 512 --seq-length 64 --micro-batch-size 1"
LARGE_BATCH = "--num-layers 2 --hidden-size 128 --seq-length 256 --micro-batch-size 4"
ACCUMULATED = "--num-layers 3 --hidden-size 256 --seq-length 128 --micro-batch-size 1 --global-batch-size 8"

CONFIGURATIONS: list[tuple[int, str, str]] = [
    *((2, wrapper, SMALL) for wrapper in WRAPPERS),
    *((2, wrapper, f"{WIDE} --activation-checkpointing full") for wrapper in WRAPPERS),
    *((2, wrapper, f"{ACCUMULATED} {LLAMA} --bf16") for wrapper in WRAPPERS),
    *((4, wrapper, f"{DEEP} {LLAMA} --activation-checkpointing selective") for wrapper in WRAPPERS),
    (1, "replicated", LARGE_BATCH),
    (1, "ZeRO-3", f"{WIDE} {LLAMA} --bf16"),
    (1, "FSDP2", f"{DEEP} --activation-checkpointing full"),
    (4, "ZeRO-1", f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel {LLAMA}"),
    (4, "FSDP2", f"{LARGE_BATCH} --context-parallel-size 2 {LLAMA}"),
    (4, "ZeRO-3", f"{WIDE} --num-distributed-optimizer-instances 2"),
    (4, "ZeRO-2", f"{ACCUMULATED} --untie-embeddings-and-output-weights"),
    (4, "FSDP2", f"{LARGE_BATCH} --torch-fsdp2-no-reshard-after-forward"),
    (2, "replicated", f"{DEEP} --optimizer muon"),
    (2, "ZeRO-3", f"{ACCUMULATED} --reduce-every-micro-batch"),
]
"""Ranks, wrapper and flags of each."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="only these configurations, from 1")
    options = parser.parse_args()
    numbers = options.only or range(1, len(CONFIGURATIONS) + 1)
    print(machine())
    with section("Predicted and measured peak of tensors of rank 0, and the bytes that it sends in a step"):
        return compare(numbers)


def compare(numbers: Sequence[int]) -> int:
    lines = {number: command_line(number) for number in numbers}
    for number, line in lines.items():
        validate(parse_arguments(line), CONFIGURATIONS[number - 1][0])
    real: dict[int, tuple[int, int]] = {}
    for ranks in sorted({CONFIGURATIONS[number - 1][0] for number in numbers}):
        own = [number for number in numbers if CONFIGURATIONS[number - 1][0] == ranks]
        real.update(zip(own, run_on_ranks(real_steps, ranks, [lines[n] for n in own])[0], strict=True))
    ratios, others = [], 0
    print("| # | ranks | wrapper | flags | predicted, MiB | measured, MiB | predicted / measured | bytes sent |")
    print("| ---: | ---: | --- | --- | ---: | ---: | ---: | --- |")
    for number in numbers:
        ranks, wrapper, flags = CONFIGURATIONS[number - 1]
        with redirect_stderr(StringIO()):
            simulated = simulate(parse_arguments(lines[number]), ranks, on_gpu=False)
        (measured, sent), predicted = real[number], simulated.peak.nbytes
        ratios.append(predicted / measured)
        planned = sum(simulated.wire().values())
        others += planned != sent
        bytes_sent = f"{sent:,}" if planned == sent else f"{planned:,} predicted, {sent:,} sent"
        print(
            f"| {number} | {ranks} | {wrapper} | `{flags}` | {predicted / 2**20:.2f} | {measured / 2**20:.2f} "
            f"| {ratios[-1]:.4f} | {bytes_sent} |"
        )
    below = sum(ratio < 1 for ratio in ratios)
    print(
        f"\npredicted / measured: minimum {min(ratios):.4f}, median {statistics.median(ratios):.4f}, maximum "
        f"{max(ratios):.4f}; below one in {below} of {len(ratios)}; other bytes sent than predicted in {others}"
    )
    return int(not 0.99 <= min(ratios) <= max(ratios) <= 1.03 or others > 0)


def command_line(number: int) -> list[str]:
    """Returns the flags of a configuration, counted from 1."""
    _, wrapper, flags = CONFIGURATIONS[number - 1]
    return f"{BASE} {flags} {WRAPPERS[wrapper]}".split()


if __name__ == "__main__":
    raise SystemExit(main())
