"""LayerNorm and RMSNorm, with NVIDIA apex's fused kernels if they are installed, else with torch's."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..tensor_parallel.initialization import Initializer, ParameterOwner, initialize_unless_deferred
from .initializers import init_ones, init_zeros
from .transformer_config import TransformerConfig


@functools.cache
def apex_kernels() -> Any | None:
    """Returns apex's module of fused norms; None without it or its kernels. PyPI's `apex` is another project."""
    try:
        importlib.import_module(
            "fused_layer_norm_cuda"
        )  # the compiled part, which apex itself loads at the first call
        module = importlib.import_module("apex.normalization.fused_layer_norm")
    except ImportError:
        return None
    functions = ("fused_layer_norm_affine", "fused_rms_norm_affine")
    return module if all(hasattr(module, name) for name in functions) else None


class _Norm(ParameterOwner):
    """The base of both norms: a weight of ones and, if the formula has one, a bias of zeros."""

    initial_values: ClassVar[Mapping[str, Initializer]]
    weight: nn.Parameter

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float | None = None,
        *,
        partial_gradients: bool | None = None,
    ) -> None:
        super().__init__()
        self.size, self.eps = (hidden_size,), config.layernorm_epsilon if eps is None else eps
        partial = config.sequence_parallel if partial_gradients is None else partial_gradients
        for name, initializer in self.initial_values.items():
            self.add_parameter(name, self.size, initializer, dtype=config.params_dtype, sequence_parallel=partial)
        initialize_unless_deferred(self, config)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) x weight + bias over the last dim (Ba et al., 2016).

    Args:
        hidden_size: size of the last dim.
        eps: added to the variance; None means the config's `layernorm_epsilon`.
        partial_gradients: tensor-parallel ranks see different parts of the input, so that this rank's gradients are
            partial sums; marked as in Megatron, by the parameter attribute `sequence_parallel`. None means the
            config's sequence_parallel.
    """

    initial_values: ClassVar[Mapping[str, Initializer]] = {"weight": init_ones, "bias": init_zeros}
    bias: nn.Parameter

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """`[..., h]` to `[..., h]`."""
        kernels = apex_kernels() if input_.is_cuda else None
        if kernels is not None:
            output: torch.Tensor = kernels.fused_layer_norm_affine(input_, self.weight, self.bias, self.size, self.eps)
            return output
        return F.layer_norm(input_, self.size, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) x weight over the last dim (Zhang and Sennrich, 2019). Arguments as `LayerNorm`."""

    initial_values: ClassVar[Mapping[str, Initializer]] = {"weight": init_ones}

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """`[..., h]` to `[..., h]`."""
        kernels = apex_kernels() if input_.is_cuda else None
        if kernels is not None:
            output: torch.Tensor = kernels.fused_rms_norm_affine(input_, self.weight, self.size, self.eps)
            return output
        return F.rms_norm(input_, self.size, self.weight, self.eps)


def build_norm(
    config: TransformerConfig, hidden_size: int, eps: float | None = None, *, partial_gradients: bool | None = None
) -> LayerNorm | RMSNorm:
    """Builds the norm of `config.normalization`."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(config, hidden_size, eps, partial_gradients=partial_gradients)
