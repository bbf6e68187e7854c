"""A training goes on from what `save_training` wrote as if it had not ended; half of a state is refused."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler

from core.base.errors import CheckpointError, OptimizerError
from core.base.module_protocol import unwrap_model
from core.dist_checkpointing import (
    AsyncSaver,
    Retention,
    RunState,
    load,
    load_metadata,
    load_training,
    load_weights,
    model_state_dict,
    save,
    save_training,
)
from core.distributed import finalize_model_grads
from core.optimizer import OptimizerConfig, get_megatron_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.distributed._toys import build, full

KINDS = ("ddp", "zero1", "zero2_overlap", "zero3", "fsdp2")
SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], milestones=[2]
    ),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


class Training:
    """A model with a norm and a bias, an average of its weights, and a schedule of torch's."""

    def __init__(
        self, kind: str, scheduler: str = "step", *, dtype: torch.dtype = torch.float32, lr: float = 0.05
    ) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)
        self.model = build(kind, model, unit_classes=(nn.Linear,))
        self.optimizer = get_megatron_optimizer(OptimizerConfig(lr=lr, weight_decay=0.1, clip_grad=1.0), [self.model])
        self.average = AveragedWeights(self.optimizer, decay=0.5)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer.optimizer)
        self.parts = (self.model, self.optimizer, self.scheduler)

    def train(self, steps: range) -> None:
        dtype = next(self.model.parameters()).dtype
        for step in steps:
            self.model.zero_grad_buffer()
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
            part = batch.chunk(dist.get_world_size())[dist.get_rank()]
            self.model(part).float().square().mean().backward()
            finalize_model_grads([self.model])
            self.optimizer.step()
            is_plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([1.0] if is_plateau else []))

    def whole(self) -> dict[str, Tensor]:
        held = RunState(*self.parts).tensors()
        return {name: _whole(tensor) for name, tensor in held.items()}


def _whole(tensor: Tensor) -> Tensor:
    elements = getattr(tensor, "elements", None)
    return (full(tensor) if elements is None else elements).clone()


@pytest.mark.parametrize(
    ("kind", "scheduler"),
    [*((kind, "step") for kind in KINDS), *(("zero1", name) for name in SCHEDULERS if name != "step")],
)
@on_ranks(2)
def test_a_run_goes_on_to_the_bit(kind: str, scheduler: str, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if scheduler == "cosine" else torch.float32
    folder = str(tmp_path / "now")
    one = Training(kind, scheduler, dtype=dtype)
    one.train(range(3))
    save_training(folder, *one.parts, step=3)
    one.train(range(3, 6))
    two = Training(kind, scheduler, dtype=dtype, lr=0.5)  # whose rate is replaced by the checkpoint's
    assert load_training(folder, *two.parts) == (3, None)
    two.train(range(3, 6))
    assert two.optimizer.state_scalars() == one.optimizer.state_scalars()
    assert two.scheduler.state_dict() == one.scheduler.state_dict()
    expected = one.whole()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in two.whole().items())
    assert two.average.num_averaged == 6
    dist.barrier()


def _begins(kind: str, folder: str) -> dict[str, Tensor]:
    one = Training(kind)
    one.train(range(2))
    save_training(folder, *one.parts)
    one.train(range(2, 4))
    return {name: full(t).double() for name, t in one.model.state_dict().items()} if kind in ("ddp", "fsdp2") else {}


def _continues(kind: str, folder: str) -> dict[str, Tensor]:
    two = Training(kind)
    load_training(folder, *two.parts)
    two.train(range(2, 4))
    with two.model.whole_parameters():
        return {name: full(tensor).double() for name, tensor in two.model.state_dict().items()}


@pytest.mark.parametrize(("first", "second"), [("ddp", "fsdp2"), ("fsdp2", "zero1"), ("ddp", "zero3")])
def test_another_wrapper_and_size_goes_on(first: str, second: str, tmp_path: Path) -> None:
    expected = run_distributed(_begins, 1, first, str(tmp_path / "now"))[0]
    actual = run_distributed(_continues, 2, second, str(tmp_path / "now"))[0]
    # Means of 8 samples in another order: a rounding of gradients, which AdamW divides by their own size.
    assert all((actual[name] - value).abs().max() < 1e-5 for name, value in expected.items())


@on_ranks(2)
def test_tensors_without_scalars_are_refused_at_the_step(tmp_path: Path) -> None:
    folder = tmp_path / "now"
    one = Training("zero1")
    one.train(range(2))
    tensors = model_state_dict(unwrap_model(one.model)) | one.optimizer.state_tensors()
    save(tensors, folder, metadata={"optimizer": one.optimizer.state_scalars()})
    for kind in KINDS:
        two = Training(kind)
        load(model_state_dict(unwrap_model(two.model)) | two.optimizer.state_tensors(), folder)
        with pytest.raises(
            OptimizerError, match=r"step counts, learning rates, decay .* were not; call load_state_sc"
        ):
            two.train(range(2, 3))
        two.optimizer.load_state_scalars(load_metadata(folder)["optimizer"])
        two.train(range(2, 3))
    three = Training("ddp")
    load(model_state_dict(unwrap_model(three.model)), folder, strict=False)  # the model alone is no state of a run
    three.train(range(1))
    dist.barrier()


@on_ranks(2)
def test_half_of_a_state_is_refused_before_anything_changes(tmp_path: Path) -> None:
    folder = tmp_path / "now"
    one = Training("zero1")
    one.train(range(2))
    save_training(folder, *one.parts)
    without = (one.model, one.optimizer)
    save_training(tmp_path / "without", *without)
    save(model_state_dict(unwrap_model(one.model)), tmp_path / "model")
    one.train(range(2, 3))
    before = one.whole()
    for parts, name, says in (
        (without, "now", "has 1 of the scheduler's states, and this run needs none"),
        (one.parts, "without", "has none of the scheduler's states, and this run needs 1"),
        (one.parts, "model", "was not written by save_training"),
    ):
        with pytest.raises(CheckpointError, match=says):
            load_training(tmp_path / name, *parts)
    no_average = Training("zero1")
    no_average.optimizer.average = None
    with pytest.raises(CheckpointError, match=r"not asked for, but in the checkpoint: optimizer\.average"):
        load_training(folder, *no_average.parts)
    other = Training("zero1")
    other.optimizer.param_groups[:] = [
        other.optimizer.param_groups[0]
        | {"params": [tensor for group in other.optimizer.param_groups for tensor in group["params"]]}
    ]
    with pytest.raises(CheckpointError, match=r"parameter \S+ was saved in groups with different settings"):
        load_training(folder, *other.parts)
    after = one.whole()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    dist.barrier()


@on_ranks(2)
def test_another_scheduler_is_refused_before_anything_changes(tmp_path: Path) -> None:
    one = Training("zero1")
    one.train(range(2))
    save_training(tmp_path / "now", *one.parts)
    for name in ("cosine", "sequence", "plateau"):
        other = Training("zero1", name)
        before, kept = other.whole(), dict(vars(other.scheduler))
        with pytest.raises(CheckpointError, match=r"has the state of a StepLR, and the scheduler here is a \w+"):
            load_training(tmp_path / "now", *other.parts)
        assert all(torch.equal(tensor, before[key]) for key, tensor in other.whole().items())
        assert vars(other.scheduler).keys() == kept.keys() and other.optimizer.param_groups[0]["lr"] != 0.0125
    dist.barrier()


@on_ranks(2)
def test_a_state_is_saved_in_the_background(tmp_path: Path) -> None:
    one = Training("zero3")
    one.train(range(2))
    saver = AsyncSaver()
    save_training(tmp_path / "now", *one.parts, saver=saver)
    saver.wait()
    two = Training("fsdp2")
    load_training(tmp_path / "now", *two.parts)
    assert two.optimizer.param_groups[0]["lr"] == one.optimizer.param_groups[0]["lr"] == 0.0125
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_schedulers_of_torch_take_the_optimizer(kind: str) -> None:
    by_rule, by_optimizer = Training(kind), Training(kind)
    by_optimizer.scheduler = lr_scheduler.StepLR(by_optimizer.optimizer, 1, gamma=0.5)
    for one in (by_rule, by_optimizer):
        one.train(range(3))
    assert by_optimizer.optimizer.param_groups[0]["lr"] == 0.05 / 8 == by_rule.optimizer.param_groups[0]["lr"]
    expected = by_rule.whole()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in by_optimizer.whole().items())
    assert by_optimizer.optimizer.state is by_optimizer.optimizer.optimizer.state
    with pytest.raises(OptimizerError, match="updates every parameter already; name them in the config_overrides"):
        by_rule.optimizer.add_param_group({"params": []})


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_grad_scaler_of_torch_is_told_of_ours(kind: str) -> None:
    one = Training(kind)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(one.model(torch.ones(2, 4)).sum()).backward()
    finalize_model_grads([one.model])
    with pytest.raises(
        OptimizerError, match=r"^torch\.amp\.GradScaler cannot unscale .* OptimizerConfig\(fp16=True\)"
    ):
        scaler.step(one.optimizer)


@on_ranks(2)
def test_a_sharded_state_dict_is_loaded_without_code(tmp_path: Path) -> None:
    one, two = Training("zero3"), Training("zero3")
    one.train(range(1))
    file = tmp_path / f"rank{dist.get_rank()}.pt"
    torch.save(one.model.state_dict(), file)
    two.model.load_state_dict(torch.load(file, weights_only=True))
    expected = one.model.state_dict()
    assert all(torch.equal(t.elements, expected[name].elements) for name, t in two.model.state_dict().items())


def test_an_optimizer_is_copied_pickled_and_stepped_as_torchs() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1), [model])
    for step in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step(None)
        optimizer.zero_grad()
        if step == 0:
            copied, again = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    assert [other.state_scalars()["step"] for other in (copied, again)] == [1, 1]
    assert optimizer.state_scalars()["step"] == 2  # its class steps as before
    with pytest.raises(OptimizerError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=4)  # which reads the defaults
    schedule.step()
    assert optimizer.defaults["lr"] == 0.1 and "MegatronOptimizer" in repr(optimizer)


@on_ranks(2)
def test_parts_of_another_training_are_refused(tmp_path: Path) -> None:
    one, other = Training("zero1"), Training("zero1")
    plain = torch.optim.AdamW(one.model.parameters())
    for parts, says in (
        ((other.model, one.optimizer, one.scheduler), r"6 of the parameters .* are not the model's; give the model"),
        ((one.model, one.optimizer, other.scheduler), r"the StepLR sets the rates of another optimizer"),
        ((one.model, plain, None), r"AdamW is not an optimizer .* shardstack\.optimizer\.shard_optimizer\(AdamW\("),
        ((one.model, [one.optimizer], [None, None]), "there are 2 schedulers and 1 optimizers; give one for each"),
        ((one.model, [one.optimizer, one.optimizer], None), "two optimizers have a state .*; each parameter belongs"),
        (({"a.b": one.model}, {"a.b": one.optimizer}, None), r"a model has the name 'a\.b'"),
        (({"extra": one.model}, {}, None), "a model has the name 'extra'; give one without a dot"),
        (({"net": one.model}, one.optimizer, None), r"models are \['net'\] and optimizer has a Dist"),
        (({"net": one.model}, {"nut": one.optimizer}, None), r"models are \['net'\] and optimizer has \['nut'\]"),
    ):
        with pytest.raises(CheckpointError, match=says):
            save_training(tmp_path / "now", *parts)
    dist.barrier()
    assert not (tmp_path / "now").exists()


@on_ranks(2)
def test_several_models_are_one_checkpoint(tmp_path: Path) -> None:
    one, teacher = Training("zero2_overlap"), build("zero3", nn.Linear(4, 4), unit_classes=(nn.Linear,))
    one.train(range(2))
    models = {"student": one.model, "teacher": teacher}
    save_training(tmp_path, models, {"student": one.optimizer}, {"student": one.scheduler}, 2)
    two = Training("zero2_overlap")
    again = {"student": two.model, "teacher": build("ddp", nn.Linear(4, 4))}
    assert load_training(tmp_path, again, {"student": two.optimizer}, {"student": two.scheduler})[0] == 2
    with teacher.whole_parameters():
        assert torch.equal(teacher.module.weight, again["teacher"].module.weight)
    expected = one.whole()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in two.whole().items())
    alone = nn.Linear(4, 4)
    load_weights(tmp_path, alone, name="teacher")
    assert torch.equal(alone.weight, again["teacher"].module.weight)
    with pytest.raises(CheckpointError, match=r"has the models student., teacher., and one was given"):
        load_training(tmp_path, *two.parts)
    with pytest.raises(CheckpointError, match="is a checkpoint of another model"):
        load_weights(tmp_path, nn.Linear(4, 5), name="teacher")
    dist.barrier()


@on_ranks(2)
def test_what_a_loop_adds_comes_back(tmp_path: Path) -> None:
    one = Training("ddp")
    generator = torch.Generator().manual_seed(3)
    extra = {"epoch": 3, "loader": [generator.get_state(), (1, 2.5, None)], 7: {"ä", "b"}, "rate": float("inf")}
    save_training(tmp_path, *one.parts, step=np.int64(1), extra=extra)  # type: ignore[arg-type]
    _, found = load_training(tmp_path, *one.parts)
    assert found.keys() == extra.keys() and torch.equal(found["loader"][0], generator.get_state())
    assert (found["loader"][1], found[7], found["rate"]) == ((1, 2.5, None), {"ä", "b"}, float("inf"))
    for value in ({"rank": dist.get_rank()}, torch.tensor(dist.get_rank())):
        with pytest.raises(CheckpointError, match=r"extra differs on ranks 0 and 1, .*all_gather_object"):
            save_training(tmp_path, *one.parts, step=2, extra=value)
    with pytest.raises(CheckpointError, match=r"two tensors have the name extra\.a\.b, by keys with dots"):
        save_training(tmp_path, *one.parts, step=2, extra={"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    for step in (-1, 2.0, "3", None, dist.get_rank()):
        with pytest.raises(CheckpointError, match=r"step is .*; give the number of updates|differs on ranks 0 and 1"):
            save_training(tmp_path, *one.parts, step=step)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"extra\.net is a Linear, and a checkpoint holds numbers"):
        save_training(tmp_path, *one.parts, step=2, extra={"net": nn.Linear(1, 1)})
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000001"]
    dist.barrier()


def _save_streams(folder: str) -> list[float]:
    one = Training("zero1")
    torch.manual_seed(5 + dist.get_rank())
    save_training(folder, *one.parts)
    return torch.rand(2).tolist()


def _load_streams(folder: str) -> list[float]:
    one = Training("zero1")
    torch.manual_seed(50)
    context = nullcontext() if dist.get_world_size() == 2 or dist.get_rank() else pytest.warns(match="start anew")
    with context:
        load_training(folder, *one.parts)
    return torch.rand(2).tolist()


def test_random_streams_go_on_on_as_many_ranks(tmp_path: Path) -> None:
    saved = run_distributed(_save_streams, 2, str(tmp_path))
    assert run_distributed(_load_streams, 2, str(tmp_path)) == saved != [saved[0], saved[0]]
    torch.manual_seed(50)
    assert run_distributed(_load_streams, 1, str(tmp_path)) == [torch.rand(2).tolist()]


@on_ranks(2)
def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    one = Training("ddp")
    one.train(range(1))
    save_training(tmp_path, *one.parts, step=1)
    with torch.no_grad():
        next(one.model.parameters())[0, 0] = float("nan")
    save_training(tmp_path, *one.parts, step=2, keep=Retention(last=1))
    assert (tmp_path / "iter_0000001").exists()  # the last that a run can go on from
    with pytest.raises(CheckpointError, match=r"infinite or NaN; iter_0000001 in the same folder is whole"):
        load_training(tmp_path, *one.parts)
    assert load_training(tmp_path / "iter_0000001", *one.parts)[0] == 1
    with pytest.raises(CheckpointError, match="none: no such folder; give the folder of a run"):
        load_training(tmp_path / "none", *one.parts)
    dist.barrier()


@on_ranks(2)
def test_nothing_is_trained_on_from_damaged_weights(tmp_path: Path) -> None:
    one = Training("zero1")
    one.train(range(1))
    path = save_training(tmp_path, *one.parts)
    dist.barrier()
    if dist.get_rank() == 0:
        file = path / "rank_00000.bin"
        data = bytearray(file.read_bytes())
        data[5] ^= 255
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(CheckpointError, match="differ from the saved ones"):
        load_training(tmp_path, *one.parts)
    with pytest.raises(OptimizerError, match="tensors of the optimizer's state were loaded"):
        one.train(range(1, 2))
    dist.barrier()
