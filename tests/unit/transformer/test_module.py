"""MegatronModule, half precision around a model, and the way from meta to a device."""

import pytest
import torch
from torch import nn

from core.base.errors import ConfigError
from core.base.initialization import draw_init_seed, initialize_parameters
from core.transformer import Float16Module, MegatronModule, TransformerConfig, materialize
from tests.unit.models._cases import CASES, batch, build, relative_error

CASE = CASES["swiglu-gqa-rope-rms"]
SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("precision", "dtype", "rounding"), [("bf16", torch.bfloat16, 2**-8), ("fp16", torch.float16, 2**-11)]
)
def test_half_precision_trains_near_fp32(precision, dtype, rounding):
    ids, labels = batch()
    exact = build(CASE)
    exact(ids, labels=labels).mean().backward()
    model = build(CASE, **{precision: True})
    before, marks = list(model.parameters()), [dict(vars(parameter)) for parameter in model.parameters()]
    half = Float16Module(model.config, model)
    assert all(map(lambda new, old: new is old, half.parameters(), before))
    assert [vars(parameter) for parameter in half.parameters()] == marks
    losses = half(ids, labels=labels)
    losses.mean().backward()
    assert losses.dtype == half(ids).dtype == torch.float32 and model(ids).dtype == dtype
    # A few dozen roundings deep: within eight of them for the loss, and for the gradient of all parameters together.
    assert relative_error(losses, exact(ids, labels=labels)) < 8 * rounding
    actual = torch.cat([parameter.grad.float().flatten() for parameter in half.parameters()])
    expected = torch.cat([parameter.grad.flatten() for parameter in exact.parameters()])
    assert all(parameter.grad.dtype == dtype for parameter in half.parameters())
    assert relative_error(actual, expected) < 16 * rounding


def test_state_dict_roundtrip_without_prefix():
    config = TransformerConfig(bf16=True, **CASE.config)
    half = Float16Module(config, build(CASE, bf16=True))
    state = {name: tensor.clone() for name, tensor in half.state_dict().items()}
    assert list(state) == list(half.module.state_dict()) == list(half.state_dict_for_save_checkpoint())
    assert list(half.state_dict(prefix="a.")) == [f"a.{name}" for name in state]
    with torch.no_grad():
        for parameter in half.parameters():
            parameter.zero_()
    half.load_state_dict(state)
    assert all(torch.equal(tensor, half.state_dict()[name]) for name, tensor in state.items())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        half.load_state_dict({"module.weight": torch.zeros(1)})


class _Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("table", torch.zeros(1))
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen = [args, kwargs]
        return {"hidden": (self.weight * 1, [self.table]), "ids": torch.zeros(1, dtype=torch.long)}


def test_casts_in_containers_skip_buffers_and_ints():
    half = Float16Module(TransformerConfig(fp16=True, **SIZES), _Echo())
    output = half(torch.zeros(1), (torch.zeros(1, dtype=torch.long), torch.zeros(1)), extra={"x": torch.zeros(1)})
    (first, (second, third)), keywords = half.module.seen
    assert [t.dtype for t in (first, second, third, keywords["extra"]["x"])] == [
        torch.half,
        torch.long,
        torch.half,
        torch.half,
    ]
    assert output["hidden"][0].dtype == output["hidden"][1][0].dtype == torch.float32
    assert output["ids"].dtype == torch.long and half.module.table.dtype == torch.float32


def test_half_precision_needs_its_flag():
    with pytest.raises(ConfigError, match="neither fp16 nor bf16"):
        Float16Module(TransformerConfig(**SIZES), _Echo())


class _Seeded(MegatronModule):
    def __init__(self, config, on_meta_too):
        super().__init__(config)
        self.init_seed = 1
        self.linear = nn.Linear(2, 2)
        with torch.device("meta" if on_meta_too else "cpu"):
            self.register_buffer("table", torch.full((2,), 3.0))


def test_materialize_keeps_buffers_that_have_values():
    config = TransformerConfig(**SIZES)
    with torch.device("meta"):
        model = _Seeded(config, on_meta_too=False)
    direct = _Seeded(config, on_meta_too=False)
    initialize_parameters(direct, 1)
    materialize(model, "cpu")
    assert torch.equal(model.table, torch.full((2,), 3.0))
    assert torch.equal(model.linear.weight, direct.linear.weight)


def test_materialize_names_unfillable_tensors():
    config = TransformerConfig(**SIZES)
    with pytest.raises(ConfigError, match=r"buffers on the meta device.*'table'"):
        materialize(_Seeded(config, on_meta_too=True), "cpu")


def test_materialize_leaves_existing_values():
    with torch.device("meta"):
        model = nn.ModuleDict({"new": nn.Linear(2, 2), "part": _Seeded(TransformerConfig(**SIZES), on_meta_too=False)})
    model["old"] = nn.Linear(2, 2)
    model["old"].requires_grad_(False)
    before = model["old"].weight.clone()
    torch.manual_seed(3)
    materialize(model, "cpu")
    assert torch.equal(model["old"].weight, before) and not model["old"].weight.requires_grad
    again = nn.ModuleDict({"new": nn.Linear(2, 2)})
    torch.manual_seed(3)
    initialize_parameters(again, draw_init_seed())
    assert torch.equal(model["new"].weight, again["new"].weight)
    direct = _Seeded(TransformerConfig(**SIZES), on_meta_too=False)
    initialize_parameters(direct, 1)  # a part with a seed of its own starts as it does alone
    assert torch.equal(model["part"].linear.weight, direct.linear.weight)


def test_materialize_without_initialization():
    config = TransformerConfig(perform_initialization=False, **SIZES)
    with torch.device("meta"):
        model = _Seeded(config, on_meta_too=False)
    model.linear.reset_parameters = None  # calling it would fail
    assert not any(parameter.is_meta for parameter in materialize(model, "cpu").parameters())
