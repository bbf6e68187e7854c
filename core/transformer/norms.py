"""LayerNorm and RMSNorm, with torch's fused kernels, or on GPUs with NVIDIA apex's if they are asked for."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..base.errors import ConfigError, warn_once
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
        apex = _apex_module("apex.normalization.fused_layer_norm", "fused_layer_norm_cuda", self.apex_function)
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


def _apex_module(name: str, kernels: str, *functions: str) -> Any | None:
    """Returns a module of NVIDIA apex where ``SHARDSTACK_APEX=1`` asks for its norms, else None.

    Its kernels round otherwise than torch's, so that a run must not begin to use them because a machine has them.

    Args:
        name: of the module, for example ``apex.normalization``.
        kernels: its compiled part, without which its functions exist but cannot be called.
        functions: what it has to have. PyPI's `apex` is another project.

    Raises:
        ConfigError: it is asked for, and not there.
    """
    setting = os.environ.get("SHARDSTACK_APEX", "0")
    if setting not in ("0", "1"):
        raise ConfigError(f"SHARDSTACK_APEX is {setting!r}; it takes 1 or 0")
    if setting == "0":
        return None
    try:
        importlib.import_module(kernels)
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"SHARDSTACK_APEX is 1, but {error}; build apex with its kernels, or unset it") from None
    missing = [function for function in functions if not hasattr(module, function)]
    if missing:
        raise ConfigError(
            f"SHARDSTACK_APEX is 1, but {name} has no {', '.join(missing)}; install NVIDIA's apex (PyPI's is another "
            "project), or unset it"
        )
    warn_once(f"SHARDSTACK_APEX: {name} in place of torch's kernels; its results are rounded otherwise")
    return module
