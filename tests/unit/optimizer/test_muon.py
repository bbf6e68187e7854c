"""Muon in one process: its presets next to their formulas and torch's, which parameters and matrices, and settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from core.base.errors import ConfigError
from core.base.module_protocol import FusedRows
from core.models.gpt import GPTModel
from core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer, matrices, optimizer_config
from core.optimizer.muon import Muon
from core.transformer import TransformerConfig
from core.transformer.lora import add_lora

CLASSIC = (3.4445, -4.7750, 2.0315)
QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


class _Matrices(nn.Module):
    """Matrices that are wide, tall and square; every size is a multiple of a vector, as torch's kernels compute ends
    in another way."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in {"wide": (16, 40), "tall": (48, 16), "square": (32, 32), "row": (1, 48)}.items():
            values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(values.to(dtype)))


def _give_gradients(params: list[nn.Parameter], step: int) -> None:
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


def _config(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(**({"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0} | settings))


def test_preset_torch_equals_torch_bitwise():
    ours, theirs = _Matrices(), _Matrices()
    optimizer = get_megatron_optimizer(_config(muon_preset="torch"), [ours])
    expected = torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(5):
        _give_gradients(list(ours.parameters()), step)
        _give_gradients(list(theirs.parameters()), step)
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


@pytest.mark.parametrize("preset", list(optimizer_config.PRESETS))
@pytest.mark.parametrize(("precision", "tolerance"), [("highest", 1e-12), ("medium", 0.06)])
def test_presets_equal_published_formulas(preset: Any, precision: Any, tolerance: float):
    model, expected = _Matrices(torch.float64), dict(_Matrices(torch.float64).named_parameters())
    momenta = {name: torch.zeros_like(p) for name, p in expected.items()}
    optimizer = get_megatron_optimizer(_config(muon_preset=preset, muon_fp32_matmul_prec=precision), [model])
    for step in range(4):
        _give_gradients(list(model.parameters()), step)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        for name, p in model.named_parameters():
            assert p.grad is not None
            momenta[name], update = _published(preset, momenta[name], p.grad)
            moved = (before[name] * (1 - 0.02 * 0.1) - p) / 0.02
            assert (moved - update).norm() <= tolerance * update.norm(), f"{name} at step {step}"


@pytest.mark.parametrize("kind", get_args(optimizer_config.CoefficientType))
def test_coefficients_bring_singular_values_near_one(kind: Any):
    steps = {"polar_express": 8, "aol": 8, "deepseekv4": 10}.get(kind, 5)
    recipe = optimizer_config.recipe_of(_config(muon_coefficient_type=kind, muon_num_ns_steps=steps))
    matrix = torch.randn(24, 60, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(matrices.orthogonalize(matrix, recipe).float())
    assert values.min() > 0.6 and values.max() < 1.3


@pytest.mark.parametrize(
    ("kind", "order"),
    [("quintic", [0, 1, 2, 3, 4, 0, 1]), ("cans", [0, 1, 2, 3, 4, 4, 4]), ("polar_express", [*range(8), 7, 7])],
)
def test_further_steps_begin_again_or_repeat_the_last(kind: Any, order: list[int]):
    recipe = replace(
        optimizer_config.PRESETS["torch"], coefficient_type=kind, num_ns_steps=len(order), fp32_matmul_prec="highest"
    )
    row = torch.tensor([[0.6, 0.8]], dtype=torch.float64)  # its norm is 1, and each step a polynomial of it
    value = 1.0
    for a, b, c in (matrices.COEFFICIENTS[kind][index] for index in order):
        value = a * value + b * value**3 + c * value**5
    # The least norm of this preset changes nothing. A step amplifies rounding by its slope, 26 at most here.
    assert torch.allclose(matrices.orthogonalize(row, recipe), value * row, rtol=1e-9)


@pytest.mark.parametrize(("kind", "steps"), [("simple", 5), ("quintic", 5), ("cans", 5), ("polar_express", 8)])
def test_noise_of_a_gradient_grows_by_the_slope_at_zero(kind: Any, steps: int):
    """The bound of docs/muon.md, which noise in a direction that the gradient almost lacks reaches."""
    preset = optimizer_config.PRESETS["torch"]
    recipe = replace(preset, coefficient_type=kind, num_ns_steps=steps, fp32_matmul_prec="highest")
    slope = math.prod(a for a, _, _ in (matrices.COEFFICIENTS[kind] * steps)[:steps])
    left, _, right = torch.linalg.svd(
        torch.randn(16, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64), full_matrices=False
    )
    values = torch.ones(16, dtype=torch.float64)
    values[-1] = 1e-6
    gradient = left @ values.diag() @ right
    noise = 1e-9 * gradient.norm()

    def growth(direction: Tensor) -> float:
        noisy = gradient + noise * direction / direction.norm()
        change = matrices.orthogonalize(noisy, recipe) - matrices.orthogonalize(gradient, recipe)
        return change.norm().item() / 1e-9

    assert growth(left[:, -1:] @ right[-1:]) > 0.95 * slope
    for seed in range(5):
        random = torch.randn(16, 24, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert growth(random) < 1.01 * slope


def _gpt() -> GPTModel:
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, gated_linear_unit=True,
        num_moe_experts=4, moe_layer_freq=[0, 1],
    )  # fmt: skip
    return GPTModel(config, vocab_size=64, max_sequence_length=16)


def _names(optimizer: Any) -> dict[str, str]:
    """Returns the optimizer of each parameter by name."""
    by_main = {id(p): group["optimizer"] for group in optimizer.param_groups for p in group["params"]}
    return {p.name: by_main[id(p.main)] for p in optimizer._params}


def test_hidden_matrices_are_muons_and_all_others_in_the_table():
    model = _gpt()
    optimizer = get_megatron_optimizer(_config(), [model])
    rule = optimizer.optimizer
    assert isinstance(rule, Muon)
    ours = {name for name, kind in _names(optimizer).items() if kind == "muon"}
    hidden = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    assert ours == {name for name, _ in model.named_parameters() if name.endswith(hidden)}
    for name in _names(optimizer):
        assert name.replace(".0.", ".*.").replace(".1.", ".*.") in rule.table, name
    assert "embedding or output" in rule.table and "vector" in rule.table


def test_overrides_by_name_and_attribute():
    model = _gpt()
    overrides = {ParamKey(name="*layers.0.mlp.linear_fc1.weight"): {"optimizer": "adam"}}
    config = _config(muon_include=("output_layer.weight",), muon_exclude=("*linear_proj.weight",))
    model.get_parameter("decoder.layers.1.mlp.experts.linear_fc2.weight").use_muon = False  # type: ignore[attr-defined]
    names = _names(get_megatron_optimizer(config, [model], overrides))  # type: ignore[arg-type]
    assert names["output_layer.weight"] == "muon"
    assert names["decoder.layers.0.self_attention.linear_proj.weight"] == "adam"
    assert names["decoder.layers.0.mlp.linear_fc1.weight"] == "adam"
    assert names["decoder.layers.1.mlp.experts.linear_fc1.weight"] == "muon"
    assert names["decoder.layers.1.mlp.experts.linear_fc2.weight"] == "adam"


def test_scalar_optimizer_lion_follows_its_formula():
    model = _gpt().double()
    optimizer = get_megatron_optimizer(_config(muon_scalar_optimizer="lion", lion_beta1=0.9, lion_beta2=0.7), [model])
    assert set(_names(optimizer).values()) == {"muon", "lion"} and "lion" in optimizer.describe()
    names = [name for name, kind in _names(optimizer).items() if kind == "lion"]
    params = {name: model.get_parameter(name) for name in names}
    expected = {name: p.detach().clone() for name, p in params.items()}
    momenta = {name: torch.zeros_like(p) for name, p in params.items()}
    for step in range(3):
        _give_gradients(list(model.parameters()), step)
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
    models = [_Matrices() for _ in range(4)]
    optimizers = [
        get_megatron_optimizer(_config(), [models[0]], overrides),  # type: ignore[arg-type]
        get_megatron_optimizer(_config(), [models[1]]),
        get_megatron_optimizer(_config(lr=0.06, weight_decay=0.0), [models[2]]),
        get_megatron_optimizer(_config(), [models[3]], scale_lr_cond=lambda name, _: name == "wide", lr_mult=3.0),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        _give_gradients(list(model.parameters()), 0)
        optimizer.step()
    assert torch.equal(models[0].tall, models[2].tall) and torch.equal(models[0].wide, models[1].wide)
    start = _Matrices()
    decayed = [(m.wide - start.wide) + lr * 0.1 * start.wide for m, lr in ((models[3], 0.06), (models[1], 0.02))]
    assert torch.allclose(decayed[0], 3 * decayed[1], atol=1e-6)


class _Fused(nn.Module):
    def __init__(self, fused: FusedRows | None, rows: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 32, generator=torch.Generator().manual_seed(3)))
        if fused is not None:
            self.weight.fused_rows = fused  # type: ignore[assignment]


QKV = FusedRows((("q", 4), ("k", 2), ("v", 2)), head_rows=2)
GATED = FusedRows((("gate", 1), ("up", 1)))
GATED_QKV = FusedRows((("q", 2), ("gate", 2), ("k", 2), ("v", 2)), head_rows=2)


@pytest.mark.parametrize(
    ("fused", "settings", "rows"),
    [
        (QKV, {}, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (QKV, {"muon_split_qkv_per_head": True}, [[i, i + 1] for i in range(0, 16, 2)]),
        (QKV, {"muon_split_qkv": False}, [list(range(16))]),
        (GATED_QKV, {}, [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
        (GATED, {}, [list(range(0, 16, 2)), list(range(1, 16, 2))]),
        (GATED, {"muon_preset": "megatron"}, [list(range(16))]),
        (GATED, {"muon_split_gate_up": False}, [list(range(16))]),
    ],
)
def test_fused_rows_are_updated_as_matrices_of_their_own(fused: FusedRows, settings: Any, rows: list[list[int]]):
    model = _Fused(fused)
    optimizer = get_megatron_optimizer(_config(weight_decay=0.0, **settings), [model])
    before = model.weight.detach().clone()
    _give_gradients([model.weight], 0)
    optimizer.step()
    for part in rows:  # each alone, as a parameter that has no fused rows
        alone = _Fused(None, len(part))
        with torch.no_grad():
            alone.weight.copy_(before[part])
        alone.weight.grad = model.weight.grad[part].clone()  # type: ignore[index]
        get_megatron_optimizer(_config(weight_decay=0.0, **settings), [alone]).step()
        assert torch.allclose(alone.weight, model.weight[part], rtol=0, atol=1e-6)
    assert not torch.allclose(before, model.weight, atol=1e-3)


def test_experts_are_a_batch_of_matrices():
    model = _Fused(None)
    model.weight = nn.Parameter(torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(5)))
    before = model.weight.detach().clone()
    optimizer = get_megatron_optimizer(_config(weight_decay=0.0), [model])
    _give_gradients([model.weight], 0)
    optimizer.step()
    for index in range(3):
        alone = _Fused(None)
        alone.weight = nn.Parameter(before[index].clone())
        alone.weight.grad = model.weight.grad[index].clone()  # type: ignore[index]
        get_megatron_optimizer(_config(weight_decay=0.0), [alone]).step()
        assert torch.equal(alone.weight, model.weight[index])


def test_lora_factors_are_matrices_and_frozen_weights_stay():
    model = _gpt()
    add_lora(model, 4, targets=("linear_qkv", "linear_proj"))
    optimizer = get_megatron_optimizer(_config(), [model])
    names = _names(optimizer)
    assert names and set(names.values()) == {"muon"} and all(".adapter." in name for name in names)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    params = [p for p in model.parameters() if p.requires_grad]
    _give_gradients(params, 0)
    optimizer.step()
    assert all(torch.equal(before[name], p) != p.requires_grad for name, p in model.named_parameters())
    assert "q" in {matrix.split for matrix in optimizer.optimizer._matrices}  # type: ignore[attr-defined]


def test_parameter_without_gradient_is_left():
    model = _Matrices()
    optimizer = get_megatron_optimizer(_config(), [model])
    _give_gradients(list(model.parameters()), 0)
    model.tall.grad = None
    before = model.tall.detach().clone()
    optimizer.step()
    assert torch.equal(before, model.tall)
    assert not optimizer.state_tensors()["momentum_buffer.tall"].any()


@pytest.mark.parametrize("holder", ["shards", "owners"])
def test_infinite_gradient_skips_the_step(holder: Any):
    model, settings = _Matrices(), {"muon_scalar_optimizer": "lion", "muon_exclude": ("square",)}
    optimizer = get_megatron_optimizer(_config(muon_momentum_holder=holder, **settings), [model])
    for step in range(3):
        _give_gradients(list(model.parameters()), step)
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
    monkeypatch.setattr("core.optimizer.muon.known_on_host", lambda value: None)
    test_infinite_gradient_skips_the_step("shards")
    test_infinite_gradient_skips_the_step("owners")


def test_loss_scale_and_clipping_come_before_the_momentum():
    """The orthogonal update does not depend on the size of a gradient, and the momentum of several does."""

    def run(clip: float, factor: float) -> Tensor:
        model = _Matrices()
        optimizer = get_megatron_optimizer(_config(clip_grad=clip), [model])
        for step in range(3):
            _give_gradients(list(model.parameters()), step)
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
        _config(**settings)
    assert message in str(error.value) and "\n" not in str(error.value)


class _Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.conv = nn.Conv1d(2, 2, 3)


@pytest.mark.parametrize(
    ("model", "settings", "overrides", "message"),
    [
        (_Vectors(), {}, None, "none of the 4 trained parameters is a matrix"),
        (_Vectors(), {"muon_include": ("conv.weight",)}, None, "muon is requested for parameter conv.weight"),
        (_Matrices(), {"muon_exclude": ("head.*",)}, None, "'head.*' matches no parameter"),
        (_Matrices(), {}, {ParamKey(name="tall"): {"optimizer": "lion"}}, "tall the optimizer 'lion'; it takes"),
        (_Fused(QKV, 12), {}, None, "parameter weight has 12 rows, and its layout"),
    ],
)
def test_unfit_models_are_one_line(model: nn.Module, settings: Any, overrides: Any, message: str):
    with pytest.raises(ConfigError) as error:
        get_megatron_optimizer(_config(**settings), [model], overrides)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_settings_without_a_preset_replace_moonlights():
    recipe = optimizer_config.recipe_of(_config(muon_scale_mode="shape_scaling", muon_momentum=0.9))
    assert (recipe.scale_mode, recipe.momentum, recipe.extra_scale_factor) == ("shape_scaling", 0.9, 0.2)
    assert recipe.adds_eps and recipe.nesterov
    assert optimizer_config.recipe_of(_config(muon_momentum=0.0)).momentum == 0.0  # not the preset's


def test_state_of_torch_is_that_of_every_preset():
    """Momentum is a mean of gradients under each preset, as in torch.optim.Muon, also where its source has a sum."""
    ours, theirs = _Matrices(), _Matrices()
    optimizer = get_megatron_optimizer(_config(muon_fp32_matmul_prec="highest"), [ours])
    torchs = torch.optim.Muon(theirs.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        _give_gradients(list(theirs.parameters()), step)
        torchs.step()
    ours.load_state_dict(theirs.state_dict())
    momenta = {f"momentum_buffer.{n}": torchs.state[p]["momentum_buffer"] for n, p in theirs.named_parameters()}
    for name, tensor in optimizer.state_tensors().items():
        tensor.copy_(momenta[name])
    for step in range(3, 6):
        for model, stepping in ((ours, optimizer), (theirs, torchs)):
            _give_gradients(list(model.parameters()), step)
            stepping.step()  # type: ignore[attr-defined]
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (a - b).norm() < 2e-3 * b.norm(), name
    assert all(torch.equal(tensor, momenta[name]) for name, tensor in optimizer.state_tensors().items())
