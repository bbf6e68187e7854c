"""A recomputation reads the buffers that its forward read, leaves those of now, and returns what its forward noted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from core.base import recomputation
from core.base.recomputation import noted, recompute
from core.distributed import TorchFullyShardedDataParallelConfig
from core.distributed.model.unit_transforms import transform_units
from core.distributed.plan.units import find_units, plan_transforms
from core.models.gpt import GPTModel
from core.transformer import TransformerConfig

WIDTH = 6


class Norm(nn.BatchNorm1d):
    """Its kernel writes running statistics without a trace."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Statistics(nn.Module):
    """Batch norm without a count of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, training=True)


class Average(nn.Module):
    """Reads the average that it keeps, written in place or assigned."""

    def __init__(self, *shape: int, assigns: bool = False, from_nothing: bool = False) -> None:
        super().__init__()
        self.register_buffer("average", None if from_nothing else torch.zeros(shape))
        self.register_buffer("constant", torch.full((2, 2), 3.0))
        self.assigns = assigns

    def forward(self, x: Tensor) -> Tensor:
        seen = x.detach().mean(0)
        if self.average is None:
            self.average = seen
        elif self.assigns:
            self.average = 0.9 * self.average + 0.1 * seen
        else:
            self.average.lerp_(seen.mean() if self.average.ndim == 0 else seen.expand_as(self.average), 0.1)
        return torch.sin(x + self.average.clone() * self.constant[0, 0])


class ByData(nn.Module):
    """Writes its codebook by `Tensor.data`, as layers of vector quantization do: no version counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.codes.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.sin(x + self.codes[0].clone())


class Shared(nn.Module):
    """Two modules have one buffer: the first one writes it, the second reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = Average(1, WIDTH), Average(1, WIDTH)
        self.reader.average = self.writer.average

    def forward(self, x: Tensor) -> Tensor:
        return self.writer(x) * self.reader.average.clone()


class Unit(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear, self.inner, self.again = nn.Linear(WIDTH, WIDTH), make(), make()
        self.again.load_state_dict(self.inner.state_dict(), strict=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.inner(self.linear(x))))


UNITS = {
    "batch norm": Norm,
    "statistics": Statistics,
    "in place": partial(Average, WIDTH),
    "in place, a matrix": partial(Average, 1, WIDTH),
    "in place, a number": Average,
    "assigned": partial(Average, WIDTH, assigns=True),
    "by data": ByData,
    "shared": Shared,
    "assigned at first": partial(Average, assigns=True, from_nothing=True),
}


def _trained(
    make: Callable[[], nn.Module], prepare: Callable[[nn.Module], Callable[[Tensor], Tensor]], keeps_graph: bool
) -> list[Tensor]:
    """Trains by steps of two forwards before one backward, and another through a kept graph."""
    torch.manual_seed(3)
    model = Unit(make)
    call, generator = prepare(model), torch.Generator().manual_seed(1)
    for _ in range(3):
        first, second = (call(torch.randn(4, WIDTH, generator=generator)).square().sum() for _ in range(2))
        (first + 2 * second).backward(retain_graph=keeps_graph)
        if keeps_graph:
            second.backward()
    gradients = [p.grad for p in model.parameters()]
    return [*gradients, *(buffer.clone() for buffer in model.buffers())]


def _by_unit(kind: str, model: nn.Module) -> Callable[[Tensor], Tensor]:
    parent = nn.ModuleList([model, nn.Linear(1, 1)])
    settings = TorchFullyShardedDataParallelConfig(activation_checkpointing=kind)
    transform_units(plan_transforms(find_units(parent, (Unit,)), settings))
    return model


PLACES = {
    "module": lambda model: partial(recompute, model),
    "method": lambda model: partial(recompute, model.forward),
    "partial": lambda model: partial(recompute, partial(model)),
    "named": lambda model: partial(recompute, lambda x: model(x), modules=[model]),
    "inside another": lambda model: partial(recompute, lambda x: recompute(model, x), modules=[model]),
    "unit, full": partial(_by_unit, "full"),
    "unit, selective": partial(_by_unit, "selective"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("unit", UNITS)
def test_recomputed_modules_equal_plain_ones(unit: str, place: str) -> None:
    keeps_graph = "selective" not in place  # which torch refuses there
    expected = _trained(UNITS[unit], lambda model: model, keeps_graph)
    found = _trained(UNITS[unit], PLACES[place], keeps_graph)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


class _AveragedAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.register_buffer("average", torch.zeros(()))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        output = self.attention(*args, **kwargs)
        self.average.lerp_(output.detach().mean(), 0.1)
        return output * (1 + self.average.clone())


@pytest.mark.parametrize(
    "fields",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    ],
    ids=str,
)
def test_layers_of_a_gpt_have_them_too(fields: dict[str, object]) -> None:
    found, tokens = [], torch.arange(12).view(2, 6)
    for recomputed in ({}, fields):
        torch.manual_seed(3)
        config = TransformerConfig(
            num_layers=3, hidden_size=8, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0, **recomputed
        )
        model = GPTModel(config, vocab_size=16, max_sequence_length=8)
        for layer in model.decoder.layers:
            layer.self_attention.core_attention = _AveragedAttention(layer.self_attention.core_attention)
        losses = [model(tokens, labels=tokens.roll(shift)).mean() for shift in (0, 1)]
        sum(losses).backward()
        found.append([*(p.grad for p in model.parameters()), *model.buffers()])
    assert all(map(torch.equal, *found)) and found[0][-1] != 0


def test_a_recomputation_returns_what_its_own_forward_noted() -> None:
    calls: list[int] = []

    def double(x: Tensor) -> Tensor:
        factor = noted(lambda: calls.append(len(calls)) or len(calls))
        return torch.sin(x * factor) * (noted(lambda: -1) or 0)

    def nested(x: Tensor) -> Tensor:
        return recompute(double, recompute(double, x))

    x = torch.tensor([0.3, 0.4], requires_grad=True)
    first, second = recompute(nested, x), recompute(double, x)
    (first + second).sum().backward()
    found, x.grad = x.grad, None
    expected = -torch.sin(-torch.sin(x) * 2) - torch.sin(x * 3)
    expected.sum().backward()
    assert calls == [0, 1, 2] and torch.equal(found, x.grad)


def test_torchs_checkpoint_knows_no_notes() -> None:
    seen = []

    def note(x: Tensor) -> Tensor:
        seen.append(noted(lambda: 1))
        return torch.sin(x).cos()

    torch_checkpoint(note, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [1, None]


def test_a_forward_that_raised_records_no_more() -> None:
    def fail(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recompute(fail, torch.ones(2, requires_grad=True))
    assert not recomputation._recording


class _Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x / self.temperature)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_buffer_set_between_forwards_is_that_of_each(kind: str) -> None:
    gradients = []
    for prepare in (lambda model: model, partial(_by_unit, kind)):
        torch.manual_seed(3)
        model = Unit(_Tempered)
        call, total = prepare(model), torch.zeros(())
        for step in range(2):
            for tempered in (model.inner, model.again):
                tempered.temperature = torch.tensor(1.0 + step)  # assigned by the loop, as a schedule does
            total = total + call(torch.ones(4, WIDTH)).square().sum()
        total.backward()
        gradients.append([p.grad for p in model.parameters()])
        assert model.inner.temperature.item() == 2.0
    assert all(map(torch.equal, *gradients))
