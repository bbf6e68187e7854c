"""Trains under every wrapper, next to another project's `core`, and prints what each has got."""

import hashlib

import torch
import torch.distributed as dist

import core
import shardstack
import shardstack.rendezvous.default_group
from shardstack.distributed import (
    DistributedDataParallelConfig,
    FullyShardedDataParallelConfig,
    TorchFullyShardedDataParallelConfig,
    wrap_model,
)
from shardstack.optimizer import shard_optimizer

CONFIGS = {
    "DDP": DistributedDataParallelConfig(),
    "ZeRO-1": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim"),
    "ZeRO-2": DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
    "ZeRO-3": FullyShardedDataParallelConfig(),
    "FSDP2": TorchFullyShardedDataParallelConfig(),
}

if core.OWNER != "another project" or not shardstack.__file__.endswith("/site-packages/shardstack/__init__.py"):
    raise SystemExit(f"core is {core}, shardstack is {shardstack}")
shardstack.rendezvous.default_group.init_process_group()
for name, config in CONFIGS.items():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    model = wrap_model(net, config)
    optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model)
    samples = torch.randn(64, 8)[dist.get_rank() :: dist.get_world_size()]
    for _ in range(5):
        optimizer.zero_grad()
        (model(samples) - samples).square().mean().backward()
        norm = optimizer.step()[1]
    with torch.no_grad():
        outputs = hashlib.sha256(model(samples).numpy().tobytes()).hexdigest()
    if dist.get_rank() == 0:
        print(f"{name}: norm {norm!r}, outputs {outputs[:16]}", flush=True)
dist.destroy_process_group()
