"""LayerNorm and RMSNorm, with torch's fused kernels, or on GPUs with NVIDIA apex's if they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import apex_module
from ..base.initialization import Initializer
from ..tensor_parallel.initialization import ParameterOwner, initialize_unless_deferred
from .transformer_config import TransformerConfig


class _Norm(ParameterOwner):
    """The base of both norms: a weight of ones and, if the formula has one, a bias of zeros."""

    initial_values: ClassVar[Mapping[str, Initializer]]
    apex_function: ClassVar[str]
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
            self.add_parameter(name, self.size, initializer, config=config, sequence_parallel=partial)
        initialize_unless_deferred(self, config)
        # Looked for here, because a compiled forward could not import.
        apex = apex_module("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda", self.apex_function)
        self._apex: Callable[..., torch.Tensor] | None = getattr(apex, self.apex_function, None)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) x weight + bias over the last dim (Ba et al., 2016).

    Args:
        hidden_size: size of the last dim.
        eps: added to the variance; None means the config's `layernorm_epsilon`.
        partial_gradients: tensor-parallel ranks see different parts of the input, so that this rank's gradients are
            partial sums; marked as in Megatron, by the parameter attribute `sequence_parallel`. None means the
            config's sequence_parallel.
    """

    initial_values: ClassVar[Mapping[str, Initializer]] = {"weight": nn.init.ones_, "bias": nn.init.zeros_}
    apex_function = "fused_layer_norm_affine"
    bias: nn.Parameter

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Maps `[..., h]` to `[..., h]`."""
        if self._apex is not None and input_.is_cuda:
            return self._apex(input_, self.weight, self.bias, self.size, self.eps)
        return F.layer_norm(input_, self.size, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) x weight over the last dim (Zhang and Sennrich, 2019). Arguments as `LayerNorm`."""

    initial_values: ClassVar[Mapping[str, Initializer]] = {"weight": nn.init.ones_}
    apex_function = "fused_rms_norm_affine"

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Maps `[..., h]` to `[..., h]`."""
        if self._apex is not None and input_.is_cuda:
            return self._apex(input_, self.weight, self.size, self.eps)
        return F.rms_norm(input_, self.size, self.weight, self.eps)


def build_norm(
    config: TransformerConfig, hidden_size: int, eps: float | None = None, *, partial_gradients: bool | None = None
) -> LayerNorm | RMSNorm:
    """Builds the norm of `config.normalization`."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(config, hidden_size, eps, partial_gradients=partial_gradients)
