"""Trains a model that knows nothing of this library, with wrappers and optimizer alone. Run by `test_plain_training`.

    python -m tests.unit.distributed._plain_training RANK STORE

Two ranks, which meet in the file STORE, train under every wrapper. Rank 0 prints a line of JSON: the modules of `core`
that are loaded, and for each wrapper the names of units and sums of logits after the steps.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    finalize_model_grads,
    wrap_model,
)
from core.optimizer import OptimizerConfig, get_megatron_optimizer

WIDTH, VOCABULARY, STEPS = 16, 32, 3
CONFIGS = {
    "replicas": DistributedDataParallelConfig(data_parallel_sharding_strategy="no_shard"),
    "zero1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    "zero2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
    "zero3": FullyShardedDataParallelConfig(activation_checkpointing="selective"),
    "fsdp2": TorchFullyShardedDataParallelConfig(activation_checkpointing="selective"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(config: DistributedDataParallelConfig, rank: int) -> tuple[list[str], list[float]]:
    """Returns the names of units, and the sum of logits of each token after the steps."""
    torch.manual_seed(3)
    model = wrap_model(Model(), None, config, process_group=dist.group.WORLD)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=1.0), [model])
    draws = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        model.zero_grad_buffer()
        tokens = torch.randint(VOCABULARY, (2, 8), generator=draws)
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        finalize_model_grads([model])
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(torch.arange(VOCABULARY).view(1, -1))
    units = [name for unit in model.plan.units[:-1] for name in unit.names]
    return units, logits.sum(-1).flatten().tolist()


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {name: train(config, rank) for name, config in CONFIGS.items()}
    loaded = {name.removeprefix("shardstack.") for name in sys.modules if name.startswith("shardstack.")}
    if rank == 0:
        print(json.dumps([sorted(loaded), results]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
