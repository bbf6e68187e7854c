"""Measures the cost of `reproducible_across_ranks`: time of a step with it and without, and the gradients it keeps.

    python benchmarks/reproducible.py [WRAPPER ...] [--ranks 2 4] [--only time|memory] [--rounds 15]

For each wrapper both take turns in the same processes, on gloo ranks of one thread each: a step of 4 micro-batches of
one sequence of 128 tokens, clipped, with AdamW. Memory is the most that a rank holds of gradients between two
micro-batches, by tensors, and exact; its formula is the number of sums that wait times the bytes of one. Exits with 1
when a limit is exceeded.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import MICRO_BATCHES, backward, build_model, micro_batches
from _history import record
from _measure import PairedRatio, interleaved_seconds, live_tensor_bytes, machine, run_on_ranks, section
from _report import MIB, arguments, check_names, exit_status

LIMIT = 1.10
VOCABULARY, SEQUENCE = 8192, 128
OFTEN = 16  # micro-batches, where memory is measured

EACH = {"reduce_every_micro_batch": True}
WRAPPERS: dict[str, dict[str, Any]] = {
    "DDP": {"overlap_grad_reduce": True},
    "ZeRO-1": {"data_parallel_sharding_strategy": "optim", "overlap_grad_reduce": True},
    "ZeRO-2": {"data_parallel_sharding_strategy": "optim_grads", "overlap_grad_reduce": True},
    "ZeRO-2, every micro-batch": {"data_parallel_sharding_strategy": "optim_grads", **EACH},
    "ZeRO-3": {},
    "ZeRO-3, every micro-batch": EACH,
    "FSDP2": {},
    "FSDP2, every micro-batch": EACH,
}


def _wrapped(name: str, reproducible: bool, count: int) -> tuple[Any, Any]:
    """A wrapper of the model, and its optimizer."""
    from core import parallel_state
    from core.distributed import (
        DistributedDataParallelConfig,
        FullyShardedDataParallelConfig,
        TorchFullyShardedDataParallelConfig,
        wrap_model,
    )
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    kinds = {"ZeRO-3": FullyShardedDataParallelConfig, "FSDP2": TorchFullyShardedDataParallelConfig}
    kind = kinds.get(name.partition(",")[0], DistributedDataParallelConfig)
    module = build_model(SEQUENCE, VOCABULARY)
    model = wrap_model(module, module.config, kind(**WRAPPERS[name], reproducible_across_ranks=reproducible))
    model.expect_micro_batches(count)
    return model, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-4, clip_grad=1.0), [model])


def _step(model: Any, optimizer: Any) -> Callable[[], None]:
    from core.distributed import finalize_model_grads

    data = [tokens % VOCABULARY for tokens in micro_batches(1, SEQUENCE)]

    def step() -> None:
        model.zero_grad_buffer()
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        finalize_model_grads([model])
        optimizer.step()

    return step


def measure_time(name: str, rounds: int) -> dict[str, list[float]]:
    candidates = {
        text: _step(*_wrapped(name, reproducible, MICRO_BATCHES))
        for text, reproducible in (("without", False), ("with it", True))
    }
    return interleaved_seconds(candidates, rounds)


def measure_gradients(name: str, reproducible: bool) -> tuple[int, int]:
    """Most bytes of gradients between two of many micro-batches, and those that the formula adds."""
    from core.distributed import finalize_model_grads

    model, _ = _wrapped(name, reproducible, OFTEN)
    tokens = micro_batches(1, SEQUENCE)[0] % VOCABULARY
    most = 0
    for _ in range(2):  # the second step has all memory that the first has made
        model.zero_grad_buffer()
        for index in range(OFTEN):
            with nullcontext() if index == OFTEN - 1 else model.no_sync():
                backward(model, tokens)
            if index < OFTEN - 1:
                most = max(most, live_tensor_bytes(model.engine.held()["gradients"]))
        finalize_model_grads([model])
    tree = model.plan.tree
    if tree is None:
        return most, 0
    one = sum(p.numel() for p in build_model(SEQUENCE, VOCABULARY).parameters()) * torch.float32.itemsize
    return most, tree.num_set_aside(OFTEN) * (one // tree.num_ranks if tree.interleaves else one)


def report_time(name: str, ranks: int, rounds: int) -> bool:
    seconds = run_on_ranks(measure_time, ranks, name, rounds)[0]
    ratio = PairedRatio.of(seconds["with it"], seconds["without"])
    record(name, ratio)
    medians = ", ".join(f"{statistics.median(values):.2f} s {text}" for text, values in seconds.items())
    print(f"  {name:26} {medians}: {ratio}{ratio.verdict(LIMIT)}", flush=True)
    return ratio.holds(LIMIT)


def report_gradients(name: str, ranks: int) -> None:
    (without, _), (with_it, formula) = (run_on_ranks(measure_gradients, ranks, name, on)[0] for on in (False, True))
    added = with_it - without
    if formula:
        record(f"{name}: added / formula", added / formula)
    print(
        f"  {name:26} MiB {without / MIB:7.1f} without, {with_it / MIB:7.1f} with it: adds {added / MIB:7.1f}, "
        f"formula {formula / MIB:7.1f}, ratio {added / max(formula, 1):.3f}",
        flush=True,
    )


def main() -> int:
    parser = arguments(__doc__, ("time", "memory"), WRAPPERS, of="wrapper")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    asked = parser.parse_args()
    check_names(parser, asked.wrappers, WRAPPERS)
    print(machine())
    within = True
    for ranks in asked.ranks:
        if asked.only in (None, "time"):
            with section(f"time of a step of {MICRO_BATCHES} micro-batches on {ranks} ranks"):
                for name in asked.wrappers or WRAPPERS:
                    within &= report_time(name, ranks, asked.rounds)
        if asked.only in (None, "memory"):
            with section(f"gradients of {OFTEN} micro-batches on {ranks} ranks"):
                for name in asked.wrappers or WRAPPERS:
                    report_gradients(name, ranks)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
