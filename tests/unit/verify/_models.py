"""Models of a user's module: functions without arguments that return a model and its loss."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import nn

_calls = itertools.count()


class Net(nn.Module):
    """A list of blocks, a frozen one in it, dropout, and a weight that two places share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.last = nn.Linear(9, 7)
        self.last.weight = self.layers[2][2].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.1, self.training)
        return self.last(nn.functional.pad(x, (0, 2)))


def loss(model: nn.Module, index: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
    return (model(x) - x[:, :1].sin()).square().mean()


def build() -> tuple[nn.Module, object]:
    return Net(), loss


class Tokens(nn.Module):
    """What a causal language model of Hugging Face's looks like from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=11)
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embedding(input_ids))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def build_in_bf16() -> tuple[nn.Module, object]:
    model = Net().to(torch.bfloat16)
    return model, lambda wrapped, index: wrapped(torch.randn(4, 6).bfloat16()).float().square().mean()


def build_with_a_hook() -> tuple[nn.Module, object]:
    """Builds a model with a hook on a parameter that changes its gradient, which torch's FSDP2 does not call."""
    model = Net()
    model.layers[0][0].bias.register_hook(lambda gradient: 2 * gradient)
    return model, loss


def build_with_statistics() -> tuple[nn.Module, object]:
    """Builds a model with batch normalisation, whose running statistics are those of what one rank has seen."""
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 7)), loss


# ---- what cannot be verified

NUMBER = 3


def build_nothing() -> None:
    return None


def build_without_parameters() -> tuple[nn.Module, object]:
    return nn.Sequential(nn.ReLU()), loss


def build_frozen() -> tuple[nn.Module, object]:
    return Net().requires_grad_(False), loss


def build_on_meta() -> tuple[nn.Module, object]:
    with torch.device("meta"):
        return Net(), loss


def build_without_loss() -> nn.Module:
    return Net()


def build_that_raises() -> nn.Module:
    raise KeyError("width")


def build_with_new_values_each_time() -> tuple[nn.Module, object]:
    model = Net()
    with torch.no_grad():
        model.layers[2][2].bias += next(_calls)
    return model, loss


def build_another_each_time() -> tuple[nn.Module, object]:
    model = Net()
    model.register_buffer(f"scale{next(_calls)}", torch.ones(1))
    return model, loss


def build_with_many_losses() -> tuple[nn.Module, object]:
    return Net(), lambda model, index: model(torch.ones(4, 6)).mean(0)


def build_with_a_loss_of_nothing() -> tuple[nn.Module, object]:
    return Net(), lambda model, index: torch.zeros(())
