"""What the FSDP2 wrapper costs beside bare `fully_shard`: time, peak memory and wire bytes of one optimizer step.

    python benchmarks/wrapper_overhead.py [--rounds 15] [--launches 15] [--only time|memory|wire]

A GPT of 8 layers, width 512, 8 heads, vocabulary 32k, sequence 256 (58.7 M parameters); a step is 4 micro-batches of 2
on two gloo ranks with one thread each. The baseline applies `fully_shard` to every layer and the root, accumulates
with `set_requires_gradient_sync`, and takes the same torch AdamW. Exits with 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

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

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE = 8, 512, 8, 32_768, 256
MICRO_BATCHES, MICRO_BATCH_SIZE, RANKS = 4, 2, 2
TIME_LIMIT, MEMORY_LIMIT = 1.02, 1.02
MIB = 2**20


@dataclass(frozen=True)
class Candidate:
    """One optimizer step of one way to shard, and the module and optimizer whose tensors live between steps."""

    step: Callable[[], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def live_tensors(self) -> list[torch.Tensor]:
        states = (t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
        tensors = (*self.model.parameters(), *self.model.buffers(), *states)
        return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def build_model() -> nn.Module:
    from core.models.gpt import GPTModel
    from core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, hidden_dropout=0.0, attention_dropout=0.0
    )
    return GPTModel(config, VOCABULARY, SEQUENCE)


def micro_batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (MICRO_BATCH_SIZE, SEQUENCE + 1)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(MICRO_BATCHES)]


def backward(model: nn.Module, tokens: torch.Tensor) -> None:
    losses = model(tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous())
    (losses.mean() / MICRO_BATCHES).backward()


def bare_fully_shard() -> Candidate:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    data = micro_batches()

    def step() -> None:
        for index, tokens in enumerate(data):
            model.set_requires_gradient_sync(index == len(data) - 1)
            backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad()

    return Candidate(step, model, optimizer)


def this_wrapper() -> Candidate:
    from core.distributed import TorchFullyShardedDataParallelConfig, finalize_model_grads, wrap_model

    module = build_model()
    model = wrap_model(module, module.config, TorchFullyShardedDataParallelConfig(), process_group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    data = micro_batches()

    def step() -> None:
        for index, tokens in enumerate(data):
            with nullcontext() if index == len(data) - 1 else model.no_sync():
                backward(model, tokens)
        finalize_model_grads([model])
        optimizer.step()
        model.zero_grad_buffer()

    return Candidate(step, model, optimizer)


CANDIDATES: dict[str, Callable[[], Candidate]] = {"bare fully_shard": bare_fully_shard, "this wrapper": this_wrapper}


def measure_time(rounds: int) -> dict[str, list[float]]:
    return interleaved_seconds({name: build().step for name, build in CANDIDATES.items()}, rounds)


def measure_resident(name: str) -> int:
    import core.distributed  # imports belong to the base, not to the peak

    del core
    reset_high_water()
    base = high_water_bytes()
    step = CANDIDATES[name]().step
    step()  # which makes the optimizer's state
    step()
    return high_water_bytes() - base


def measure_live(name: str) -> int:
    candidate = CANDIDATES[name]()
    candidate.step()
    return live_tensor_bytes(candidate.live_tensors()) + peak_allocation_above_start(candidate.step)


def measure_wire(name: str) -> tuple[float, int]:
    step = CANDIDATES[name]().step
    step()
    with CollectivePayload() as payload:
        step()
    return wire_bytes_per_step(step), sum(payload.bytes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds of the timing; a limit needs 15")
    parser.add_argument(
        "--launches", type=int, default=15, help="interleaved launches a candidate for the memory peak"
    )
    parser.add_argument("--only", choices=("time", "memory", "wire"), help="measure one of the three")
    asked = parser.parse_args()
    print(machine())
    within = True
    if asked.only in (None, "time"):
        with section(f"Seconds a step, {asked.rounds} interleaved rounds"):
            within &= report_time(run_on_ranks(measure_time, RANKS, asked.rounds)[0])
    if asked.only in (None, "memory"):
        with section(f"Peak memory of the larger rank, MiB, {asked.launches} launches a candidate"):
            within &= report_memory(asked.launches)
    if asked.only in (None, "wire"):
        with section("Wire bytes a step, all ranks, MiB"):
            report_wire()
    print("\nwithin limits" if within else "\nABOVE A LIMIT")
    return 0 if within else 1


def report_time(seconds: dict[str, list[float]]) -> bool:
    for name, values in seconds.items():
        print(f"{name:18} median {statistics.median(values):6.2f}   {min(values):.2f} to {max(values):.2f}")
    return _judge(PairedRatio.of(seconds["this wrapper"], seconds["bare fully_shard"]), TIME_LIMIT)


def report_memory(launches: int) -> bool:
    peaks: dict[str, list[int]] = {name: [] for name in CANDIDATES}
    for _ in range(launches):
        for name, values in peaks.items():
            values.append(max(run_on_ranks(measure_resident, RANKS, name)))
    for name, values in peaks.items():
        live = max(run_on_ranks(measure_live, RANKS, name))
        median, least, most = (f(values) / MIB for f in (statistics.median, min, max))
        print(f"{name:18} resident, median {median:7.1f}   {least:.1f} to {most:.1f}   live tensors {live / MIB:7.1f}")
    return _judge(PairedRatio.of(peaks["this wrapper"], peaks["bare fully_shard"]), MEMORY_LIMIT)


def report_wire() -> None:
    for name in CANDIDATES:
        ranks = run_on_ranks(measure_wire, RANKS, name)
        payload = sum(own for _, own in ranks)
        print(
            f"{name:18} loopback {ranks[0][0] / MIB:8.1f}   ring payload of the calls {payload / MIB:8.1f}", flush=True
        )


def _judge(ratio: PairedRatio, limit: float) -> bool:
    holds = ratio.holds(limit)
    print(f"this wrapper / bare fully_shard: {ratio}, limit {limit}: {'holds' if holds else 'EXCEEDED'}")
    return holds


if __name__ == "__main__":
    sys.exit(main())
