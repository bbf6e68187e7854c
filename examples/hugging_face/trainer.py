"""Trains a small Llama with transformers' Trainer, sharded as ZeRO-3 by one line: `use_shardstack`.

    torchrun --nproc-per-node 2 examples/hugging_face/trainer.py [--strategy optim_grads_params] [--out runs/trainer]

One process, `python examples/hugging_face/trainer.py`, computes the same. Needs `pip install '.[hf]'`.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from shardstack.adapters.accelerate import ShardstackPlugin, use_shardstack

TEXT = "the quick brown fox jumps over the lazy dog. "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="optim_grads_params")
    parser.add_argument("--out", default="runs/trainer")
    options = parser.parse_args()
    tokens = torch.tensor([list((TEXT * 2).encode())[start : start + 32] for start in range(48)])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    args = TrainingArguments(
        options.out, num_train_epochs=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=5e-3, logging_steps=6, save_strategy="epoch", save_total_limit=1, report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
    )
    use_shardstack(trainer, ShardstackPlugin(options.strategy))
    trainer.train()
    trainer.save_model(options.out)
    prompt = tokens[:1, :8].to(args.device)
    text = bytes(trainer.model.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()).decode()
    if trainer.is_world_process_zero():
        print(repr(text))


if __name__ == "__main__":
    main()
