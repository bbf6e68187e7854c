"""Products in fp8 against those of matrices rounded by hand, on one rank and two, and what is refused."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from core.base.errors import ConfigError, MissingExtraError, warn_once
from core.fp8 import Fp8Linear, use_fp8_products
from core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from core.tensor_parallel.weight_gradients import compute_deferred, deferring
from core.transformer import TransformerConfig
from core.transformer.lora import add_lora
from tests.unit._gpt import build_gpt
from tests.unit._on_gpu import needs_gpu
from tests.unit._quick import needs
from tests.unit._spawn import on_ranks
from tests.unit.tensor_parallel._layers import all_gather, config, normal, own
from tests.unit.tensor_parallel.test_weight_gradients import Memory

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENT_FORMATS = {"tensorwise": E5M2, "tensorwise_e4m3": E4M3, "rowwise": E4M3}


def _has_rows_on_cpu() -> bool:
    try:
        use_fp8_products(nn.Linear(16, 16), "rowwise")
    except ConfigError:
        return False
    return True


rows_on_cpu = pytest.mark.skipif(not _has_rows_on_cpu(), reason="this torch has no product with scales of rows on CPU")
RECIPES = [pytest.param(name, marks=rows_on_cpu) if name == "rowwise" else name for name in GRADIENT_FORMATS]
K, N, S, B = 48, 32, 7, 3  # 21 tokens: the product over tokens is filled up


def _numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns numbers whose rows and columns have different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape[-1], generator=generator).exp() * torch.randn(*shape[:-1], 1, generator=generator).exp()
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def _layer(recipe: str, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(K, N, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(_numbers(N, K, seed=2))
        if bias:
            layer.bias.copy_(_numbers(N, seed=4))
    use_fp8_products(layer, recipe)
    return layer


# ---- the arithmetic


class Rounded:
    """A matrix whose elements are those of a format times a scale, all in double.

    ``error`` bounds how far each is from the exact one: half a step of its binade, or of the subnormal numbers.
    """

    def __init__(self, matrix: Tensor, dtype: torch.dtype, dim: int, by_rows: bool) -> None:
        digits, least = {E4M3: (3, -6), E5M2: (2, -14)}[
            dtype
        ]  # after the point, and the exponent of subnormal numbers
        self.exact, magnitudes = matrix.double(), matrix.abs()
        largest = magnitudes.amax(dim, keepdim=True) if by_rows else magnitudes.amax()
        scale = largest.float() / torch.finfo(dtype).max
        quotients = (matrix.float() / scale).double()
        steps = 2.0 ** (torch.frexp(quotients).exponent - 1).clamp(min=least).sub(digits).double()
        self.values = (quotients / steps).round() * steps * scale.double()  # ties to even
        self.error = torch.maximum(magnitudes.double() * 2.0 ** -(digits + 1), 2.0 ** (least - digits - 1) * scale)


def _product(left: Tensor, right: Tensor, left_format: torch.dtype, recipe: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the product of rounded matrices, the exact one, and a bound of their difference."""
    a = Rounded(left, left_format, 1, recipe == "rowwise")
    b = Rounded(right, E4M3, 0, recipe == "rowwise")
    bound = a.error @ b.exact.abs() + a.exact.abs() @ b.error + a.error @ b.error
    return a.values @ b.values, a.exact @ b.exact, bound


def _assert_product(
    found: Tensor, left: Tensor, right: Tensor, left_format: torch.dtype, recipe: str, bias: Tensor | None = None
) -> None:
    rounded, exact, bound = _product(left, right, left_format, recipe)
    assert bool(((rounded - exact).abs() <= bound).all())
    # Sums in fp32 of k products, rounded once to the output's format, and once more with a bias.
    sums = left.shape[1] * 2.0**-24 * (left.double().abs() @ right.double().abs() + bound)
    is_bf16 = recipe == "rowwise" or found.dtype == torch.bfloat16
    unit = 2.0**-8 if is_bf16 else 2.0**-24
    sums += unit * (rounded.abs() + sums)
    if bias is not None:
        rounded = rounded + bias.double()
        sums += unit * (rounded.abs() + sums)
    assert bool(((found.double() - rounded).abs() <= sums).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_rounded_matrices(recipe, dtype):
    layer = _layer(recipe, dtype=dtype)
    x = _numbers(S, B, K, dtype=dtype).requires_grad_()
    upstream = _numbers(S, B, N, dtype=dtype, seed=3) * 1e-4
    output = layer(x)
    output.backward(upstream)
    rows, gradient, weight = x.detach().flatten(0, 1), upstream.flatten(0, 1), layer.weight.detach()
    of_gradient = GRADIENT_FORMATS[recipe]
    assert output.dtype == x.grad.dtype == layer.weight.grad.dtype == dtype
    _assert_product(output.detach().flatten(0, 1), rows, weight.t(), E4M3, recipe, layer.bias.detach())
    _assert_product(x.grad.flatten(0, 1), gradient, weight, of_gradient, recipe)
    _assert_product(layer.weight.grad, gradient.t(), rows, of_gradient, recipe)
    assert torch.equal(layer.bias.grad, gradient.sum(0))


def test_gradients_are_in_e5m2_in_tensorwise_alone():
    """A gradient of 2^-15 of the largest one is a number of e5m2, and zero in e4m3."""
    gradients = {}
    for recipe in ("tensorwise", "tensorwise_e4m3"):
        layer, x = _layer(recipe, bias=False), torch.ones(16, K, requires_grad=True)
        upstream = torch.zeros(16, N)
        upstream[0], upstream[1] = 1.0, 2.0**-20
        layer(x).backward(upstream)
        gradients[recipe] = x.grad[1].abs().max().item()
    assert gradients["tensorwise"] > 0 == gradients["tensorwise_e4m3"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(recipe, value):
    layer, x = _layer(recipe), _numbers(S, B, K).requires_grad_()
    upstream = _numbers(S, B, N, seed=3)
    upstream[1, 1, 5] = value
    layer(x).backward(upstream)
    assert not x.grad[1, 1].isfinite().any() and not layer.weight.grad[5].isfinite().any()
    with torch.no_grad():
        x[2, 0, 1] = value
    assert not layer(x)[2, 0].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_and_no_rows_have_products(recipe):
    layer = _layer(recipe, bias=False)
    for shape in ((S, B), (0, B)):
        x = torch.zeros(*shape, K, requires_grad=True)
        layer.weight.grad = None
        output = layer(x)
        output.backward(torch.zeros_like(output))
        for found in (output, x.grad, layer.weight.grad):
            assert torch.equal(found, torch.zeros_like(found))
    tiny = _layer(recipe, bias=False)(torch.full((1, K), 2.0**-120))
    assert bool(tiny.isfinite().all())


# ---- the layers' other paths


def _step(layer: nn.Module, call: Callable[..., Tensor] | None = None, x: Tensor | None = None) -> list[Tensor]:
    x = (_numbers(S, B, K) if x is None else x).detach().requires_grad_()
    layer.zero_grad()
    output = (layer if call is None else call)(x)
    output.backward(_numbers(*output.shape, seed=3, dtype=output.dtype))
    return [output.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def _assert_equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_lent_memory_later_and_again_change_no_bit(recipe):
    layer = _layer(recipe)
    expected = _step(layer)
    _assert_equal(_step(layer, lambda x: checkpoint(layer, x, use_reentrant=False)), expected)
    memory = Memory(layer.weight)
    _assert_equal(_step(layer), expected)
    assert memory.times == 1 and layer.weight.grad.data_ptr() == memory.memory.data_ptr()
    products: list[Any] = []
    with deferring(products):
        found = _step(layer)
    assert len(products) == 1 and len(found) == 3  # without the weight's gradient
    compute_deferred(products)
    _assert_equal([*found[:2], layer.weight.grad, layer.bias.grad], expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_products_have_the_same_bits(recipe):
    layer = _layer(recipe)
    Memory(layer.weight)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    _assert_equal(_step(layer, compiled), _step(layer))


def test_autocast_computes_as_a_layer_in_low_precision():
    layer, low = _layer("tensorwise"), _layer("tensorwise", dtype=torch.bfloat16)

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    x = _numbers(S, B, K, dtype=torch.bfloat16)
    _assert_equal([tensor.bfloat16() for tensor in _step(layer, call, x)], _step(low, x=x))


def test_a_frozen_weight_has_no_product():
    layer = _layer("tensorwise")
    expected = _step(layer)
    layer.weight.requires_grad_(False)
    _assert_equal(_step(layer), [*expected[:2], expected[3]])
    with torch.inference_mode():
        assert torch.equal(layer(_numbers(S, B, K)), expected[0])


# ---- over tensor-parallel ranks


@on_ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_round_their_parts(sequence_parallel):
    x, upstream = _numbers(6, B, 32), _numbers(6, B, 64, seed=3)
    options = {"config": config(2, sequence_parallel), "init_method": normal, "tp_group": dist.group.WORLD}
    torch.manual_seed(0)
    column, row = ColumnParallelLinear(32, 64, **options), RowParallelLinear(64, 32, **options)
    use_fp8_products(nn.ModuleList([column, row]))
    rows, gradient = x.flatten(0, 1), own(upstream, -1).flatten(0, 1)

    leaf = (own(x, 0) if sequence_parallel else x).clone().requires_grad_()
    output = column(leaf)[0]
    output.backward(own(upstream, -1))
    weight = column.weight.detach()
    _assert_product(output.detach().flatten(0, 1), rows, weight.t(), E4M3, "tensorwise")
    _assert_product(column.weight.grad, gradient.t(), rows, E5M2, "tensorwise")
    partial = _layer_of(weight)
    whole = x.clone().requires_grad_()
    partial(whole).backward(own(upstream, -1))
    expected = whole.grad
    dist.all_reduce(expected)
    assert torch.equal(leaf.grad, own(expected, 0) if sequence_parallel else expected)

    leaf = own(upstream, -1).clone().requires_grad_()
    output = row(leaf)[0]
    output.backward(own(x, 0) if sequence_parallel else x)
    partial, alone = _layer_of(row.weight.detach()), own(upstream, -1).clone().requires_grad_()
    addend = partial(alone)
    addend.backward(x)
    expected = addend.detach().clone()
    dist.all_reduce(expected)
    found = all_gather(output.detach(), 0) if sequence_parallel else output.detach()
    assert torch.equal(found, expected)
    _assert_equal([leaf.grad, row.weight.grad], [alone.grad, partial.weight.grad])


def _layer_of(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    use_fp8_products(layer)
    return layer


# ---- which layers


class _Named(nn.Module):
    """Has layers that fp8 takes, one of another size, and one of a class that computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 40)
        self.attention = nn.MultiheadAttention(16, 2)


def test_layers_are_chosen_by_their_names():
    model = _Named()
    before = dict(model.named_parameters())
    assert use_fp8_products(model, layers=("up", "do*")) == ["up", "down"]
    assert [type(layer) for layer in (model.up, model.down, model.head)] == [Fp8Linear, Fp8Linear, nn.Linear]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert copy.deepcopy(model.up)(torch.ones(1, 16)).equal(model.up(torch.ones(1, 16)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "delayed"}, "fp8 recipe 'delayed' does not exist; it takes one of tensorwise, tensorwise_e4m3, r"),
        ({"by": "apex"}, "by is 'apex'; it takes one of torch, torchao"),
        ({"recipe": None}, "fp8 recipe None does not exist; it takes one of"),
        ({"layers": ()}, "fp8 layers '(none)' match no linear layer; there are: up down head"),
        ({"layers": ("blocks.*",)}, "fp8 layers 'blocks.*' match no linear layer; there are: up down head"),
        (
            {},
            "sizes that are multiples of 16, and these layers have others: head (40, 16); leave them out by patterns",
        ),
        pytest.param({"by": "torchao"}, "have others: head (40, 16); leave them out", marks=needs("torchao")),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(arguments, message):
    model = _Named()
    with pytest.raises(ConfigError, match=re.escape(message)):
        use_fp8_products(model, **arguments)
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_strided_input_with_a_bias_has_the_same_output(recipe: str) -> None:
    layer, x = _layer(recipe), _numbers(S, B, K)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert torch.equal(layer(strided), layer(x))
    layer(strided).sum().backward()


def test_one_pattern_and_the_meta_device_are_taken() -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})
    assert use_fp8_products(model, layers="up") == ["up"]
    assert model["up"](torch.empty(3, 16, device="meta")).shape == (3, 32)


@needs("torchao")
def test_torchao_does_not_replace_the_model_itself() -> None:
    with pytest.raises(ConfigError, match="the model is a Linear itself; give a module that holds it"):
        use_fp8_products(nn.Linear(16, 16), by="torchao")


def test_a_recipe_without_kernel_is_refused(monkeypatch):
    def has_none(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("torch._scaled_mm is only supported on devices of capability 8.9 or later")

    monkeypatch.setattr(torch, "_scaled_mm", has_none)
    layer = nn.Linear(16, 16)
    with pytest.raises(
        ConfigError, match=r"fp8 recipe 'rowwise' has no kernel for torch.float32 on cpu in torch .*: a GPU"
    ):
        use_fp8_products(layer, "rowwise")
    assert type(layer) is nn.Linear


def test_a_layer_in_double_is_refused():
    with pytest.raises(ConfigError, match=r"fp8 recipe 'tensorwise' has no kernel for torch.float64 on cpu in torch"):
        use_fp8_products(nn.Linear(16, 16, dtype=torch.float64))


def test_torchao_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MissingExtraError, match=r"by='torchao' needs the package 'torchao': pip .*shardstack\[fp8\]"):
        use_fp8_products(nn.Sequential(nn.Linear(16, 16)), by="torchao")


@needs("torchao")
def test_torchao_has_recipes_of_its_own():
    with pytest.raises(
        ConfigError, match="fp8 recipe 'delayed' does not exist; it takes one of tensorwise, rowwise, r"
    ):
        use_fp8_products(nn.Sequential(nn.Linear(16, 16)), "delayed", by="torchao")


@needs("torchao")
def test_torchao_computes_the_same_up_to_codes():
    ours = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
    theirs = copy.deepcopy(ours)
    use_fp8_products(ours)
    use_fp8_products(theirs, by="torchao")
    for a, b in zip(_step(ours), _step(theirs), strict=True):
        assert (a - b).norm() <= 1e-3 * b.norm()  # scales that differ in a last bit may change a code here and there


SIZES = {"hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 8}


def _in_fp8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "arithmetic" in vars(module)]


def test_a_gpt_computes_the_linear_layers_of_its_layers_in_fp8():
    model = build_gpt(False, fp8="hybrid", fp8_recipe="tensorwise", **SIZES)
    parts = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    assert sorted(_in_fp8(model)) == sorted(f"decoder.layers.{index}.{part}" for index in range(2) for part in parts)
    add_lora(model, 8)
    assert not any("adapter" in name for name in _in_fp8(model))


@pytest.mark.parametrize(
    ("fp8", "recipe", "products"),
    [
        ("hybrid", "tensorwise", "tensorwise"),
        ("e4m3", "tensorwise", "tensorwise_e4m3"),
        pytest.param("e4m3", "rowwise", "rowwise", marks=rows_on_cpu),
    ],
)
def test_a_gpt_has_the_products_of_its_format_and_recipe(fp8, recipe, products):
    model, layer = build_gpt(False, fp8=fp8, fp8_recipe=recipe, **SIZES), _layer(products)
    assert model.decoder.layers[0].mlp.linear_fc1.arithmetic == layer.arithmetic


def test_experts_stay_in_the_precision_of_the_model():
    warn_once.cache_clear()
    fields = {"num_moe_experts": 2, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 32}
    with pytest.warns(UserWarning, match="grouped products of experts stay in the model's precision"):
        model = build_gpt(True, fp8="e4m3", fp8_recipe="tensorwise", **SIZES, **fields)
    kinds = {name.partition(".layers.")[2].partition(".")[2] for name in _in_fp8(model)}
    shared = {name for name in kinds if "shared" in name}
    assert len(shared) == 2 and kinds - shared == {"self_attention.linear_qkv", "self_attention.linear_proj"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fp8": "e5m2", "fp8_recipe": "rowwise"}, "fp8 is 'e5m2'; it takes one of e4m3, hybrid"),
        ({"fp8": "hybrid"}, "fp8_recipe is None; it takes one of tensorwise, rowwise"),
        *(
            ({"fp8": "hybrid", "fp8_recipe": recipe}, f"fp8_recipe is '{recipe}'; {near}it takes one of tensorwise, r")
            for recipe, near in (
                ("delayed", ""),
                ("mxfp8", ""),
                ("blockwise", "did you mean 'rowwise'? "),
                ("custom", ""),
            )
        ),
        ({"fp8": "hybrid", "fp8_recipe": "rowwise"}, "fp8 is 'hybrid' with fp8_recipe 'rowwise', which takes e4m3"),
        ({"first_last_layers_bf16": True}, "call shardstack.fp8.use_fp8_products on the layers that should have fp8"),
        ({"fp8_wgrad": False}, "all three products of a linear layer are in fp8"),
        ({"fp8_dot_product_attention": True}, "fp8 is for linear layers"),
    ],
)
def test_configs_that_cannot_be_are_refused(fields, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        TransformerConfig(**fields)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("recipe", GRADIENT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_products_on_a_gpu_are_near_those_of_fp32(recipe: str, dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(6)
    layer = nn.Linear(K, N, bias=False, dtype=dtype, device="cuda")
    use_fp8_products(layer, recipe)
    x, grad = (torch.randn(S * B, n, generator=draws).to("cuda", dtype) for n in (K, N))
    x.requires_grad_()
    output = layer(x)
    output.backward(grad)
    matrices = {"x": x.detach().float(), "w": layer.weight.detach().float(), "g": grad.float()}
    of_gradient = 1 / 8 if recipe == "tensorwise" else 1 / 16
    for found, (left, right), error in (
        (output, ("x", "w.t"), 1 / 16),
        (x.grad, ("g", "w"), of_gradient),
        (layer.weight.grad, ("g.t", "x"), of_gradient),
    ):
        a, b = (matrices[name[0]].t() if name.endswith(".t") else matrices[name] for name in (left, right))
        # Each factor is off by a share of itself, or by a step below the normal numbers; then a rounding to bf16.
        bound = (
            (a.abs() + a.abs().max() / 2**14) @ (b.abs() + b.abs().max() / 2**14) * ((1 + error) * 17 / 16 - 1 + 2**-7)
        )
        assert ((found.float() - a @ b).abs() <= bound).all()
