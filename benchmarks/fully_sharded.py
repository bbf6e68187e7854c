"""Compares ways to shard all of a GPT, and replicas: time, peak memory and wire bytes of one optimizer step.

    python benchmarks/fully_sharded.py [ROW ...] [--only time|memory|wire] [--rounds 15] [--launches 15]

In each row all candidates take turns in the same processes: bare `fully_shard` of every layer and the root, torch's
FSDP1 and DDP, and this project's wrappers. All step a fused AdamW without clipping, on gloo ranks of one thread each.
Ratios are those to the first candidate. Without names the first three rows run. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import backward, build_model, micro_batches, parameter_bytes
from _measure import (
    CollectivePayload,
    PairedRatio,
    interleaved_peaks,
    interleaved_seconds,
    machine,
    peak_of_two_steps,
    run_on_ranks,
    section,
)
from _report import arguments, check_names, exit_status, judge, print_spread

OURS = "FullyShardedDataParallel"


@dataclass(frozen=True)
class Row:
    """Batches of a step, and limits of our ratio of time by the candidate that it is compared with."""

    samples: int
    """Sequences of a micro-batch."""
    sequence: int
    count: int = 1
    """Micro-batches."""
    ranks: int = 2
    time_limits: dict[str, float] = field(default_factory=dict)


ROWS = {
    "128 tokens": Row(1, 128, time_limits={"fully_shard": 0.60, "TorchFullyShardedDataParallel": 1.0}),
    "512 tokens": Row(2, 256, time_limits={"fully_shard": 0.75, "TorchFullyShardedDataParallel": 1.0}),
    "4 x 512 tokens": Row(2, 256, 4, time_limits={"DistributedDataParallel": 1.05, "torch DDP": 1.0}),
    "four ranks": Row(1, 128, ranks=4),
}
DEFAULT_ROWS = ("128 tokens", "512 tokens", "4 x 512 tokens")
MEMORY_LIMIT = 0.70
"""Of our peak memory, compared with bare `fully_shard`."""


def _stepped(
    row: Row,
    model: nn.Module,
    optimizer: Any,
    kept_back: Callable[[], AbstractContextManager[Any]],
    finish: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """A step of a model whose micro-batches but the last run inside `kept_back`."""
    data = micro_batches(row.samples, row.sequence)[: row.count]

    def step() -> None:
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else kept_back():
                backward(model, tokens)
        finish()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class _NoSync:
    """`set_requires_gradient_sync` as a context."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._model.set_requires_gradient_sync(False)

    def __exit__(self, *unused: object) -> None:
        self._model.set_requires_gradient_sync(True)


def fully_shard(row: Row) -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    model = build_model(row.sequence)
    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    return _stepped(row, model, _adamw(model), partial(_NoSync, model))


def fsdp1(row: Row) -> Callable[[], None]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    module = build_model(row.sequence)
    policy = ModuleWrapPolicy({type(module.decoder.layers[0])})
    model = FullyShardedDataParallel(
        module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    return _stepped(row, model, _adamw(model), model.no_sync)


def torch_ddp(row: Row) -> Callable[[], None]:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build_model(row.sequence), gradient_as_bucket_view=True)
    return _stepped(row, model, _adamw(model), model.no_sync)


def _wrapped(row: Row, settings: Callable[[], Any]) -> Callable[[], None]:
    from core import parallel_state
    from core.distributed import finalize_model_grads, wrap_model
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    module = build_model(row.sequence)
    model = wrap_model(module, module.config, settings())
    config = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, adam_beta2=0.999, clip_grad=0.0)
    optimizer = get_megatron_optimizer(config, [model], no_weight_decay_cond=lambda *unused: False)
    return _stepped(row, model, optimizer, model.no_sync, lambda: finalize_model_grads([model]))


def our_ddp(row: Row) -> Callable[[], None]:
    from core.distributed import DistributedDataParallelConfig

    return _wrapped(row, lambda: DistributedDataParallelConfig(overlap_grad_reduce=True))


def our_fsdp2(row: Row) -> Callable[[], None]:
    from core.distributed import TorchFullyShardedDataParallelConfig

    return _wrapped(row, TorchFullyShardedDataParallelConfig)


def our_zero3(row: Row, **settings: Any) -> Callable[[], None]:
    from core.distributed import FullyShardedDataParallelConfig

    return _wrapped(row, lambda: FullyShardedDataParallelConfig(**settings))


CANDIDATES: dict[str, Callable[[Row], Callable[[], None]]] = {
    "fully_shard": fully_shard,
    "FSDP1": fsdp1,
    "torch DDP": torch_ddp,
    "DistributedDataParallel": our_ddp,
    "TorchFullyShardedDataParallel": our_fsdp2,
    OURS: our_zero3,
}
OF_MEMORY = ("fully_shard", "TorchFullyShardedDataParallel", OURS)


def measure_time(row: Row, rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({name: build(row) for name, build in CANDIDATES.items()}, rounds)


def measure_peak(row: Row, name: str) -> int:
    return peak_of_two_steps(lambda: CANDIDATES[name](row))


def measure_wire(row: Row, reshards: bool) -> int:
    step = our_zero3(row, reshard_after_forward=reshards)
    step()
    with CollectivePayload() as payload:
        step()
    return payload.total()


def report_time(row: Row, rounds: int) -> bool:
    seconds = run_on_ranks(measure_time, row.ranks, row, rounds)[0]
    first = next(iter(seconds))
    for name, values in seconds.items():
        print_spread(name, values, "s", f"   ratio {PairedRatio.of(values, seconds[first])}")
    holds = True
    for name, limit in row.time_limits.items():
        holds &= judge(f"{OURS} compared with {name}", seconds[OURS], seconds[name], limit)
    return holds


def report_memory(row: Row, launches: int) -> bool:
    peaks = interleaved_peaks(measure_peak, row.ranks, OF_MEMORY, launches, row)
    for name, values in peaks.items():
        print_spread(name, values, "MiB")
    return judge(f"peak memory, {OURS} compared with fully_shard", peaks[OURS], peaks["fully_shard"], MEMORY_LIMIT)


def report_wire(row: Row) -> bool:
    whole = parameter_bytes()
    for reshards in (True, False):
        sent = sum(run_on_ranks(measure_wire, row.ranks, row, reshards))
        print(f"  {OURS}, reshard_after_forward={reshards}: {sent / whole:.2f} of the parameters' bytes", flush=True)
    return True


def main() -> int:
    parser = arguments(__doc__, ("time", "memory", "wire"), ROWS, launches=15)
    asked = parser.parse_args()
    check_names(parser, asked.rows, ROWS)
    print(machine())
    within = True
    for name in asked.rows or DEFAULT_ROWS:
        row = ROWS[name]
        with section(f"{name}: {row.ranks} ranks, {row.count} micro-batches of {row.samples} x {row.sequence}"):
            if asked.only in (None, "time"):
                within &= report_time(row, asked.rounds)
            if asked.only in (None, "memory") and row.ranks == 2:
                within &= report_memory(row, asked.launches)
            if asked.only in (None, "wire"):
                within &= report_wire(row)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
