"""Fabric with this library's strategies does what one process does."""

from __future__ import annotations

import lightning
import pytest
import torch
import torch.distributed as dist
from torch import nn

from core.adapters.lightning import ShardstackFabricStrategy
from core.base.errors import CheckpointError, ConfigError, OptimizerError
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks
from tests.unit.adapters._adapters import Net, batch
from tests.unit.adapters.lightning._module import (
    CLIP,
    MICRO_BATCHES,
    SHARDINGS,
    STEPS,
    ranks_of_lightning,
    serial,
    whole,
)


def fabric_of(sharding: str) -> lightning.Fabric:
    strategy = ShardstackFabricStrategy(sharding)
    return lightning.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)


def _loop(fabric, model, optimizer, steps) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        for micro in range(MICRO_BATCHES):
            with fabric.no_backward_sync(model, enabled=micro < MICRO_BATCHES - 1):
                loss = model(batch(step, micro, dist.get_rank()))
                losses.append(loss.item())
                fabric.backward(loss / MICRO_BATCHES)
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


@pytest.mark.parametrize("sharding", quick(SHARDINGS, lambda sharding: sharding.startswith(("optim_grads", "fsdp2"))))
@on_ranks(2)
def test_a_loop_is_that_of_one_process_and_continues_bitwise(sharding, tmp_path) -> None:
    expected = serial(2)
    with ranks_of_lightning():
        fabric = fabric_of(sharding)
        fabric.launch()
        net = Net()
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.5, momentum=0.9))
        losses, norms = _loop(fabric, model, optimizer, range(STEPS))
        assert losses == expected[0][dist.get_rank()] and norms == expected[1]
        weights = whole(net)
        assert all(torch.equal(weights[name.removeprefix("net.")], value) for name, value in expected[2].items())

        fabric.save(f"{tmp_path}/a", {"model": model, "optimizer": optimizer, "step": STEPS, "best": (1.5, None)})
        more = _loop(fabric, model, optimizer, range(STEPS, STEPS + 2))
        again = Net()
        again.head.weight.data.zero_()
        model, optimizer = fabric.setup(again, torch.optim.SGD(again.parameters(), 0.1, momentum=0.9))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert fabric.load(f"{tmp_path}/a", state) == {"best": (1.5, None)}
        assert state["step"] == STEPS
        assert _loop(fabric, model, optimizer, range(STEPS, STEPS + 2)) == more
        ended, expected_end = whole(again), whole(net)
        assert all(torch.equal(ended[name], value) for name, value in expected_end.items())


@on_ranks(2)
def test_unsupported_uses_are_refused(tmp_path) -> None:
    with ranks_of_lightning():
        fabric = fabric_of("optim")
        fabric.launch()
        net = Net()
        stale = torch.optim.SGD(Net().parameters(), 0.1)
        with pytest.raises(OptimizerError, match="holds parameters that the wrapped model has not"):
            fabric.setup(net, stale)
        with pytest.raises(OptimizerError, match="it was built for another one"):
            fabric.setup_optimizers(stale)
        with pytest.raises(OptimizerError, match="Adafactor cannot update a part of a parameter"):
            fabric.setup(net, torch.optim.Adafactor(net.parameters()))
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), 0.1))
        with pytest.raises(OptimizerError, match="a second optimizer"):
            fabric.setup_optimizers(torch.optim.SGD(net.parameters(), 0.1))
        with pytest.raises(OptimizerError, match="gradients are zeroed where they were to be measured"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        fabric.backward(model(batch(0, 0, dist.get_rank())))
        with pytest.raises(ConfigError, match="norm_type is inf"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type="inf")
        fabric.clip_gradients(model, optimizer, clip_val=1e-4)
        optimizer.step()
        with pytest.raises(CheckpointError, match=r"values\.fn is a builtin_function_or_method"):
            fabric.save(f"{tmp_path}/a", {"model": model, "fn": len})
        with pytest.raises(CheckpointError, match="2 models"):
            fabric.save(f"{tmp_path}/a", {"model": model, "other": Net()})
        with pytest.raises(ConfigError, match="precision is '16-true'"):
            lightning.Fabric(accelerator="cpu", devices=2, strategy="shardstack", precision="16-true")


@on_ranks(2)
def test_a_schedule_is_saved_and_continued(tmp_path) -> None:
    with ranks_of_lightning():
        fabric = fabric_of("optim")
        fabric.launch()
        schedules = []
        for lr in (0.5, 0.1):
            net = Net()
            model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr))
            schedules.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5))
            if lr == 0.5:
                _loop(fabric, model, optimizer, range(2))
                schedules[0].step()
                saved = {"model": model, "optimizer": optimizer, "schedule": schedules[0]}
                fabric.save(f"{tmp_path}/a", saved)
        state = {"model": model, "optimizer": optimizer, "schedule": schedules[1]}
        assert fabric.load(f"{tmp_path}/a", state) == {} and state["schedule"] is schedules[1]
        assert schedules[1].state_dict() == schedules[0].state_dict() and schedules[1].last_epoch == 1
        assert optimizer.param_groups[0]["lr"] == 0.25
        net = Net()
        with torch.no_grad():
            net.head.weight.zero_()
        weight, bias = net.head.weight, [p for p in net.parameters() if p is not net.head.weight]
        groups = [{"params": [weight], "lr": 0.5}, {"params": bias, "lr": 0.1}]
        model, optimizer = fabric.setup(net, torch.optim.SGD(groups))
        fabric.save(f"{tmp_path}/two", {"model": model, "optimizer": optimizer})
        fabric.load(f"{tmp_path}/a", {"model": model, "optimizer": optimizer})
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25], "what their one group had"
        net = Net()
        with torch.no_grad():
            net.head.weight.fill_(1.0)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.5))
        with pytest.raises(CheckpointError, match=r"parameter \S+ was saved in groups with different settings"):
            fabric.load(f"{tmp_path}/two", {"model": model, "optimizer": optimizer})
        assert (whole(net)["head.weight"] == 1.0).all(), "refused before the model is filled"
        with pytest.raises(CheckpointError, match="SGD was not set up"):
            fabric.save(f"{tmp_path}/b", {"model": model, "optimizer": torch.optim.SGD(net.parameters(), 0.1)})


def _two_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(8)
    return nn.Linear(6, 6), nn.Linear(6, 6)


def _inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _two_in_one_process() -> list[torch.Tensor]:
    first, second = _two_layers()
    updates = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (first, second)]
    for step in range(3):
        for updated, update in zip((first, second), updates, strict=True):
            totals: list[torch.Tensor] = []
            for rank in range(2):
                x = _inputs(step, rank)
                loss = second(first(x)) if updated is first else second(first(x).detach()) - 1
                own = torch.autograd.grad(loss.square().mean(), list(updated.parameters()))
                totals = [a + b for a, b in zip(totals, own, strict=True)] if totals else list(own)
            for p, total in zip(updated.parameters(), totals, strict=True):
                p.grad = total / 2
            update.step()
    return [p.detach() for layer in (first, second) for p in layer.parameters()]


@pytest.mark.parametrize("sharding", quick(SHARDINGS, lambda sharding: sharding in ("optim_grads_params", "fsdp2")))
@on_ranks(2)
def test_two_models_keep_their_gradients_apart(sharding: str) -> None:
    """The first's loss leaves gradients in the second, which ``zero_grad`` has to drop."""
    with ranks_of_lightning():
        fabric = fabric_of(sharding)
        fabric.launch()
        plain = _two_layers()
        (first, one), (second, two) = (
            fabric.setup(layer, torch.optim.SGD(layer.parameters(), 0.1)) for layer in plain
        )
        for step in range(3):
            x = _inputs(step, dist.get_rank())
            one.zero_grad()
            fabric.backward(second(first(x)).square().mean())
            one.step()
            two.zero_grad()
            loss = (second(first(x).detach()) - 1).square().mean()
            two.zero_grad()  # between forward and backward, as some loops have it
            fabric.backward(loss)
            two.step()
        found = [value for model in (first, second) for value in whole(model._forward_module).values()]
    for value, expected in zip(found, _two_in_one_process(), strict=True):
        assert torch.equal(value, expected)


@on_ranks(2)
def test_a_model_on_meta_is_drawn_after_it_is_sharded() -> None:
    with ranks_of_lightning():
        weights = []
        for sharding in ("no_shard", "optim_grads_params", "fsdp2"):
            fabric = fabric_of(sharding)
            fabric.launch()
            torch.manual_seed(5)
            with fabric.init_module(empty_init=True):
                net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
            assert next(net.parameters()).is_meta
            weights.append(whole(fabric.setup_module(net)._forward_module))
    for other in weights[1:]:
        assert all(torch.equal(other[name], value) for name, value in weights[0].items())
