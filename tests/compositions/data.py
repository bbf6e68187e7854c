"""The micro-batches of a composition: the same whole sequences on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from core.training.data import open_batches
from core.transformer import own_chunks
from tests.compositions.composition import Composition

SEQUENCE = 16
"""Tokens; half as many divide into two chunks of two context-parallel ranks, cut once more by two tensor-parallel."""

VOCABULARY = 61

STEPS = 3
CUT = 2
"""Steps before what continues elsewhere is saved."""

ROWS = 2
"""Sequences of a micro-batch, where all are equally long."""


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
        return int((self.labels != -100).sum())

    def own(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Returns this rank's chunks: tokens, labels, and arguments of the forward."""
        packed = {} if self.starts is None else {"document_starts": own_chunks(self.starts)}
        return own_chunks(self.tokens), own_chunks(self.labels), packed

    def fields(self) -> dict[str, Tensor]:
        """Returns whole sequences, as `train_step` takes them."""
        positions = torch.arange(self.tokens.shape[1]).expand_as(self.tokens)
        packed = {} if self.starts is None else {"document_starts": self.starts}
        mask = (self.labels != -100).float()
        return {"tokens": self.tokens, "labels": self.labels, "loss_mask": mask, "position_ids": positions, **packed}


def micro_batch(composition: Composition, step: int, number: int) -> MicroBatch:
    """Makes the micro-batch of this number of all replicas: each token follows from the one before."""
    is_ragged = composition.lengths == "ragged"
    rows = 1 + (step + number) % 3 if is_ragged else ROWS
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


class _Samples(Dataset[dict[str, Tensor]]):
    """The rows of all micro-batches, in the order of a run."""

    def __init__(self, composition: Composition) -> None:
        self._composition = composition
        self.of_step = composition.shape.dp * composition.number * ROWS

    def __len__(self) -> int:
        return STEPS * self.of_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, place = divmod(index, self.of_step)
        number, row = divmod(place, ROWS)
        return {name: tensor[row] for name, tensor in micro_batch(self._composition, step, number).fields().items()}


def loaded_batches(composition: Composition, first: int) -> Iterator[Mapping[str, Tensor]]:
    """Yields this rank's micro-batches from the step `first` on, out of the loader of `core.training`."""
    samples = _Samples(composition)
    sizes = {"micro_batch_size": ROWS, "global_batch_size": samples.of_step, "num_workers": 0}
    config: Any = SimpleNamespace(data=SimpleNamespace(**sizes), run=SimpleNamespace(seed=1), batch_grows=False)
    dataset: Any = samples
    return open_batches(dataset, config, first * samples.of_step)
