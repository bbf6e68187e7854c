"""Training steps on simulated streams, with what a program does between and next to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from core import parallel_state
from core.comm import streams
from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.distributed.model import offloaded_activations
from core.model_parallel_config import ModelParallelConfig
from core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

STRATEGIES = {"ddp": "no_shard", "zero1": "optim", "zero2": "optim_grads"}
WIDTH, STEPS = 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.relu(self.up(x)))
        return output


class Net(nn.Module):
    """Four equal units, and parameters of the root before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output


@dataclass(frozen=True)
class Case:
    """A wrapper with its settings, and what is done between steps."""

    wrapper: str
    settings: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    dtype: str = "fp32"
    """Of the parameters as they arrive: fp32, bf16 or fp16."""
    between: str = "evaluation"
    """evaluation, average (a user's side stream averages the weights), or nothing."""
    ranks: int = 2

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.settings.items()]
        dtype = [] if self.dtype == "fp32" else [self.dtype]
        between = [] if self.between == "evaluation" else [self.between]
        return " ".join([self.wrapper, *settings, *dtype, *between])


@contextmanager
def groups_of(case: Case) -> Iterator[None]:
    parallel_state.initialize_model_parallel(
        num_distributed_optimizer_instances=case.settings.get("num_distributed_optimizer_instances", 1)
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def wrapped(case: Case) -> tuple[Any, MegatronOptimizer]:
    low = case.dtype if case.dtype != "fp32" else None
    config = ModelParallelConfig(**({low: True} if low else {}))
    if case.wrapper in STRATEGIES:
        fields = {"overlap_grad_reduce": True, "bucket_size": 40, "overlap_param_gather": case.wrapper != "ddp"}
        fields["data_parallel_sharding_strategy"] = STRATEGIES[case.wrapper]  # type: ignore[assignment]
        ddp_config = DistributedDataParallelConfig(**(fields | case.settings))
    else:
        kinds = {"zero3": FullyShardedDataParallelConfig, "fsdp2": TorchFullyShardedDataParallelConfig}
        ddp_config = kinds[case.wrapper](**case.settings)
    model = Net().to(getattr(torch, "bfloat16" if low == "bf16" else "float16")) if low else Net()
    offloaded_activations.LEAST_BYTES = 1  # in this process, whose tensors are tiny
    wrapper = wrap_model(model, config, ddp_config, sub_modules_to_wrap=[Block])
    fields = {"bf16": True} if low == "bf16" else {"fp16": True, "initial_loss_scale": 128.0} if low else {}
    return wrapper, get_megatron_optimizer(OptimizerConfig(lr=0.01, clip_grad=1.0, **fields), [wrapper])


def inputs(case: Case, batch: int = 4) -> Tensor:
    """Returns a batch in the dtype of the parameters."""
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.randn(batch, WIDTH).to(dtypes[case.dtype])


def make_step(case: Case, model: Any, optimizer: MegatronOptimizer, side: Any = None) -> None:
    """Makes one step of several micro-batches, and updates once the stream `side` has read the weights."""
    model.zero_grad_buffer()
    model.expect_micro_batches(case.micro_batches)
    for index in range(case.micro_batches):
        with nullcontext() if index == case.micro_batches - 1 else model.no_sync():
            loss = model(inputs(case)).float().square().mean()
            optimizer.scale_loss(loss).backward()
    finalize_model_grads([model])
    if side is not None:
        streams.current_stream().wait_stream(side)
    optimizer.step()


def train(case: Case) -> None:
    """Makes `STEPS` steps, with what the case has between them."""
    with groups_of(case):
        model, optimizer = wrapped(case)
        side, average = streams.Stream(), list[Tensor]()
        for _ in range(STEPS):
            make_step(case, model, optimizer, side)
            if case.between == "evaluation":
                with torch.no_grad():
                    model(inputs(case))
            elif case.between == "average":
                side.wait_stream(streams.current_stream())
                with streams.stream(side), torch.no_grad():
                    kept = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                    whole = kept if case.wrapper == "zero3" else model.module.parameters()
                    values = [parameter.detach() for parameter in whole]
                    average = [(old + new) / 2 for old, new in zip(average or values, values, strict=True)]
        streams.current_stream().wait_stream(side)
        del average
