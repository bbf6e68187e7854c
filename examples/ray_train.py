"""Trains a small model on workers of Ray Train, fully sharded: python examples/ray_train.py --workers 2.

The train function is a script for `torchrun`, unchanged: Ray has joined the process group before it calls it. After a
failure Ray calls it again (FailureConfig), and training goes on from the last checkpoint.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import shardstack.base.device
import shardstack.rendezvous.default_group
from shardstack import dist_checkpointing as checkpoints
from shardstack.distributed import FullyShardedDataParallelConfig, finalize_model_grads, wrap_model
from shardstack.optimizer import OptimizerConfig, get_megatron_optimizer


def train(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    shardstack.rendezvous.default_group.init_process_group()  # a no-op here; under torchrun or srun it joins the group
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(shardstack.base.device.current_device())
    model = wrap_model(model, FullyShardedDataParallelConfig(), sub_modules_to_wrap=[nn.TransformerEncoderLayer])
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model])
    folder, first = Path(settings["folder"]), 0
    if folder.exists() and checkpoints.latest_checkpoint(folder):
        first, _ = checkpoints.load_training(folder, model, optimizer)
    for step in range(first, settings["steps"]):
        samples = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        batch = torch.randn(4, 8, 32, generator=samples).to(shardstack.base.device.current_device())
        model.zero_grad_buffer()
        (loss := (model(batch) - batch.roll(1, 1)).square().mean()).backward()
        finalize_model_grads([model])
        _, norm, _ = optimizer.step()
        checkpoints.save_training(folder, model, optimizer, step=step + 1)
        ray.train.report({"step": step + 1, "loss": loss.item(), "grad_norm": norm})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"), help="one that all workers share")
    given = parser.parse_args()
    settings = {"folder": str(given.folder.resolve()), "steps": given.steps}
    scaling = ScalingConfig(num_workers=given.workers, use_gpu=torch.cuda.is_available())
    run = RunConfig(storage_path=settings["folder"], failure_config=FailureConfig(max_failures=2))
    TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()
