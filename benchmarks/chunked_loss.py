"""Compares a loss computed with the projection, in parts of the vocabulary, with one of whole logits.

    python benchmarks/chunked_loss.py [ROW ...] [--only time|memory] [--rounds 15] [--launches 15]

Time and peak memory of one optimizer step of a GPT of 58.7 M parameters and 32k tokens of vocabulary, on two gloo
ranks of one thread each, with a fused AdamW without clipping. Both candidates take turns in the same processes for the
time; each has processes of its own for the peak. Without names all rows run. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import backward, build_model, micro_batches
from _measure import interleaved_peaks, interleaved_seconds, machine, peak_of_two_steps, run_on_ranks, section
from _report import arguments, check_names, exit_status, judge, print_spread

RANKS = 2
WHOLE, IN_PARTS = "whole logits", "in parts"
FIELDS: dict[str, dict[str, Any]] = {
    WHOLE: {},
    IN_PARTS: {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
}
TIME_LIMIT, MEMORY_LIMIT = 1.05, 0.70
"""Of the loss in parts, compared with whole logits."""


@dataclass(frozen=True)
class Row:
    """A wrapper and the tokens of a step."""

    strategy: str
    samples: int
    sequence: int
    recomputes: bool = False
    """Layers keep their inputs alone, so that logits are most of the peak."""


ROWS = {
    "sharded, 4 x 1024 tokens": Row("optim_grads_params", 4, 1024),
    "sharded, 4 x 1024 tokens, recomputed": Row("optim_grads_params", 4, 1024, recomputes=True),
    "replicated, 4 x 1024 tokens, recomputed": Row("no_shard", 4, 1024, recomputes=True),
}


def make_step(row: Row, candidate: str) -> Callable[[], None]:
    from core import parallel_state
    from core.distributed import DistributedDataParallelConfig, finalize_model_grads, wrap_model
    from core.distributed.fully_sharded_data_parallel_config import FullyShardedDataParallelConfig
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    module = build_model(row.sequence, **FIELDS[candidate], **(recompute if row.recomputes else {}))
    is_sharded = row.strategy == "optim_grads_params"
    settings = FullyShardedDataParallelConfig if is_sharded else DistributedDataParallelConfig
    model = wrap_model(module, module.config, settings(data_parallel_sharding_strategy=row.strategy))
    config = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model])
    tokens = micro_batches(row.samples, row.sequence)[0]

    def step() -> None:
        backward(model, tokens)
        finalize_model_grads([model])
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure_time(row: Row, rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({name: make_step(row, name) for name in FIELDS}, rounds, warmup=1)


def measure_peak(row: Row, candidate: str) -> int:
    return peak_of_two_steps(lambda: make_step(row, candidate))


def report_time(row: Row, rounds: int) -> bool:
    seconds = run_on_ranks(measure_time, RANKS, row, rounds)[0]
    for name, values in seconds.items():
        print_spread(name, values, "s")
    return judge("time", seconds[IN_PARTS], seconds[WHOLE], TIME_LIMIT)


def report_memory(row: Row, launches: int) -> bool:
    peaks = interleaved_peaks(measure_peak, RANKS, list(FIELDS), launches, row)
    for name, values in peaks.items():
        print_spread(name, values, "MiB")
    return judge("peak memory", peaks[IN_PARTS], peaks[WHOLE], MEMORY_LIMIT)


def main() -> int:
    parser = arguments(__doc__, ("time", "memory"), ROWS, launches=15)
    asked = parser.parse_args()
    check_names(parser, asked.rows, ROWS)
    print(machine())
    within = True
    for name in asked.rows or ROWS:
        with section(f"{name}, {RANKS} ranks"):
            if asked.only in (None, "time"):
                within &= report_time(ROWS[name], asked.rounds)
            if asked.only in (None, "memory"):
                within &= report_memory(ROWS[name], asked.launches)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
