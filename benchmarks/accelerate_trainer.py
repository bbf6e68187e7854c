"""Compares transformers' Trainer under its own DDP and FSDP2 with `use_shardstack`: errors and collectives of a step.

    python benchmarks/accelerate_trainer.py [--steps 8] [--layers 4] [--hidden 64]

Each row trains one small Llama on ragged data on two gloo ranks, in windows of 3 micro-batches and a shorter last one,
with SGD and clipping, and compares every loss, norm and weight with the same Trainer in one process. Bytes are what a
rank sends for all collectives of a step, in a ring; reductions are those of gradients.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _history import Parser, record
from _measure import CollectivePayload, machine, run_on_ranks
from torch import Tensor

from tests.unit.adapters.accelerate._trainers import fresh_accelerate, pad
from tests.unit.distributed._toys import recorded_collectives

ROWS = ("ddp", "fsdp2 of accelerate", "no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
VOCAB = 199


@dataclass
class Run:
    """What one training has computed on a rank, and sent."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Any]
    reductions: float
    kib: float


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sequences of 8 to 60 tokens; in some the first have no labels."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for index in range(count):
        tokens = torch.randint(2, VOCAB, (8 + (17 * index) % 53,), generator=generator)
        labels = tokens.clone()
        labels[: (5 * index) % (len(tokens) - 2)] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def model_of(layers: int, hidden: int) -> Any:
    """Returns a small Llama with random weights, tied."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def run_row(row: str | None, options: argparse.Namespace) -> Run:
    """Trains one row on this rank."""
    import transformers

    from core.adapters.accelerate import ShardstackPlugin, use_shardstack
    from core.adapters.bridge.checkpoints import whole_state_dict
    from core.dist_checkpointing.gathering import TensorStream

    world = dist.get_world_size()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=1,
            num_train_epochs=1, per_device_train_batch_size=2, gradient_accumulation_steps=6 // world, optim="sgd",
            learning_rate=0.05, max_grad_norm=0.3,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model_of(options.layers, options.hidden), args=args, data_collator=pad,
            train_dataset=samples(12 * options.steps - 4),
        )  # fmt: skip
        trainer.remove_callback(transformers.PrinterCallback)
        is_ours = row is not None and row in ROWS[2:]
        if is_ours:
            use_shardstack(trainer, ShardstackPlugin(row))
        elif row == "fsdp2 of accelerate":
            use_fsdp2_on_cpu(trainer)
        with CollectivePayload() as payload, recorded_collectives("the gradients of") as begun:
            trainer.train()
    if is_ours:
        weights = {
            name: tensor.numpy() for name, tensor in whole_state_dict(trainer._trained.wrapper, keep=True).items()
        }
        reductions = len(begun)
    else:
        params = {name: param.detach() for name, param in trainer.model.named_parameters()}
        weights = {name: tensor.clone().numpy() for name, tensor in TensorStream(params)}
        # FSDP2 reduces units, DDP buckets; neither scatters or sums anything else over ranks.
        of_units = sum(payload.calls[name] for name in ("reduce_scatter_tensor_", "_reduce_scatter_base_"))
        reductions = of_units or payload.calls["allreduce_"]
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return Run(
        [entry["loss"] for entry in logs], [float(entry["grad_norm"]) for entry in logs], weights,
        reductions / options.steps, payload.total() / 1024 / options.steps,
    )  # fmt: skip


def use_fsdp2_on_cpu(trainer: Any) -> None:
    """Lets accelerate run FSDP2 on ranks without a GPU, where it drops its plugin in silence."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = trainer.accelerator.state
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT"
    )
    trainer.is_fsdp_enabled = True


def run_rows(rows: list[str | None], options: argparse.Namespace) -> list[Run]:
    """Trains all rows on this rank."""
    found = []
    for row in rows:
        with fresh_accelerate():
            found.append(run_row(row, options))
    return found


def main() -> None:
    parser = Parser(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    (expected,) = run_on_ranks(run_rows, 1, [None], options)[0]
    found = run_on_ranks(run_rows, 2, list(ROWS), options)[0]
    print(machine())
    print("| Trainer with | loss | norm | weights | reductions a step | KiB sent a step |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row, run in zip(ROWS, found, strict=True):
        loss = max(abs(a - b) / abs(b) for a, b in zip(run.losses, expected.losses, strict=True))
        norm = max(abs(a - b) / abs(b) for a, b in zip(run.norms, expected.norms, strict=True))
        weight = max(float(abs(run.weights[name] - w).max()) for name, w in expected.weights.items())
        name = f"`{row}`" if row in ROWS[2:] else f"stock: {row}"
        record(f"{row}: bytes / {ROWS[0]}", run.kib / found[0].kib)
        errors = f"{loss:.1e} | {norm:.1e} | {weight:.1e}"
        print(f"| {name} | {errors} | {run.reductions:g} | {run.kib:.0f} |")


if __name__ == "__main__":
    main()
