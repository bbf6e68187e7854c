"""Linear layers whose three products are computed in fp8, by torch's scaled product or by torchao.

A layer computes `y = x W^T`, and in backward `dx = dy W` and `dW = dy^T x`. Before each product both matrices are
divided by scales, their largest magnitude over that of the format, and rounded to 8 bits (Micikevicius et al., 2022).
Scales are those of the matrices at hand, so that there is no state. Sums are in fp32.

    recipe             x and W   dy     one scale for
    tensorwise         e4m3      e5m2   each matrix
    tensorwise_e4m3    e4m3      e4m3   each matrix
    rowwise            e4m3      e4m3   each row of a product's first matrix, each column of its second one
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base.device import current_device
from .base.errors import ConfigError, import_extra
from .base.text import choices
from .tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from .tensor_parallel.weight_gradients import Arithmetic, linear, linear_function

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16
"""What the kernels for GPUs want both sizes of a product's second matrix to be multiples of."""


@dataclass(frozen=True)
class _Fp8(Arithmetic):
    recipe: str
    gradient_format: torch.dtype
    by_rows: bool = False

    def linear(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = input_.reshape(-1, input_.shape[-1])
        output = self._multiply(rows, weight.t(), _E4M3).view(*input_.shape[:-1], weight.shape[0])
        return output if bias is None else output + bias

    def mm(self, gradient: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
        product = self._multiply(gradient, other, self.gradient_format)
        return product if out is None else out.copy_(product)

    def compiled(self, input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output: Tensor = torch.ops.shardstack.fp8_linear(input_, weight, bias, self.recipe)
        return output

    def _multiply(self, left: Tensor, right: Tensor, left_format: torch.dtype) -> Tensor:
        """Multiplies `[m, k]` by `[k, n]`."""
        if left.numel() == 0:  # no tokens: there is nothing to scale by
            return left.mm(right)
        if padding := -left.shape[1] % _MULTIPLE:  # tokens, in a weight's gradient
            left, right = F.pad(left, (0, padding)), F.pad(right, (0, 0, 0, padding))
        left_codes, left_scale = self._round(left, left_format, dim=1)
        right_codes, right_scale = self._round(right, _E4M3, dim=0)
        product: Tensor = torch._scaled_mm(
            left_codes.contiguous(),
            right_codes.t().contiguous().t(),
            left_scale,
            right_scale,
            out_dtype=torch.bfloat16 if self.by_rows else left.dtype,  # GPUs have no other one by rows
        )
        return product.to(left.dtype)

    def _round(self, matrix: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
        """Returns the codes of a matrix and their scale, or those of its rows or columns along `dim`.

        If a number is not finite, nothing of its scale is.
        """
        largest = matrix.abs().amax(dim, keepdim=True) if self.by_rows else matrix.abs().amax()
        # Zeros have the scale of the smallest normal number: any positive one is right.
        scale = (largest.float() / torch.finfo(dtype).max).clamp(min=torch.finfo(torch.float32).tiny)
        return (matrix.float() / scale).to(dtype), scale


_RECIPES = {
    fp8.recipe: fp8
    for fp8 in (_Fp8("tensorwise", _E5M2), _Fp8("tensorwise_e4m3", _E4M3), _Fp8("rowwise", _E4M3, by_rows=True))
}

# Compiled code calls a layer by its name, and the compiler sees the operations of its forward and its backward.
torch.library.define("shardstack::fp8_linear", "(Tensor input, Tensor weight, Tensor? bias, str recipe) -> Tensor")
torch.library.impl(
    "shardstack::fp8_linear",
    "CompositeImplicitAutograd",
    lambda input_, weight, bias, recipe: linear_function(input_, weight, bias, _RECIPES[recipe]),
)


class Fp8Linear(nn.Linear):
    """The class that `use_fp8_products` gives to a torch linear layer, whose parameters it leaves alone."""

    arithmetic: Arithmetic

    def forward(self, input: Tensor) -> Tensor:
        """Computes torch's linear function by products in fp8."""
        return linear(input, self.weight, self.bias, self.arithmetic)


def use_fp8_products(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    layers: str | Sequence[str] = ("*",),
    by: Literal["torch", "torchao"] = "torch",
) -> list[str]:
    """Makes linear layers compute in fp8, in place. Call it before the model is wrapped.

    Parameters, their names and dtypes stay. Layers are `torch.nn.Linear` itself, not subclasses, and those of
    `shardstack.tensor_parallel`.

    Args:
        recipe: "tensorwise" (gradients in e5m2, all else in e4m3), "tensorwise_e4m3" or "rowwise"; with torchao the
            name of one of its recipes.
        layers: shell patterns of layers' names, such as ``blocks.*``, or one.
        by: "torch": its scaled product, called here. "torchao": torchao's layers take the place of
            `torch.nn.Linear`.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: an unknown recipe, no kernel for it on this device, a pattern that matches no layer, a layer with
            a size that is not a multiple of 16, or for torchao a model that is the layer itself.
        MissingExtraError: torchao is not installed.
    """
    if by not in ("torch", "torchao"):
        raise ConfigError(f"by is {by!r}; {choices(by, ('torch', 'torchao'))}")
    torchao = import_extra("torchao.float8", "fp8", "by='torchao'") if by == "torchao" else None
    known = [name.value for name in torchao.config.Float8LinearRecipeName] if torchao else list(_RECIPES)
    if recipe not in known:
        raise ConfigError(f"fp8 recipe {recipe!r} does not exist; {choices(str(recipe), known)}")
    of_ours = () if torchao else (ColumnParallelLinear, RowParallelLinear)
    linears = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear or (isinstance(module, of_ours) and module.weight is not None)
    }
    layers = (layers,) if isinstance(layers, str) else layers
    matches = {pattern: fnmatch.filter(linears, pattern) for pattern in layers or ("(none)",)}
    if stray := [pattern for pattern, names in matches.items() if not names]:
        raise ConfigError(f"fp8 layers {stray[0]!r} match no linear layer; there are: {' '.join(linears) or 'none'}")
    chosen = {name: linears[name] for names in matches.values() for name in names}
    shapes = {name: tuple(module.get_parameter("weight").shape) for name, module in chosen.items()}
    if unfit := [
        f"{name} {shape}"
        for name, shape in shapes.items()
        if not all(size and size % _MULTIPLE == 0 for size in shape)
    ]:
        raise ConfigError(
            f"fp8 products need sizes that are multiples of {_MULTIPLE}, and these layers have others: "
            f"{', '.join(unfit)}; leave them out by patterns of the others' names (layers)"
        )
    for dtype in {module.get_parameter("weight").dtype for module in chosen.values()}:
        _check_kernel(_RECIPES.get(recipe, _RECIPES["rowwise"]), dtype)
    if torchao and model in chosen.values():
        raise ConfigError(
            f"torchao's layers take the place of others, and the model is a {type(model).__name__} itself; give a "
            "module that holds it"
        )
    if torchao:
        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        torchao.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda layer, _: layer in chosen.values()
        )
        return list(chosen)
    for module in chosen.values():
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
        module.arithmetic = _RECIPES[recipe]
    return list(chosen)


def _check_kernel(fp8: _Fp8, dtype: torch.dtype) -> None:
    """Computes a smallest layer's products on this process's device."""
    ones = torch.ones(_MULTIPLE, _MULTIPLE, device=current_device(), dtype=dtype)
    try:
        fp8.mm(fp8.linear(ones, ones, None), ones)
    except RuntimeError as error:
        raise ConfigError(
            f"fp8 recipe {fp8.recipe!r} has no kernel for {dtype} on {ones.device.type} in torch {torch.__version__}: "
            "a GPU needs capability 8.9, a CPU torch 2.13 for scales of rows, and layers a dtype of at most 32 bits"
        ) from error
