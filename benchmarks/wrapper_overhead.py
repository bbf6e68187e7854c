"""Compares the FSDP2 wrapper with bare `fully_shard`: time, peak memory and wire bytes of one optimizer step.

    python benchmarks/wrapper_overhead.py [ROW ...] [--only time|memory|wire] [--rounds 15] [--launches 15]

Each row is one run in which candidates take turns: the baseline applies `fully_shard` to every layer and the root,
accumulates with `set_requires_gradient_sync`, and has the row's settings by torch's own means. Both take the same
torch AdamW, except where torch DDP is the baseline: there each side takes its fused one. Steps are 4 micro-batches on
gloo ranks with one thread each. Without names the first four rows run. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _gpt import backward, build_model, micro_batches
from _measure import (
    CollectivePayload,
    interleaved_peaks,
    interleaved_seconds,
    live_tensor_bytes,
    machine,
    peak_allocation_above_start,
    peak_of_two_steps,
    run_on_ranks,
    section,
    wire_bytes_per_step,
)
from _report import MIB, arguments, check_names, exit_status, judge, print_spread

TORCHS = {
    "collectives": "torch",
    "forward_prefetch": 0,
    "backward_prefetch": 0,
    "keep_gathered_between_micro_batches": "none",
}
"""The wrapper with what bare `fully_shard` does by itself."""


@dataclass(frozen=True)
class Candidate:
    """One optimizer step of one way to shard, and the module and optimizer whose tensors live between steps."""

    step: Callable[[], None]
    model: nn.Module
    optimizer: Any

    def live_tensors(self) -> list[torch.Tensor]:
        rule = getattr(self.optimizer, "optimizer", self.optimizer)
        states = (t for s in rule.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        tensors = (*self.model.parameters(), *self.model.buffers(), *states)
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


@dataclass(frozen=True)
class Row:
    """A comparison: settings of the wrapper, how the baseline gets the same, and the limits of the ratios.

    Attributes:
        settings: of the wrapper.
        baseline: settings of bare `fully_shard`, or None for torch DDP.
        samples: sequences of a micro-batch.
        instances: replicas across which shards are repeated, 1 but for hybrid sharding.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] | None = field(default_factory=dict)
    sequence: int = 128
    samples: int = 1
    ranks: int = 2
    instances: int = 1
    time_limit: float = float("inf")
    memory_limit: float = float("inf")


def _same(settings: dict[str, Any], **row: Any) -> Row:
    """Returns the wrapper with torch's own collectives and bare `fully_shard`, both with these settings."""
    return Row({**TORCHS, **settings}, settings, time_limit=1.01, memory_limit=1.01, **row)


ROWS = {
    "same": _same({}, sequence=256, samples=2),
    "defaults, 512 tokens": Row(sequence=256, samples=2, time_limit=0.92, memory_limit=1.02),
    "defaults, 128 tokens": Row(time_limit=0.85, memory_limit=1.02),
    "next to torch DDP": Row(baseline=None, sequence=256, samples=2, time_limit=1.13),
    "prefetch 0": _same({"forward_prefetch": 0, "backward_prefetch": 0}),
    "prefetch 1": _same({"forward_prefetch": 1, "backward_prefetch": 1}),
    "prefetch 2": _same({"forward_prefetch": 2, "backward_prefetch": 2}),
    "no reshard": _same({"reshard_after_forward": False}),
    "reshard to 2": _same({"reshard_after_forward": 2}, ranks=4),
    "hybrid": _same({}, ranks=4, instances=2),
    "bf16": _same({"param_dtype": "bf16", "reduce_dtype": "fp32"}),
    "offload": _same({"cpu_offload": True}),
}
DEFAULT_ROWS = ("same", "defaults, 512 tokens", "defaults, 128 tokens", "next to torch DDP")


def bare_fully_shard(row: Row) -> Candidate:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    settings = row.baseline or {}
    model = build_model(row.sequence)
    shape = (row.ranks,) if row.instances == 1 else (row.instances, row.ranks // row.instances)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if settings.get("cpu_offload") else OffloadPolicy(),
    }
    if "param_dtype" in settings:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    layers = list(model.decoder.layers)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=settings.get("reshard_after_forward", True), **options)
    fully_shard(model, **options)
    ahead = settings.get("forward_prefetch", 0)
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + ahead])
        # By default one layer is gathered ahead in backward; a layer that is gathered already means none.
        layer.set_modules_to_backward_prefetch(layers[max(0, index - ahead) : index][::-1] or [layer])
    if ahead:
        model._set_unshard_async_op(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    data = micro_batches(row.samples, row.sequence)

    def step() -> None:
        for index, tokens in enumerate(data):
            model.set_requires_gradient_sync(index == len(data) - 1)
            backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad()

    return Candidate(step, model, optimizer)


def torch_ddp(row: Row) -> Candidate:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(build_model(row.sequence), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = micro_batches(row.samples, row.sequence)

    def step() -> None:
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad()

    return Candidate(step, model, optimizer)


def baseline(row: Row) -> Candidate:
    return torch_ddp(row) if row.baseline is None else bare_fully_shard(row)


def this_wrapper(row: Row) -> Candidate:
    from core import parallel_state
    from core.distributed import TorchFullyShardedDataParallelConfig, finalize_model_grads, wrap_model
    from core.optimizer import OptimizerConfig, get_megatron_optimizer

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=row.instances)
    module = build_model(row.sequence)
    ddp_config = TorchFullyShardedDataParallelConfig(**row.settings, num_distributed_optimizer_instances=row.instances)
    model = wrap_model(module, module.config, ddp_config)
    optimizer: Any
    if row.baseline is None:
        config = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.01, adam_beta2=0.999, clip_grad=0.0)
        optimizer = get_megatron_optimizer(config, [model], no_weight_decay_cond=lambda *unused: False)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    data = micro_batches(row.samples, row.sequence)

    def step() -> None:
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        finalize_model_grads([model])
        optimizer.step()
        model.zero_grad_buffer()

    return Candidate(step, model, optimizer)


CANDIDATES: dict[str, Callable[[Row], Candidate]] = {"baseline": baseline, "this wrapper": this_wrapper}


def measure_time(row: Row, rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({name: build(row).step for name, build in CANDIDATES.items()}, rounds)


def measure_resident(row: Row, name: str) -> int:
    return peak_of_two_steps(lambda: CANDIDATES[name](row).step)


def measure_live(row: Row, name: str) -> int:
    candidate = CANDIDATES[name](row)
    candidate.step()
    return live_tensor_bytes(candidate.live_tensors()) + peak_allocation_above_start(candidate.step)


def measure_wire(row: Row, name: str) -> tuple[float, int]:
    step = CANDIDATES[name](row).step
    step()
    with CollectivePayload() as payload:
        step()
    return wire_bytes_per_step(step), payload.total()


def report_time(row: Row, rounds: int) -> bool:
    seconds = run_on_ranks(measure_time, row.ranks, row, rounds)[0]
    for name, values in seconds.items():
        print_spread(name, values, "s")
    return judge("time", seconds["this wrapper"], seconds["baseline"], row.time_limit)


def report_memory(row: Row, launches: int) -> bool:
    peaks = interleaved_peaks(measure_resident, row.ranks, list(CANDIDATES), launches, row)
    for name, values in peaks.items():
        live = max(run_on_ranks(measure_live, row.ranks, row, name))
        print_spread(name, values, "MiB", f"   live tensors {live / MIB:.1f}")
    return judge("peak memory", peaks["this wrapper"], peaks["baseline"], row.memory_limit)


def report_wire(row: Row) -> bool:
    for name in CANDIDATES:
        ranks = run_on_ranks(measure_wire, row.ranks, row, name)
        payload = sum(own for _, own in ranks)
        print(
            f"  {name:13} MiB   loopback {ranks[0][0] / MIB:8.1f}   ring payload of the calls {payload / MIB:8.1f}",
            flush=True,
        )
    return True


def main() -> int:
    parser = arguments(__doc__, ("time", "memory", "wire"), ROWS, launches=15)
    asked = parser.parse_args()
    check_names(parser, asked.rows, ROWS)
    print(machine())
    within = True
    for name in asked.rows or DEFAULT_ROWS:
        row = ROWS[name]
        against = "torch DDP" if row.baseline is None else "bare fully_shard"
        with section(
            f"{name}: compared with {against}, {row.ranks} ranks, micro-batches of {row.samples} x {row.sequence}"
        ):
            if asked.only in (None, "time"):
                within &= report_time(row, asked.rounds)
            if asked.only in (None, "memory"):
                within &= report_memory(row, asked.launches)
            if asked.only in (None, "wire"):
                within &= report_wire(row)
    return exit_status(within)


if __name__ == "__main__":
    sys.exit(main())
