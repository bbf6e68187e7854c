"""Models that are hard to cut into units: each equals replication on two ranks, or is refused with what to do."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from core.base.errors import WrapError
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from tests.unit._rounding import assert_same, assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import (
    Adapted,
    Block,
    CountedTraffic,
    Toy,
    batches,
    build,
    gradients,
    loss_of,
    reduced,
    toy,
)


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool = True) -> None:
    if exact:
        assert_same(found, expected)
    else:  # three micro-batches of two ranks, and what is called up to three times, are 18 parts
        assert_same_sums(found, expected, additions=17)


class Choosing(Toy):
    """Every block runs, but the gate of the second decides on each rank which of its layers is used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].other = nn.Linear(7, 7)
        self.spare = Block()
        self.blocks[1].forward = self._choose
        self.chooses_other = False

    def _choose(self, x: torch.Tensor) -> torch.Tensor:
        block = self.blocks[1]
        return x + (block.other(x) if self.chooses_other else block.down(torch.tanh(block.up(x))) * block.gain)


@on_ranks(2)
def test_parameters_without_gradients_on_some_ranks_get_zeros() -> None:
    found = []
    for kind in ("fsdp2", "ddp"):
        torch.manual_seed(2)
        model = build(kind, Choosing())
        for step in range(2):
            model.module.chooses_other = step == 0 and dist.get_rank() == 1
            found.append(reduced(model))
            assert not any(g.any() for name, g in found[-1].items() if "spare" in name)
    for sharded, replicated in zip(found[:2], found[2:], strict=True):
        assert_near(sharded, replicated)
    assert found[0]["blocks.1.other.weight"].any() and not found[1]["blocks.1.other.weight"].any()


class Shared(Toy):
    """One block is used in three places, and one of its layers in another block."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.blocks[0]
        self.third = Block()
        self.third.up = self.blocks[1].up

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, self.again, self.third]:
            x = block(x)
        return self.head(x)


class Listed(Toy):
    """Blocks in nested containers, and a sequential, which is a unit itself."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.ModuleDict({"a": nn.ModuleList([Block(), Block()]), "b": Block()})
        self.tail = nn.Sequential(nn.Linear(7, 7), nn.Tanh())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in [*self.blocks, *self.kept["a"], self.kept["b"]]:
            x = block(x)
        return self.head(self.tail(x))


MODELS = {
    "shared": (Shared, (Block, nn.Embedding)),
    "containers": (Listed, (nn.ModuleList, nn.ModuleDict, nn.Sequential)),
}


def _seeded(name: str) -> nn.Module:
    torch.manual_seed(2)
    return MODELS[name][0]()


@on_ranks(2)
def test_shared_modules_and_containers_equal_replication() -> None:
    for name, units in (
        ("shared", [["blocks.0"], ["blocks.1", "third"]]),
        ("containers", [["blocks.0"], ["blocks.1"], ["kept.a.0"], ["kept.a.1"], ["kept.b"], ["tail"]]),
    ):
        sharded = build("fsdp2", _seeded(name), unit_classes=MODELS[name][1])
        assert_near(reduced(sharded), reduced(build("ddp", _seeded(name))), exact=False)
        names = {module: path for path, module in sharded.module.named_modules()}
        assert [[names[module] for module in unit.modules] for unit in sharded.engine.units[:-1]] == units


@on_ranks(2)
def test_of_modules_that_are_one_unit_some_may_rest() -> None:
    """Trains a unit of two modules that share a layer, one of which does not run in the first step."""
    found = []
    for kind in ("fsdp2", "ddp"):
        model = build(kind, _seeded("shared"), unit_classes=(Block, nn.Embedding))
        for step in range(2):
            model.zero_grad_buffer()
            third, again = model.module.third, model.module.again
            if step == 0:
                model.module.third = again
            for tokens in batches(dist.get_rank()):
                loss_of(model, tokens).backward()
            model.module.third = third
            if step == 0:
                model.zero_grad_buffer()
        for tokens in batches(dist.get_rank(), 1):
            loss_of(model, tokens).backward()
        finalize_model_grads([model])
        found.append(gradients(model))
    assert_near(*found, exact=False)


def _frozen() -> nn.Module:
    """Freezes the first block wholly, the second in part."""
    model = toy(tied=False)
    model.blocks[0].requires_grad_(False)
    model.blocks[1].up.requires_grad_(False)
    return model


@on_ranks(2)
def test_frozen_parameters_have_no_gradients_nor_reductions() -> None:
    model = build("fsdp2", _frozen(), collectives="torch")  # reductions that have a name
    with CountedTraffic() as traffic:
        loss_of(model, batches(dist.get_rank())[0]).backward()
        gathered_gradients = [
            name
            for name, parameter in model.module.named_parameters()
            if not parameter.requires_grad and parameter.grad is not None
        ]
        model.finish_grad_sync()
    # One reduction each of embedding, second block and head; the first block and the root reduce nothing.
    assert traffic.reductions == 3
    assert not gathered_gradients
    trainable = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    assert set(gradients(model)) == trainable
    assert not any("up" in name for name in trainable)
    replicated = build("ddp", _frozen())
    loss_of(replicated, batches(dist.get_rank())[0]).backward()
    replicated.finish_grad_sync()
    assert_near(gradients(model), gradients(replicated))


class Wide(nn.Module):
    """Its frozen weight is 64 times as large as its adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Adapted(nn.Linear(256, 256, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@on_ranks(2)
def test_adapters_alone_have_gradient_memory() -> None:
    # Nothing is gathered in backward, so that everything it allocates is for gradients.
    model = build("fsdp2", nn.Sequential(Wide(), Wide()), unit_classes=(Wide,), reshard_after_forward=False)
    model(torch.ones(1, 256)).sum().backward()  # what is made once and kept
    model.zero_grad_buffer()
    loss = model(torch.ones(1, 256)).sum()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss.backward()
        model.finish_grad_sync()
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert 0 < max(sizes) < 256 * 256 * 4 / 4, max(sizes)  # a quarter of a frozen weight
    held = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)
    assert held == 2 * 2 * 256 * 2 * 4 // 2  # two adapters of two layers, half of each on a rank


class LowBase(Adapted):
    """The frozen weight in bf16, the adapters in fp32: two dtypes in one unit, only one with gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x.bfloat16()).float() + self.up(self.down(x))


def _low_base() -> nn.Module:
    model = toy(tied=False).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LowBase(block.up.bfloat16()), LowBase(block.down.bfloat16())
    return model


@on_ranks(2)
def test_adapters_in_fp32_on_a_frozen_base_in_bf16_are_one_unit() -> None:
    found = [reduced(build(kind, _low_base())) for kind in ("fsdp2", "ddp")]
    assert len(found[0]) == 2 * 2 * 2 and all(g.dtype == torch.float32 for g in found[0].values())
    assert_near(*found)


class Methods(nn.Module):
    """An encoder and a decoder that are also called by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Coder(), Coder()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))

    def reconstruct(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder.twice(self.encoder.twice(x))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(self.first(x)))

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.second(self.first(x))))


@on_ranks(2)
def test_methods_other_than_forward_gather_their_parameters() -> None:
    x = torch.randn(4, 3) + dist.get_rank()
    found = []
    methods = {"forward_methods": ("twice", "reconstruct")}
    for kind, fields in (("fsdp2", methods), ("zero3", methods), ("ddp", {})):
        torch.manual_seed(4)
        model = build(kind, Methods(), unit_classes=(Coder,), **fields)
        with torch.no_grad():
            only = model.module.encoder.twice(x)  # before the model around it has ever run
            before = model.module.reconstruct(x)
        config = OptimizerConfig(optimizer="sgd", lr=0.1, clip_grad=0.0, sgd_momentum=0.0)
        optimizer = get_megatron_optimizer(config, [model])
        for _ in range(2):
            model.zero_grad_buffer()
            (model.module.reconstruct(x).square().mean() + model(x).mean()).backward()
            finalize_model_grads([model])
            optimizer.step()
        with torch.no_grad():
            after = model.module.reconstruct(x)
        assert not torch.equal(before, after)
        assert kind != "fsdp2" or all(isinstance(p, DTensor) for p in model.parameters())  # nothing stays gathered
        found.append(({"before": before, "only": only, "after": after}, gradients(model)))
        if kind == "fsdp2":
            for _ in range(3):
                model.module.reconstruct(x)  # a graph each time, and no backward
            assert len(model.engine.parameters.order._order) <= 2 * 3 * 2  # units, of the calls since the last step
            model.zero_grad_buffer()
            assert not model.engine.parameters.order._order and not model.engine.parameters.order._trace
    *sharded, replicated = found
    for results in sharded:
        for one, other in zip(results, replicated, strict=True):
            assert_near(one, other, exact=False)


@on_ranks(1)
def test_a_method_that_no_module_has_is_refused() -> None:
    with pytest.raises(WrapError, match=r"forward_methods names 'thrice'.*\(Coder, Methods\)"):
        build("fsdp2", Methods(), unit_classes=(Coder,), forward_methods=("twice", "thrice"))
