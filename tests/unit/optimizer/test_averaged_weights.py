"""Averages of sharded weights have the bits of torch's `AveragedModel` in one process, and travel in checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from core.base.errors import CheckpointError, ConfigError, OptimizerError, UnitError
from core.base.module_protocol import unwrap_model
from core.base.parameters import local_part
from core.dist_checkpointing import load, model_state_dict, save
from core.distributed import finalize_model_grads
from core.optimizer import MegatronOptimizer, get_megatron_optimizer
from core.optimizer.averaged_weights import AveragedWeights
from tests.unit._on_gpu import ON_GPU, run_on_one_rank
from tests.unit._quick import quick
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole_weights, wholes
from tests.unit.optimizer._model import Model, batch, optimizer_config
from tests.unit.optimizer._squares import CONFIGS, build

STEPS = 5
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
WRAPPERS = [wrapper for wrapper in CONFIGS if wrapper != "zero3 tensor"]


def _run(
    wrapper: str, decay: float | None, device: str = "cpu", **settings: Any
) -> tuple[Any, MegatronOptimizer, AveragedWeights]:
    torch.manual_seed(3)
    dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
    settings |= {"lr": 0.05, "weight_decay": 0.1}
    model, optimizer = build(lambda: Model().to(device, dtype), wrapper, 1, settings)
    return model, optimizer, AveragedWeights(optimizer, decay)


def _step(model: Any, optimizer: MegatronOptimizer, index: int, factor: float = 1.0) -> None:
    """Takes a step whose gradient is the same on every rank, so that its mean over them is exact."""
    parameter = next(model.parameters())
    loss = optimizer.scale_loss(model(batch(index).to(parameter.device, parameter.dtype)) * factor)
    loss.backward()
    if hasattr(model, "zero_grad_buffer"):
        finalize_model_grads([model])
    optimizer.start_step()  # the next one, or whoever reads the state, waits for it
    optimizer.zero_grad()


def _averages(optimizer: MegatronOptimizer) -> dict[str, Tensor]:
    return wholes({n: t for n, t in optimizer.state_tensors().items() if n.startswith("average.")})


def _trained(wrapper: str, decay: float | None) -> dict[str, Tensor]:
    model, optimizer, _ = _run(wrapper, decay)
    for index in range(STEPS):
        _step(model, optimizer, index)
    return _averages(optimizer)


def _torchs(model: torch.nn.Module, decay: float | None) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn() if decay is None else get_ema_multi_avg_fn(decay))


def _torch_averages(decay: float | None) -> dict[str, Tensor]:
    model, optimizer, _ = _run("serial", None)
    average = _torchs(model, decay)
    for index in range(STEPS):
        _step(model, optimizer, index)
        optimizer.finish_step()
        average.update_parameters(model)
    return {f"average.{name}": tensor.detach() for name, tensor in average.module.named_parameters()}


def _assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    differing = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not differing, f"{differing} differ"


@pytest.mark.parametrize(
    ("wrapper", "decay"),
    quick(product(WRAPPERS, (0.9, None)), lambda case: (WRAPPERS.index(case[0]) % 2 == 0) == (case[1] is None)),
)
def test_averages_have_the_bits_of_torchs(wrapper, decay):
    expected = _torch_averages(decay)
    for averages in run_distributed(_trained, 4 if "hybrid" in wrapper else 2, wrapper, decay):
        _assert_equal(averages, expected)


def _equals_torchs(device: str, decay: float | None) -> None:
    """Asserts that a model, and what it holds inside of `swapped`, is averaged as by torch on the same device."""
    model, optimizer, average = _run("serial", decay, device)
    expected = _torchs(model, decay)
    for index in range(STEPS):
        _step(model, optimizer, index)
        optimizer.finish_step()
        expected.update_parameters(model)
    averages = {name: tensor.detach() for name, tensor in expected.module.named_parameters()}
    weights = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    assert all(tensor.device.type == device for tensor in (*averages.values(), *weights.values()))
    _assert_equal(_averages(optimizer), {f"average.{name}": tensor for name, tensor in averages.items()})
    with average.swapped():
        _assert_equal(dict(model.named_parameters()), averages)
    _assert_equal(dict(model.named_parameters()), weights)


def _equals_formula(device: str, wrapper: str, decay: float | None) -> None:
    """Asserts that masters of bf16 are averaged as in double, up to the three roundings of each update."""
    model, optimizer, average = _run(wrapper, decay, device, bf16=True)
    expected = dict[str, Tensor]()
    for index in range(STEPS):
        _step(model, optimizer, index)
        optimizer.finish_step()
        weight = 1 / (index + 1) if decay is None or not index else 1 - decay
        for p in optimizer.main_params:
            assert p.main.dtype == torch.float32 and p.main.device.type == device
            main = local_part(p.main).cpu().double()
            expected[p.name] = torch.lerp(expected.get(p.name, main), main, weight)
    averages = average._averages.values()
    found = {p.name: local_part(t).cpu() for p, t in zip(optimizer.main_params, averages, strict=True)}
    assert_same_sums(found, {name: tensor.float() for name, tensor in expected.items()}, 3 * STEPS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decay", [0.9, None])
def test_one_device_has_the_bits_of_torchs(device, decay):
    run_on_one_rank(device, _equals_torchs, decay)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("wrapper", "decay"), [("ddp", 0.9), ("zero2", None), ("zero3", 0.9), ("fsdp2", None)])
def test_averages_of_masters_are_near_double(device, wrapper, decay):
    run_on_one_rank(device, _equals_formula, wrapper, decay)


def _swapped(wrapper: str, bf16: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
    model, optimizer, average = _run(wrapper, 0.5, bf16=bf16)
    for index in range(STEPS):
        if index == 3:
            with average.swapped(), torch.no_grad():
                shown = whole_weights(model)
                loss = model(batch(9).to(next(model.parameters()).dtype))
        _step(model, optimizer, index)
    return shown, _averages(optimizer), whole_weights(model), loss


def _never_swapped(bf16: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], Tensor]:
    model, optimizer, _ = _run("serial", 0.5, bf16=bf16)
    for index in range(STEPS):
        if index == 3:
            dtype = next(model.parameters()).dtype
            shown = {n.removeprefix("average."): average.to(dtype) for n, average in _averages(optimizer).items()}
            loss = torch.func.functional_call(model, shown, batch(9).to(dtype)).detach()
        _step(model, optimizer, index)
    return shown, _averages(optimizer), wholes(model_state_dict(model)), loss


@pytest.mark.parametrize(
    ("wrapper", "bf16"),
    quick(product(["ddp", "zero2", "zero3", "fsdp2"], [False, True]), lambda c: c[1] == (c[0] in ("zero2", "fsdp2"))),
)
def test_evaluation_reads_the_average_and_training_goes_on(wrapper, bf16):
    expected_shown, expected_averages, expected_weights, expected_loss = _never_swapped(bf16)
    for shown, averages, weights, loss in run_distributed(_swapped, 2, wrapper, bf16):
        _assert_equal(shown, expected_shown)
        torch.testing.assert_close(loss, expected_loss, rtol=0, atol=0)
        _assert_equal(averages, expected_averages)
        _assert_equal(weights, expected_weights)


def _save(wrapper: str, folder: str) -> None:
    model, optimizer, _ = _run(wrapper, 0.9)
    for index in range(STEPS):
        _step(model, optimizer, index)
    tensors = optimizer.state_tensors() | model_state_dict(unwrap_model(model))
    save(tensors, folder, metadata=optimizer.state_scalars())


def _resume(wrapper: str, folder: str) -> tuple[dict[str, Tensor], int]:
    model, optimizer, average = _run(wrapper, 0.9)
    metadata = load(optimizer.state_tensors() | model_state_dict(unwrap_model(model)), folder)
    optimizer.load_state_scalars(metadata)
    for index in range(STEPS, STEPS + 2):
        _step(model, optimizer, index)
    return _averages(optimizer), average.num_averaged


@pytest.mark.parametrize(("writer", "reader"), [("zero1", "fsdp2"), ("fsdp2", "zero3"), ("zero3", "zero1")])
def test_a_checkpoint_continues_the_average(tmp_path: Path, writer, reader):
    run_distributed(_save, 2, writer, str(tmp_path))
    model, optimizer, _ = _run("serial", 0.9)
    for index in range(STEPS + 2):
        _step(model, optimizer, index)
    for averages, count in run_distributed(_resume, 4 if reader == "zero3" else 2, reader, str(tmp_path)):
        _assert_equal(averages, _averages(optimizer))
        assert count == STEPS + 2


def test_a_skipped_step_is_not_averaged():
    model, optimizer, average = _run("serial", 0.5)
    _step(model, optimizer, 0)
    _step(model, optimizer, 1)
    before = _averages(optimizer)
    _step(model, optimizer, 2, factor=float("inf"))
    _assert_equal(_averages(optimizer), before)
    assert average.num_averaged == 2


def test_state_dict_of_a_rank_holds_the_average():
    model, optimizer, _ = _run("serial", None)
    _step(model, optimizer, 0)
    saved = optimizer.state_dict()
    expected = _averages(optimizer)
    _, second, average = _run("serial", None)
    second.load_state_dict(saved)
    _assert_equal(_averages(second), expected)
    assert average.num_averaged == 1
    del saved["scalars"]["num_averaged"]
    with pytest.raises(CheckpointError, match="no averaged weights"):
        second.load_state_dict(saved)


def test_misuse_is_named():
    model, optimizer, average = _run("serial", 0.5)
    with pytest.raises(OptimizerError, match="train first"), average.swapped():
        pass
    with pytest.raises(ConfigError, match="no trainable parameter"):  # nor anything to average
        get_megatron_optimizer(optimizer_config(), [Model().requires_grad_(False)])
    with pytest.raises(ConfigError, match="keeps an average already"):
        AveragedWeights(optimizer)
    for decay in (1.0, -0.1):
        with pytest.raises(ConfigError, match=f"decay is {decay}"):
            AveragedWeights(optimizer, decay)
    _step(model, optimizer, 0)
    with average.swapped():
        with pytest.raises(OptimizerError, match="leave `with average"):
            optimizer.step()
        with pytest.raises(OptimizerError, match="leave `with average"), average.swapped():
            pass
        with pytest.raises(OptimizerError, match="leave `with average"):
            optimizer.state_tensors()
    optimizer.zero_grad()
    _step(model, optimizer, 1)


def _writes_between(wrapper: str, bf16: bool, waits: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns averages and weights of a training in which weights are written after each step."""
    model, optimizer, _ = _run(wrapper, 0.5, bf16=bf16)
    for index in range(STEPS):
        _step(model, optimizer, index)
        if waits:
            optimizer.finish_step()
        with model.whole_parameters() if hasattr(model, "whole_parameters") else nullcontext(), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
    return _averages(optimizer), whole_weights(model)


@pytest.mark.parametrize(
    ("wrapper", "bf16"),
    quick(product(["ddp", "zero1", "zero3", "fsdp2"], [False, True]), lambda c: c[1] == (c[0] in ("zero1", "zero3"))),
)
def test_what_is_written_after_a_step_is_not_in_its_average(wrapper, bf16):
    expected_averages, expected_weights = _writes_between("serial", bf16, True)
    for averages, weights in run_distributed(_writes_between, 2, wrapper, bf16, False):
        _assert_equal(averages, expected_averages)
        _assert_equal(weights, expected_weights)


def test_no_write_is_counted_in_a_step():
    """Else each step would wait for the device."""
    for wrapper in ("ddp", "zero3", "fsdp2"):
        run_distributed(_counts_nothing, 1, wrapper)


def _counts_nothing(wrapper: str) -> None:
    model, optimizer, _ = _run(wrapper, 0.5, bf16=True)
    for index in range(3):
        _step(model, optimizer, index)
        assert not optimizer._written_params.were_counted()


@pytest.mark.parametrize("wrapper", ["zero1", "zero3", "fsdp2"])
@on_ranks(2)
def test_an_average_inside_whole_parameters_is_shown_or_refused(wrapper):
    model, optimizer, average = _run(wrapper, 0.5)
    for index in range(STEPS):
        _step(model, optimizer, index)
    optimizer.finish_step()
    before = whole_weights(model)
    with torch.no_grad(), average.swapped():
        expected = model(batch(9))
    assert not torch.equal(expected, model(batch(9)))
    with torch.no_grad(), average.swapped(), model.whole_parameters():
        assert torch.equal(model(batch(9)), expected)
    refusal = pytest.raises(UnitError, match=r"inside whole_parameters\(\).*leave it first")
    refusal = refusal if wrapper == "zero3" else nullcontext()
    with refusal, torch.no_grad(), model.whole_parameters(), average.swapped():
        assert wrapper != "zero3", "the refusal comes before anything is written"
        assert torch.equal(model(batch(9)), expected)
    _assert_equal(whole_weights(model), before)
    if wrapper == "zero3":
        for tells in ("the end", "a forward"):
            views = model_state_dict(unwrap_model(model))  # of the shards
            refusal = pytest.raises(UnitError, match=r"inside whole_parameters\(\).*leave it first")
            with refusal, model.whole_parameters(), torch.no_grad():
                for view in views.values():
                    view.elements.mul_(2)
                if tells == "a forward":
                    model(batch(9))
                    raise AssertionError("a forward read copies of what was written")
            _assert_equal(whole_weights(model), before)
