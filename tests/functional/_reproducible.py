"""Trainings whose bits must not depend on the number of ranks, and what is compared of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from core import parallel_state
from core.base.module_protocol import unwrap_model
from core.dist_checkpointing.agreement import Ranks
from core.dist_checkpointing.format.content_hash import joint_hash
from core.dist_checkpointing.loading import held_hashes
from core.distributed import wrap_model
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from core.tensor_parallel.random import MicroBatchSeeds
from core.training.train_step import Batch, evaluate, train_step
from tests.functional._equality import ADAMW
from tests.unit._gpt import SEQUENCE, VOCABULARY, Training, build_gpt, config_of, in_precision
from tests.unit._runs import _scheduler
from tests.unit._spawn import run_distributed

_ZERO1, _ZERO2 = ({"data_parallel_sharding_strategy": strategy} for strategy in ("optim", "optim_grads"))
_OVERLAP = {"bucket_size": 700, "overlap_grad_reduce": True}
_EACH = {"reduce_every_micro_batch": True}
_HYBRID, _REPLICAS = {"num_distributed_optimizer_instances": 2}, {"num_distributed_optimizer_instances": 4}

WRAPPERS: dict[str, Mapping[str, Any]] = {
    "ddp": {},
    "ddp, overlapped": _OVERLAP,
    "zero1": _ZERO1 | {"bucket_size": 700},
    "zero2, overlapped": _ZERO2 | _OVERLAP,
    "zero2, every micro-batch": _ZERO2 | _EACH,
    "zero3": {},
    "zero3, offloaded": {"cpu_offload": True},
    "zero3, every micro-batch": _EACH,
    "fsdp2": {},
    "fsdp2, offloaded": {"cpu_offload": True},
    "fsdp2, every micro-batch": _EACH,
    "hybrid zero1": _HYBRID | _ZERO1,
    "hybrid zero2, every micro-batch": _HYBRID | _ZERO2 | _EACH,
    "hybrid zero3": _HYBRID,
    "hybrid zero3, every micro-batch": _HYBRID | _EACH,
    "hybrid fsdp2": _HYBRID,
    "hybrid fsdp2, four replicas": _REPLICAS,
    "hybrid zero2, four replicas": _ZERO2 | _REPLICAS,
    "hybrid fsdp2, every micro-batch": _HYBRID | _EACH,
}


@dataclass(frozen=True)
class Kind:
    """What all of one comparison train."""

    micro_batches: int = 8
    """Of a global batch."""
    precision: str = "fp32"
    reduces_in_fp32: bool = True
    per_token: bool = False
    dropout: float = 0.1
    optimizer: str = "adam"
    context_parallel: int = 1
    steps: int = 6

    @property
    def ranks(self) -> tuple[int, ...]:
        """The numbers of data-parallel ranks that can share a global batch."""
        return tuple(ranks for ranks in (1, 2, 4, 8) if self.micro_batches % ranks == 0)


KINDS = {
    "8 micro-batches": Kind(),
    "16 micro-batches": Kind(16, dropout=0.0),
    "12 micro-batches, per token": Kind(12, per_token=True),
    "Muon": Kind(4, optimizer="muon", steps=6),
    "bf16": Kind(precision="bf16"),
    "bf16, reduced in bf16": Kind(precision="bf16", reduces_in_fp32=False),
    "fp16": Kind(precision="fp16", steps=14),
    "fp16, 12 micro-batches": Kind(12, precision="fp16", steps=12),
    "sequences in two parts": Kind(4, context_parallel=2),
    "sequences in two parts, 6 micro-batches": Kind(6, context_parallel=2, per_token=True),
}


@dataclass(frozen=True)
class Record:
    """All that a run reports, equal on all ranks."""

    losses: tuple[float, ...]
    grad_norms: tuple[float | None, ...]
    zeros: tuple[int | None, ...]
    scales: tuple[float, ...]
    hashes: tuple[str, ...]
    """Of the weights after each step, master weights in low precision."""
    validation_loss: float


def sequences(step: int, index: int) -> Batch:
    """Makes micro-batch `index` of a step: tokens that follow from each other, and a mask that leaves out some."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    length = SEQUENCE - 1  # two chunks for each of two ranks that share a sequence
    found = [torch.randint(0, VOCABULARY, (2,), generator=generator)]
    for _ in range(length):
        found.append((5 * found[-1] + 1) % VOCABULARY)
    whole = torch.stack(found, dim=-1)
    mask = torch.ones(2, length)
    mask[0, : 1 + int(torch.randint(0, length - 1, (), generator=generator))] = 0.0
    return {
        "tokens": whole[:, :-1].contiguous(),
        "labels": whole[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(length).expand(2, length).contiguous(),
    }


def train(wrapper: str, kind: Kind) -> Record:
    """Trains on this rank's micro-batches; every rank calls it."""
    fields = WRAPPERS[wrapper]
    instances = fields.get("num_distributed_optimizer_instances", 1)
    cp = kind.context_parallel
    parallel_state.initialize_model_parallel(context_parallel_size=cp, num_distributed_optimizer_instances=instances)
    low = kind.precision != "fp32"
    module = build_gpt(
        tied=True,
        calculate_per_token_loss=kind.per_token,
        hidden_dropout=kind.dropout,
        context_parallel_size=cp,
        **({kind.precision: True} if low else {}),
    )
    config = config_of(
        wrapper, **fields, grad_reduce_in_fp32=low and kind.reduces_in_fp32, reproducible_across_ranks=True
    )
    model = wrap_model(in_precision(module, wrapper), module.config, config)
    optimizer = _optimizer(kind, model)
    scheduler = _scheduler(Training(ADAMW, kind.steps), optimizer)
    count = kind.micro_batches * cp // dist.get_world_size()
    model.expect_micro_batches(count, divides_by_ranks=False)

    def batches(step: int) -> Iterator[Batch]:
        return iter([sequences(step, model.micro_batch_index(number)) for number in range(count)])

    results, scales, hashes = [], list[float](), list[str]()
    for step in range(kind.steps):
        seeds = MicroBatchSeeds(7, step * kind.micro_batches)
        results.append(train_step(model, optimizer, scheduler, batches(step), count, seeds=seeds).result())
        scales.append(float(optimizer.get_loss_scale()))
        hashes.append(_hash(unwrap_model(model), optimizer))
    return Record(
        losses=tuple(result.loss for result in results),
        grad_norms=tuple(result.grad_norm for result in results),
        zeros=tuple(result.num_zeros for result in results),
        scales=tuple(scales),
        hashes=tuple(hashes),
        validation_loss=evaluate(model, batches(1000), count),
    )


def _optimizer(kind: Kind, model: Any) -> MegatronOptimizer:
    fields = {**ADAMW, "optimizer": kind.optimizer, "log_num_zeros_in_grad": True}
    if kind.precision == "bf16":
        fields |= {"bf16": True}
    if kind.precision == "fp16":  # the scale falls, grows and falls again
        fields |= {"fp16": True, "initial_loss_scale": 2.0**21, "loss_scale_window": 3, "hysteresis": 1}
    return get_megatron_optimizer(OptimizerConfig(**fields), [model])


def _hash(model: torch.nn.Module, optimizer: MegatronOptimizer) -> str:
    weights = {p.name: p.whole(p.main) for p in optimizer._params}
    return joint_hash(held_hashes(weights, Ranks()))


@functools.cache
def on_one_rank(kind: Kind, wrapper: str = "ddp") -> Record:
    """Trains the run that all others have to repeat: replicas, as few as there can be."""
    return on_ranks(wrapper, kind, 1)


def on_ranks(wrapper: str, kind: Kind, ranks: int) -> Record:
    """Trains on so many data-parallel ranks, which all have to report the same."""
    records = run_distributed(train, ranks * kind.context_parallel, wrapper, kind)
    assert all(record == records[0] for record in records[1:])
    found: Record = records[0]
    return found
