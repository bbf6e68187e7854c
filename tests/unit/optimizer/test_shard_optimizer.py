"""An optimizer of torch or of the user updates shards with the bits of one plain process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim import lr_scheduler

from core.base.errors import CheckpointError, ConfigError, OptimizerError, warn_once
from core.dist_checkpointing import load_training, save_training
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer, shard_optimizer
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole_weights
from tests.unit.distributed._toys import CountedTraffic
from tests.unit.optimizer._own import (
    CONFIGS,
    OPTIMIZERS,
    Lion,
    Net,
    Own,
    assert_weights,
    batch,
    decayed,
    halving,
    plain,
    train,
    wrapped,
)

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "multiplicative": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.9),
    "steps": halving,
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.1),
    "constant": lambda optimizer: lr_scheduler.ConstantLR(optimizer, total_iters=2),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=3),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 9, power=2.0),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2]
    ),
    "chain": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
    "cycle": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2, cycle_momentum=False),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=9),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "ranks"), quick(product(CONFIGS, (1, 2, 4)), lambda case: case[1] == 2 or case == ("zero3", 4))
)
@on_ranks("ranks")
def test_every_optimizer_equals_one_process(kind: str, ranks: int) -> None:
    for make in OPTIMIZERS.values():
        own = Own(kind, make)
        own.train(range(3))
        assert_weights(own.model, plain(make, 3, halving))


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_an_optimizer_from_before_wrapping_goes_on(kind: str) -> None:
    for name, make in OPTIMIZERS.items():
        model = Net()
        optimizer = make(decayed(model))
        train(model, range(2), optimizer)
        model.zero_grad(set_to_none=True)
        with torch.no_grad():  # wrapping takes the first rank's
            whole = wrapped(kind, model)
        own = shard_optimizer(optimizer, whole)
        train(whole, range(2, 4), own)
        assert_weights(whole, plain(make, 4, lambda _: None)), name


@on_ranks(2)
def test_an_optimizer_goes_on_from_a_checkpoint_of_torch() -> None:
    model = Net()
    before = OPTIMIZERS["AdamW"](decayed(model))
    train(model, range(2), before)
    whole = wrapped("zero2", model)
    after = OPTIMIZERS["AdamW"](decayed(whole))
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(whole, range(2, 4), shard_optimizer(after, whole))
    assert_weights(whole, plain(OPTIMIZERS["AdamW"], 4, lambda _: None))


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_low_precision_has_masters(kind: str) -> None:
    alone = Net().to(torch.bfloat16)
    train(alone, range(3), shard_optimizer(Lion(decayed(alone)), alone))
    model = wrapped(kind, Net().to(torch.bfloat16))
    own = shard_optimizer(Lion(decayed(model)), model)
    train(model, range(3), own)
    assert_weights(model, whole_weights(alone))
    assert all(p.main.dtype == torch.float32 for p in own.main_params)


def _save(kind: str, folder: str) -> None:
    for name, make in OPTIMIZERS.items():
        own = Own(kind, make)
        own.train(range(2))
        save_training(Path(folder, name), *own.parts, step=2)


def _resume(kind: str, folder: str) -> None:
    for name, make in OPTIMIZERS.items():
        own = Own(kind, make)
        own.train(range(7, 8))  # goes elsewhere in the meantime
        assert load_training(Path(folder, name), *own.parts)[0] == 2
        own.train(range(2, 4))
        assert_weights(own.model, plain(make, 4, halving))


SIZES = [(2, "zero3"), (4, "zero1"), (1, "ddp"), (2, "fsdp2"), (2, "zero2"), (4, "fsdp2")]
QUICK = {((2, "zero3"), (4, "zero1")), ((2, "fsdp2"), (2, "zero3")), ((2, "zero2"), (1, "ddp"))}


@pytest.mark.parametrize(("saved", "resumed"), quick(product(SIZES, SIZES), lambda pair: pair in QUICK))
def test_any_wrapper_and_size_goes_on_to_the_bit(saved: Any, resumed: Any, tmp_path: Path) -> None:
    run_distributed(_save, saved[0], saved[1], str(tmp_path))
    run_distributed(_resume, resumed[0], resumed[1], str(tmp_path))


@pytest.mark.parametrize("of_torchs", [False, pytest.param(True, marks=pytest.mark.long)])
@on_ranks(2)
def test_schedules_of_torch_bind_and_go_on(of_torchs: bool, tmp_path: Path) -> None:
    for name, schedule in SCHEDULES.items():

        def bound(optimizer: Any, schedule: Any = schedule) -> Any:
            return schedule(optimizer.optimizer if of_torchs and hasattr(optimizer, "optimizer") else optimizer)

        one = Own("zero2", OPTIMIZERS["AdamW"], bound)
        one.train(range(2))
        save_training(tmp_path / name, *one.parts)
        two = Own("zero3", OPTIMIZERS["AdamW"], bound)
        load_training(tmp_path / name, *two.parts)
        two.train(range(2, 4))
        assert_weights(two.model, plain(OPTIMIZERS["AdamW"], 4, schedule))
        rates = [group["betas"] for group in one.optimizer.param_groups]
        assert (rates == [(0.9, 0.999)] * 2) is (name != "one cycle"), "a schedule of momentum writes betas"


@on_ranks(2)
def test_hooks_run_as_torchs() -> None:
    calls: list[str] = []

    def hook(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    model = wrapped("zero1")
    torchs = optim.AdamW(model.parameters())
    torchs.register_step_post_hook(hook("torchs after"))
    own = shard_optimizer(torchs, model)
    own.register_step_pre_hook(hook("before"))
    own.register_step_post_hook(hook("after"))
    own.register_state_dict_pre_hook(hook("state"))
    own.register_load_state_dict_post_hook(hook("loaded"))
    train(model, range(1), own)
    own.load_state_dict(own.state_dict())
    assert calls == ["before", "torchs after", "after", "state", "loaded"]


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_two_optimizers_share_a_wrapper(kind: str) -> None:
    def build(model: nn.Module) -> list[optim.Optimizer]:
        matrices, vectors = (group["params"] for group in decayed(model))
        return [optim.RMSprop(matrices, lr=1e-2), optim.SGD(vectors, lr=0.1, momentum=0.9)]

    alone, model = Net(), wrapped(kind)
    train(alone, range(4), *build(alone))
    train(model, range(4), *(shard_optimizer(one, model) for one in build(model)))
    assert_weights(model, whole_weights(alone))


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_zeroing_what_another_optimizer_needs_raises(kind: str) -> None:
    model = wrapped(kind)
    first, second = (shard_optimizer(optim.SGD(group["params"], lr=0.1), model) for group in decayed(model))
    for own in (first, second):
        own.zero_grad()  # nothing has stepped
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    first.step()
    with pytest.raises(OptimizerError, match="zero_grad was called after this optimizer has stepped and another one"):
        first.zero_grad()
    second.step()
    first.zero_grad()
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    first.step()
    model.zero_grad_buffer()
    model(torch.arange(6).view(2, 3)).square().mean().backward()
    first.step()
    second.step()


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_a_group_is_added_later(kind: str) -> None:
    alone, model = Net(), wrapped(kind)
    matrices, vectors = decayed(alone)
    torchs = optim.NAdam([matrices], lr=1e-2)
    torchs.add_param_group(vectors)
    train(alone, range(3), torchs)
    matrices, vectors = decayed(model)
    own = shard_optimizer(optim.NAdam([matrices], lr=1e-2), model)
    with pytest.raises(OptimizerError, match=r"embedding\.weight is in another group of the optimizer"):
        own.add_param_group(decayed(model)[0])
    with pytest.raises(OptimizerError, match="NAdam was built for another model"):
        own.add_param_group({"params": Net().parameters()})
    with pytest.raises(OptimizerError, match="is in none of the groups"):
        train(model, range(1), own)
    assert len(own.param_groups) == 1
    own.add_param_group(vectors)
    train(model, range(3), own)
    assert_weights(model, whole_weights(alone))


@pytest.mark.parametrize("kind", CONFIGS)
@on_ranks(2)
def test_zeroing_between_forward_and_backward_is_torchs(kind: str) -> None:
    alone, model = Net(), wrapped(kind)
    torchs, inner = optim.AdamW(alone.parameters()), optim.AdamW(model.parameters())
    train(alone, range(4), torchs)
    own = shard_optimizer(inner, model)
    gathers = []
    for step in range(4):
        with CountedTraffic() as traffic:
            loss = model(batch(step))
            for optimizer in ((), (own,), (inner,), ())[step]:
                optimizer.zero_grad()
            loss.backward()
        gathers.append(traffic.gathers)
        finalize_model_grads([model])
        (inner if step == 1 else own).step()
        own.zero_grad()
    assert_weights(model, whole_weights(alone))
    if kind in ("zero3", "fsdp2"):
        assert gathers[1] == gathers[2] == gathers[3], "nothing is gathered again"


@on_ranks(2)
def test_frozen_parameters_stay() -> None:
    model = Net()
    model.norm.requires_grad_(False)
    model = wrapped("zero2", model)
    own = shard_optimizer(optim.AdamW(model.parameters(), weight_decay=0.5), model)
    before = whole_weights(model)
    train(model, range(2), own)
    after = whole_weights(model)
    assert {name for name in before if torch.equal(before[name], after[name])} == {"norm.weight", "norm.bias"}


@on_ranks(2)
def test_clipping_is_by_the_norm_of_its_parameters() -> None:
    alone, model = Net(), wrapped("zero3")
    torchs = optim.SGD(alone.parameters(), lr=0.1)
    alone(batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e-2)
    torchs.step()
    own = shard_optimizer(optim.SGD(model.parameters(), lr=0.1), model, clip_grad=1e-2)
    own.zero_grad()
    model(batch(0)).backward()
    finalize_model_grads([model])
    _, found, _ = own.step()
    assert found == pytest.approx(norm.item(), rel=1e-6)
    for name, weight in whole_weights(model).items():
        torch.testing.assert_close(weight, whole_weights(alone)[name])


@on_ranks(2)
def test_a_step_that_is_not_finite_changes_nothing() -> None:
    own = Own("zero2", OPTIMIZERS["Adagrad"])
    own.train(range(1))
    before, scalars = whole_weights(own.model), own.optimizer.state_scalars()
    own.optimizer.zero_grad()
    (own.model(batch(1)) * (float("inf") if dist.get_rank() else 1.0)).backward()
    finalize_model_grads([own.model])
    assert own.optimizer.step()[0] is False
    assert_weights(own.model, before)
    assert own.optimizer.state_scalars() == scalars


def _refused(*cases: tuple[Callable[[], Any], str]) -> None:
    for make, said in cases:
        with pytest.raises((OptimizerError, ConfigError), match=said) as caught:
            make()
        assert "\n" not in str(caught.value)


@on_ranks(2)
def test_misuse_is_said_in_one_line() -> None:
    model = wrapped("zero1")
    torchs = optim.AdamW(model.parameters())
    own = shard_optimizer(torchs, model)
    none: Any = None
    _refused(
        (lambda: shard_optimizer(torchs, model), "AdamW updates shards already"),
        (lambda: shard_optimizer(own, model), "DistributedOptimizer updates shards already"),
        (lambda: shard_optimizer(model.parameters(), model), "takes a torch optimizer and the model"),
        (lambda: shard_optimizer(optim.AdamW(Net().parameters()), model), "AdamW was built for another model: 11 of"),
        (lambda: shard_optimizer(optim.AdamW(model.parameters()), none), "takes a list of"),
        (lambda: own.step(lambda: 0.0), "takes no closure"),
    )
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(0))).backward()
    finalize_model_grads([model])
    _refused((lambda: scaler.step(own), r"GradScaler cannot unscale"))


@on_ranks(2)
def test_an_empty_group_is_said_and_changes_nothing() -> None:
    results = []
    for empty in ([], [{"params": [], "weight_decay": 0.3}]):
        model = wrapped("zero1")
        warn_once.cache_clear()
        with pytest.warns(UserWarning, match="group 2 of AdamW has no parameter") if empty else nullcontext():
            own = shard_optimizer(optim.AdamW([*decayed(model), *empty]), model)
        for _ in range(2):
            model(batch(dist.get_rank())).backward()
            own.step()
            own.zero_grad()
        own.load_state_dict(own.state_dict())
        results.append([tensor.clone() for tensor in whole_weights(model).values()])
    assert all(map(torch.equal, *results))


@on_ranks(2)
def test_fp16_has_a_loss_scale_and_one_optimizer() -> None:
    model = wrapped("zero2", Net().to(torch.float16))
    own = shard_optimizer(optim.AdamW(model.parameters()), model)
    own.zero_grad()
    own.scale_loss(model(batch(0))).backward()
    finalize_model_grads([model])
    assert own.get_loss_scale() > 1.0 and own.grad_scaler is not None
    own.step()
    model = wrapped("zero2", Net().to(torch.float16))
    matrices, vectors = decayed(model)
    shard_optimizer(optim.AdamW([matrices]), model)
    _refused(
        (
            lambda: shard_optimizer(optim.AdamW([vectors]), model),
            "model has another optimizer, and a loss has one scale",
        )
    )


@on_ranks(2)
def test_a_constant_loss_scale_has_one_optimizer() -> None:
    model = wrapped("zero1")
    matrices, vectors = decayed(model)
    shard_optimizer(optim.AdamW([matrices]), model, loss_scale=8.0)
    _refused(
        (
            lambda: shard_optimizer(optim.AdamW([vectors]), model, loss_scale=8.0),
            "model has another optimizer, and a loss has one scale",
        )
    )


@pytest.mark.parametrize("kind", ["none", "zero1", "fsdp2"])
@on_ranks(2)
def test_a_parameter_that_is_thawed_later_is_said(kind: str) -> None:
    model: Any = Net()
    model.norm.requires_grad_(False)
    model = model if kind == "none" else wrapped(kind, model)
    own = shard_optimizer(optim.AdamW(model.parameters()), model)
    train(model, range(1), own)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(True)
    with pytest.raises(OptimizerError, match=r"norm\.weight was .*made trainable after the"):
        own.step()


@on_ranks(2)
def test_methods_of_the_torch_optimizer_are_the_returned_ones() -> None:
    alone, model = Net(), wrapped("zero1")
    theirs = optim.AdamW(decayed(alone))
    train(alone, range(1), theirs)
    matrices, vectors = decayed(model)
    inner = optim.AdamW([matrices])
    own = shard_optimizer(inner, model, clip_grad=1e-3)
    with pytest.raises(CheckpointError, match="the optimizer state has no cut, scalars, tensors"):
        inner.load_state_dict(theirs.state_dict())
    inner.add_param_group(vectors)
    assert len(own.main_params) == len(list(model.parameters()))
    train(model, range(1), own)
    state = copy.deepcopy(inner.state_dict())
    assert state["tensors"].keys() == own.state_tensors().keys()
    train(model, range(1, 2), own)
    inner.load_state_dict(state)
    assert own.state_scalars()["step"] == 1


@on_ranks(2)
def test_a_checkpoint_of_another_class_is_refused(tmp_path: Path) -> None:
    one = Own("zero1", OPTIMIZERS["AdamW"])
    one.train(range(2))
    save_training(tmp_path / "now", *one.parts)
    for name in ("NAdam", "Adam", "SGD"):
        other = Own("zero2", OPTIMIZERS[name])
        before = whole_weights(other.model)
        with pytest.raises(CheckpointError, match=f"has the state of AdamW, and the optimizer here is {name}"):
            load_training(tmp_path / "now", *other.parts)
        assert_weights(other.model, before)
    dist.barrier()


@on_ranks(2)
def test_adamw_goes_on_under_our_own_adamw(tmp_path: Path) -> None:
    one = Own("zero3", functools.partial(optim.AdamW, lr=1e-2))
    one.train(range(2))
    save_training(tmp_path / "now", *one.parts)
    model = wrapped("zero1")
    ours = get_megatron_optimizer(OptimizerConfig(lr=1.0, clip_grad=0.0), [model])
    load_training(tmp_path / "now", model, ours, halving(ours))
    assert ours.state_scalars()["step"] == 2 and ours.param_groups[0]["lr"] == 5e-3
    assert {group["weight_decay"] for group in ours.param_groups} == {0.1, 0.0}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("adam", functools.partial(optim.AdamW, maximize=True)), ("sgd", functools.partial(optim.SGD, dampening=0.5))],
)
@on_ranks(1)
def test_settings_that_ours_lacks_are_not_dropped(ours: Any, theirs: Any, tmp_path: Path) -> None:
    momentum = {"momentum": 0.9} if ours == "sgd" else {}
    one = Own("ddp", functools.partial(theirs, lr=1e-2, **momentum))
    one.train(range(1))
    save_training(tmp_path, *one.parts)
    model = wrapped("ddp")
    other = get_megatron_optimizer(OptimizerConfig(optimizer=ours, lr=1.0, clip_grad=0.0), [model])
    with pytest.raises(
        CheckpointError, match=r"was saved with (maximize=True|dampening=0\.5), which the one here does"
    ):
        load_training(tmp_path, model, other, halving(other))
