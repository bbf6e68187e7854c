"""Trains a small model with Lightning, sharded: python examples/lightning_trainer.py --sharding optim --ranks 2.

The only line that is not Lightning's own is the strategy; `--sharding ddp` trains with Lightning's DDP instead.
"""

import argparse
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from shardstack.adapters.lightning import ShardstackStrategy

VOCABULARY, WIDTH = 64, 32


class NextToken(L.LightningModule):
    """Predicts each token from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])  # [b, s, h]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sharding", default="fsdp2")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    samples = (torch.arange(96)[:, None] + torch.arange(16)) * 7 % VOCABULARY  # [sample, s]
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=given.ranks,
        strategy="ddp" if given.sharding == "ddp" else ShardstackStrategy(given.sharding),
        max_epochs=2,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("runs/lightning")],
    )
    trainer.fit(NextToken(), DataLoader(samples, batch_size=4, shuffle=True))
    loss = trainer.callback_metrics["train_loss"]  # of this rank's samples
    print(f"rank {trainer.global_rank}: loss {loss:.3f} after {trainer.global_step} steps")
