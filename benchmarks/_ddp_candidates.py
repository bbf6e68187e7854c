"""The ways of training that `ddp_engine.py` compares: the wrapper on flat buffers and torch's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _gpt import backward, build_model, micro_batches
from torch import nn

BUCKET_ELEMENTS = 4_000_000  # of ZeRO-2, so that a model of this size has buckets to release
REPLICATED_LIMIT, SHARDED_LIMIT = 1.00, 0.95

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
        return [tensor for held in model.engine.held().values() for tensor in held] + _state(optimizer.optimizer)

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
