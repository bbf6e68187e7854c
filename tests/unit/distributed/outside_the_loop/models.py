"""Scenarios of models that not every wrapper can take."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.unit.distributed._toys import toy
from tests.unit.distributed.outside_the_loop.scenario import KINDS, Run, for_kinds, scenario


def tied_by_data() -> nn.Module:
    model = toy(tied=False)
    model.head.weight.data = model.embedding.weight.data
    return model


@scenario(make=tied_by_data, raises=for_kinds(KINDS, "two parameters in the same memory, tied by .data"))
def weights_are_tied_by_data(run: Run) -> None:
    run.train()


class WithEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, 8)
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens)) + self.empty.sum()


@scenario(make=WithEmpty, raises={"fsdp2": "without elements"})
def a_parameter_without_elements(run: Run) -> None:
    run.train(2)


def sparse() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(11, 11, sparse=True))


@scenario(make=sparse, raises={"fsdp2": "has sparse gradients"})
def sparse_gradients(run: Run) -> None:
    run.train(2)


def transposed() -> nn.Module:
    model = toy(tied=False)
    model.head.weight = nn.Parameter(model.head.weight.detach().t().contiguous().t())
    return model


@scenario(make=transposed, raises={"fsdp2": "is not contiguous"}, rtol=1e-6)  # buffers lay it out in rows
def a_parameter_that_is_not_contiguous(run: Run) -> None:
    run.train(2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(11, 11, dtype=torch.complex64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.phase[tokens].real


@scenario(make=Complex, optimizer=None, raises=for_kinds(KINDS, "phase is complex"))
def complex_parameters(run: Run) -> None:
    pass
