"""Units of the flat engine: they take turns with slots, are whole where that is asked, and refuse lost writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.base.errors import UnitError
from core.base.parameters import kept_range
from core.distributed import finalize_model_grads
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import Stack, batches, build, loss_of, toy


# One rank without a cast has its parameters in place, without a slot.
@pytest.mark.parametrize(("world_size", "param_dtype"), [(1, None), (1, "bf16"), (2, None)])
@on_ranks("world_size")
def test_an_inner_context_leaves_parameters_whole(world_size: int, param_dtype: str | None):
    model = build("zero3", Stack(layers=2), unit_classes=(nn.Linear,), param_dtype=param_dtype)
    with model.whole_parameters():
        with model.whole_parameters(), torch.no_grad():
            for parameter in model.module.parameters():
                parameter.fill_(1.0)
        assert all(kept_range(parameter) is None for parameter in model.module.parameters())
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.add_(1.0)  # whole still, after an inner context has ended
    assert all(kept_range(parameter) is not None for parameter in model.module.parameters())
    for parameter in model.module.parameters():
        assert model.engine.parameters.shard(parameter).eq(2.0).all()
    with model.whole_parameters():
        assert all(parameter.eq(2.0).all() for parameter in model.module.parameters())


class Pair(nn.Module):
    """A unit inside a unit of the same size, so that both take turns with one slot."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.weight


class Pairs(nn.Module):
    _fsdp_modules = (nn.Linear,)

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([Pair(), Pair()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            x = pair(x)
        return x


@on_ranks(2)
def test_two_units_that_run_at_once_do_not_share_a_slot() -> None:
    for settings in ({}, {"reshard_overrides": ("pairs.0=False", "pairs.1=False")}):
        model = build("zero3", Pairs(), unit_classes=(Pair,), forward_prefetch=0, backward_prefetch=0, **settings)
        if settings:
            model(torch.ones(2, 4)).sum().backward()
            finalize_model_grads([model])
            continue
        with pytest.raises(UnitError) as error:
            model(torch.ones(2, 4)).sum().backward()
        assert str(error.value) == (
            "unit pairs.0.inner is needed while unit pairs.0 runs, and both are gathered into one memory; keep one of "
            "them apart, with reshard_overrides=('pairs.0=False',)"
        )


@on_ranks(2)
def test_what_would_be_lost_or_stale_is_refused() -> None:
    model = build("zero3", toy(tied=False))
    weight = model.module.blocks[0].up.weight
    assert weight.shape == (5, 7) and weight.dtype == torch.float32 and weight.grad is None  # these may be asked
    said = r"a parameter of unit blocks.0 .* was used outside of a forward, where each rank holds its shard"
    with pytest.raises(UnitError, match=said):
        weight.sum()
    loss_of(model, batches(0, 1)[0]).backward()
    with torch.no_grad():
        model.module.head.weight.mul_(2.0)
    with pytest.raises(UnitError, match=r"parameter head.weight was written while its unit was gathered"):
        model.finish_grad_sync()
