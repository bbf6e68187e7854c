"""Scenarios of models whose gradients arrive in unusual ways, or that not every wrapper can take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.distributed._toys import Adapted, Toy, toy
from tests.unit.distributed.outside_the_loop.scenario import BUFFERED, KINDS, Run, batch, for_kinds, megatron, scenario


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


class Called(Toy):
    """Every block runs twice, the first one through another module too, so that its weights are used three times."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


class Recomputed(Toy):
    """Blocks run again during backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Shallow(Toy):
    """Never uses its second block."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.embedding(tokens)))


class Skipping(Toy):
    """Uses its second block in some batches alone."""

    def __init__(self, *used: Tensor) -> None:
        super().__init__(tied=False)
        self.used = used

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embedding(tokens))
        if any(torch.equal(tokens, used) for used in self.used):
            x = self.blocks[1](x)
        return self.head(x)


def seeded(model_class: type[Toy]) -> nn.Module:
    torch.manual_seed(1)
    return model_class()


def skipping(*used: tuple[int, int]) -> nn.Module:
    """Returns a model that uses its second block in these batches, each given by rank and index."""
    torch.manual_seed(1)
    return Skipping(*(batch(rank, index) for rank, index in used))


def adapted() -> nn.Module:
    model = toy().requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def mixed() -> nn.Module:
    model = toy(tied=False)
    model.blocks[1].double()
    forward = model.blocks[1].forward
    model.blocks[1].forward = lambda x: forward(x.double()).float()
    return model


def trained_in_one_parameter() -> nn.Module:
    model = toy().requires_grad_(False)
    model.blocks[0].gain.requires_grad_()
    return model


def sgd(run: Run) -> Any:
    return megatron(run, optimizer="sgd", lr=0.1)


def compare_gradients_and_weights(run: Run) -> None:
    """Compares gradients of batches 0 to 2, and of 1 to 3; and weights after steps, which round off what is small.

    Both gradients are at the first weights: a bound for sums in another order holds for equal terms alone.
    """
    for step in range(2):
        run.compute(step, micro_batches=3)
        run.compare_gradients(f"in step {step}")
    run.train(2, micro_batches=3)


# A unit of FSDP2 that runs several times is reduced after each of its backwards: sums in another order. Three
# micro-batches of two ranks, each with up to three calls, are 18 parts.
@scenario(make=lambda: seeded(Called), optimizer=sgd, rtol_of={"fsdp2": 1e-5}, additions_of={"fsdp2": 17})
def modules_are_called_several_times(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=lambda: seeded(Recomputed), optimizer=sgd)
def blocks_are_recomputed(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=lambda: seeded(Shallow), optimizer=sgd)
def parameters_are_never_used(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=lambda: skipping((0, 0), (1, 0), (0, 3), (1, 3)), optimizer=sgd)
def a_block_is_used_in_one_micro_batch_alone(run: Run) -> None:
    compare_gradients_and_weights(run)


# Under ZeRO-3 and FSDP2 a rank that calls a unit alone waits for the other, which must gather it too.
@scenario(make=lambda: skipping((0, 0), (1, 3)), optimizer=sgd, only=tuple(k for k in BUFFERED if k != "zero3"))
def a_block_is_used_on_one_rank_alone(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=adapted, optimizer=sgd)
def all_is_frozen_but_for_adapters(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=trained_in_one_parameter, optimizer=sgd)
def nothing_is_trained_but_one_parameter(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=lambda: toy().double(), optimizer=sgd)
def all_is_in_double_precision(run: Run) -> None:
    compare_gradients_and_weights(run)


@scenario(make=mixed, optimizer=sgd)
def precisions_are_mixed(run: Run) -> None:
    compare_gradients_and_weights(run)
