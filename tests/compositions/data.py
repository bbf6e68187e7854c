"""The micro-batches of a composition: the same whole sequences on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.transformer import own_chunks
from tests.compositions.composition import Composition

SEQUENCE = 16
"""Tokens; half as many divide into two chunks of two context-parallel ranks, cut once more by two tensor-parallel."""

VOCABULARY = 61


@dataclass(frozen=True)
class MicroBatch:
    """Tensors `[b, s]` of whole sequences."""

    number: int
    """Among the micro-batches of all replicas in this step."""
    tokens: Tensor
    labels: Tensor
    starts: Tensor | None
    """Where each token's document begins, for packed documents."""

    @property
    def tokens_with_loss(self) -> int:
        """Labels that count."""
        return int((self.labels != -100).sum())

    def own(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """This rank's chunks: tokens, labels, and arguments of the forward."""
        packed = {} if self.starts is None else {"document_starts": own_chunks(self.starts)}
        return own_chunks(self.tokens), own_chunks(self.labels), packed


def micro_batch(composition: Composition, step: int, number: int) -> MicroBatch:
    """The micro-batch of this number of all replicas: each token follows from the one before."""
    is_ragged = composition.lengths == "ragged"
    rows = 1 + (step + number) % 3 if is_ragged else 2
    length = SEQUENCE // 2 if is_ragged and (step + number) % 2 else SEQUENCE
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = [torch.randint(0, VOCABULARY, (rows,), generator=generator)]
    for _ in range(length):
        tokens.append((5 * tokens[-1] + 1 + number) % VOCABULARY)
    whole = torch.stack(tokens, dim=-1)  # [b, s + 1]
    labels = whole[:, 1:].clone()
    if is_ragged:
        ends = torch.randint(1, length, (rows, 1), generator=generator)
        labels[torch.arange(length) >= ends] = -100
    starts = None
    if composition.documents == "packed":
        positions = torch.arange(length)
        starts = torch.stack([positions - positions % (3 + 2 * row) for row in range(rows)])
    return MicroBatch(number, whole[:, :-1].contiguous(), labels.contiguous(), starts)
