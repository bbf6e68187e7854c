"""Muon in one process: its presets next to their formulas and torch's, skipped steps, and settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from core.base.errors import ConfigError
from core.optimizer import ParamKey, get_megatron_optimizer, muon_recipe
from tests.unit.optimizer.muon._muon import Matrices, config_of, give_gradients, gpt, optimizers_by_name

CLASSIC = (3.4445, -4.7750, 2.0315)
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def test_preset_torch_equals_torch_bitwise():
    ours, theirs = Matrices(), Matrices()
    optimizer = get_megatron_optimizer(config_of(muon_preset="torch"), [ours])
    expected = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(5):
        give_gradients(list(ours.parameters()), step)
        give_gradients(list(theirs.parameters()), step)
        optimizer.step()
        expected.step()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b), f"{name} differs after step {step}"
    momenta = optimizer.state_tensors()
    for name, p in theirs.named_parameters():
        assert torch.equal(momenta[f"momentum_buffer.{name}"], expected.state[p]["momentum_buffer"])


def _published(preset: str, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the new momentum, and the update without the learning rate, as the sources of a recipe have them."""
    rows, columns = g.shape
    triples = QUINTIC if preset == "megatron" else (CLASSIC,) * 5
    m = 0.95 * m + g if preset == "moonlight" else 0.95 * m + 0.05 * g
    if preset == "moonlight":
        x = g + 0.95 * m
    else:
        x = m if preset == "megatron" else 0.05 * g + 0.95 * m
    norm = x.pow(2).sum().sqrt()
    if preset in ("moonlight", "keller-jordan"):
        x = x / (norm + 1e-7)
    else:
        x = x / max(norm, 1e-15 if preset == "megatron" else 1e-7)
    if rows > columns:
        x = x.T
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    if rows > columns:
        x = x.T
    scale = {"moonlight": 0.2 * math.sqrt(max(rows, columns)), "megatron": math.sqrt(max(rows, columns))}.get(
        preset, math.sqrt(max(1, rows / columns))
    )
    return m, scale * x


@pytest.mark.parametrize("preset", list(muon_recipe.PRESETS))
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-12), ("medium", 0.06)])
def test_presets_equal_published_formulas(preset: Any, precision: Any, tolerance: float):
    model, expected = Matrices(torch.float64), dict(Matrices(torch.float64).named_parameters())
    momenta = {name: torch.zeros_like(p) for name, p in expected.items()}
    optimizer = get_megatron_optimizer(config_of(muon_preset=preset, muon_fp32_matmul_prec=precision), [model])
    for step in range(4):
        give_gradients(list(model.parameters()), step)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            momenta[name], update = _published(preset, momenta[name], p.grad)
            moved = (before[name] * (1 - 0.02 * 0.1) - p) / 0.02
            assert (moved - update).norm() <= tolerance * update.norm(), f"{name} at step {step}"


def test_scalar_optimizer_lion_follows_its_formula():
    model = gpt().double()
    optimizer = get_megatron_optimizer(
        config_of(muon_scalar_optimizer="lion", lion_beta1=0.9, lion_beta2=0.7), [model]
    )
    assert set(optimizers_by_name(optimizer).values()) == {"muon", "lion"} and "lion" in optimizer.describe()
    names = [name for name, kind in optimizers_by_name(optimizer).items() if kind == "lion"]
    params = {name: model.get_parameter(name) for name in names}
    expected = {name: p.detach().clone() for name, p in params.items()}
    momenta = {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(3):
        give_gradients(list(model.parameters()), step)
        optimizer.step()
        for name, p in params.items():
            assert p.grad is not None
            decay = 0.1 if p.ndim > 1 and not name.endswith("bias") else 0.0
            expected[name] *= 1 - 0.02 * decay
            expected[name] -= 0.02 * (0.9 * momenta[name] + (1 - 0.9) * p.grad).sign()
            momenta[name] = 0.7 * momenta[name] + (1 - 0.7) * p.grad
            assert torch.allclose(p, expected[name], rtol=1e-12), name
    state = optimizer.state_tensors()
    assert all(torch.allclose(state[f"exp_avg.{name}"], momenta[name], rtol=1e-12) for name in names)
    assert not any(name.startswith("exp_avg_sq") for name in state)


def test_groups_have_learning_rates_and_decay_of_their_own():
    """Of a parameter with another rate and no decay, as of all with these settings."""
    overrides = {ParamKey(name="tall"): {"max_lr": 0.06, "wd_mult": 0.0}}
    models = [Matrices() for _ in range(4)]
    optimizers = [
        get_megatron_optimizer(config_of(), [models[0]], overrides),  # type: ignore[arg-type]
        get_megatron_optimizer(config_of(), [models[1]]),
        get_megatron_optimizer(config_of(lr=0.06, weight_decay=0.0), [models[2]]),
        get_megatron_optimizer(config_of(), [models[3]], scale_lr_cond=lambda name, _: name == "wide", lr_mult=3.0),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(list(model.parameters()), 0)
        optimizer.step()
    assert torch.equal(models[0].tall, models[2].tall) and torch.equal(models[0].wide, models[1].wide)
    start = Matrices()
    decayed = [(m.wide - start.wide) + lr * 0.1 * start.wide for m, lr in ((models[3], 0.06), (models[1], 0.02))]
    assert torch.allclose(decayed[0], 3 * decayed[1], atol=1e-6)


def test_parameter_without_gradient_is_left():
    model = Matrices()
    optimizer = get_megatron_optimizer(config_of(), [model])
    give_gradients(list(model.parameters()), 0)
    model.tall.grad = None
    before = model.tall.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.tall)
    assert not optimizer.state_tensors()["momentum_buffer.tall"].any()


@pytest.mark.parametrize("holder", ["shards", "owners"])
def test_infinite_gradient_skips_the_step(holder: Any):
    model, settings = Matrices(), {"muon_scalar_optimizer": "lion", "muon_exclude": ("square",)}
    optimizer = get_megatron_optimizer(config_of(muon_momentum_holder=holder, **settings), [model])
    for step in range(3):
        give_gradients(list(model.parameters()), step)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        if step == 1:
            momenta = {name: t.clone() for name, t in optimizer.state_tensors().items()}
            model.wide.grad[0, 0] = math.inf  # type: ignore[index]
        updated, *_ = optimizer.step()
        assert updated == (step != 1)
        if step == 1:
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
            assert all(torch.equal(momenta[name], t) for name, t in optimizer.state_tensors().items())
    assert optimizer.state_scalars()["step"] == 2


def test_device_skips_the_step_without_the_host(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("core.optimizer.muon.rule.known_on_host", lambda value: None)
    test_infinite_gradient_skips_the_step("shards")
    test_infinite_gradient_skips_the_step("owners")


def test_loss_scale_and_clipping_come_before_the_momentum():
    """The orthogonal update does not depend on the size of a gradient, and the momentum of several does."""

    def run(clip: float, factor: float) -> Tensor:
        model = Matrices()
        optimizer = get_megatron_optimizer(config_of(clip_grad=clip), [model])
        for step in range(3):
            give_gradients(list(model.parameters()), step)
            for p in model.parameters():
                p.grad *= factor if step == 1 else 1.0
            optimizer.step()
        return model.wide.detach()

    assert not torch.equal(run(0.0, 1.0), run(0.0, 100.0))
    assert torch.allclose(run(1.0, 1.0), run(1.0, 100.0), atol=1e-3)  # clipped to one norm


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"muon_preset": "torch", "muon_nesterov": False}, "muon_nesterov is False, and muon_preset torch has True"),
        ({"muon_preset": "pytorch"}, "muon_preset is 'pytorch'; did you mean 'torch'? it takes"),
        ({"muon_momentum": 1.0}, "muon_momentum is 1.0; it takes a number from 0 up to"),
        ({"muon_num_ns_steps": 0}, "muon_num_ns_steps is 0; it takes a positive integer"),
        ({"muon_scale_mode": "root"}, "muon_scale_mode is 'root'; it takes"),
        ({"muon_split_qkv": False, "muon_split_qkv_per_head": True}, "muon_split_qkv is off; drop one"),
        ({"muon_tp_mode": "blockwise"}, "muon_tp_mode is blockwise, which changes"),
        ({"muon_scalar_optimizer": "soap"}, "muon_scalar_optimizer is 'soap'; it takes"),
        ({"lion_beta2": 1.0}, "lion_beta2 is 1.0; it takes a number from 0 up to"),
    ],
)
def test_bad_settings_are_one_line(settings: Any, message: str):
    with pytest.raises(ConfigError) as error:
        config_of(**settings)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_settings_without_a_preset_replace_moonlights():
    recipe = muon_recipe.recipe_of(config_of(muon_scale_mode="shape_scaling", muon_momentum=0.9))
    assert (recipe.scale_mode, recipe.momentum, recipe.extra_scale_factor) == ("shape_scaling", 0.9, 0.2)
    assert recipe.adds_eps and recipe.nesterov
    assert muon_recipe.recipe_of(config_of(muon_momentum=0.0)).momentum == 0.0  # not the preset's


def test_state_of_torch_is_that_of_every_preset():
    """Momentum is a mean of gradients under each preset, as in torch.optim.Muon, also where its source has a sum."""
    ours, theirs = Matrices(), Matrices()
    optimizer = get_megatron_optimizer(config_of(muon_fp32_matmul_prec="highest"), [ours])
    torchs = torch.optim.Muon(theirs.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        give_gradients(list(theirs.parameters()), step)
        torchs.step()
    ours.load_state_dict(theirs.state_dict())
    momenta = {f"momentum_buffer.{n}": torchs.state[p]["momentum_buffer"] for n, p in theirs.named_parameters()}
    for name, tensor in optimizer.state_tensors().items():
        tensor.copy_(momenta[name])
    for step in range(3, 6):
        for model, stepping in ((ours, optimizer), (theirs, torchs)):
            give_gradients(list(model.parameters()), step)
            stepping.step()  # type: ignore[attr-defined]
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a - b).norm() < 2e-3 * b.norm(), name
    assert all(torch.equal(tensor, momenta[name]) for name, tensor in optimizer.state_tensors().items())
