"""The feed-forward half of a layer, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.errors import ConfigError
from ..base.megatron_names import checks_arguments
from ..base.module_protocol import FusedRows
from ..tensor_parallel.groups import Group
from ..tensor_parallel.initialization import mark_parameter
from ..tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from .module import MegatronModule
from .spec_utils import Builder, ModuleSpec, build_module
from .transformer_config import ACTIVATIONS, TransformerConfig, activation_function

GATE_AND_UP = FusedRows((("gate", 1), ("up", 1)))
"""Rows of a gated MLP's first weight."""


@dataclass
class MLPSubmodules:
    """The linear layers of an MLP."""

    linear_fc1: ModuleSpec | Builder = ColumnParallelLinear
    linear_fc2: ModuleSpec | Builder = RowParallelLinear
    activation_func: None = None
    """Megatron-LM's module for Transformer Engine. Must be None. Set `TransformerConfig.activation_func` instead."""


class MLP(MegatronModule):
    """fc2(activation(fc1(x))), or with `gated_linear_unit` fc2(activation(gate) x up).

    Gate and up are one projection whose rows alternate, g0 u0 g1 u1 ...: any even split of it, over tensor-parallel
    ranks or in a checkpoint, keeps every pair together and in order.

    Args:
        submodules: other linear layers, constructed as these are.
        is_expert: Megatron-LM's argument; refused.
        input_size: width of input and output; default is the config's `hidden_size`.
        ffn_hidden_size: width inside; default is the config's.
        tp_group: default is the tensor-parallel group of `shardstack.parallel_state`.
        name: a label, which nothing reads.

    Raises:
        ConfigError: the config leaves a size at 0, or the submodules have an activation.
        ParallelConfigError: `is_expert` is set.
    """

    @checks_arguments
    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Group = None,
    ) -> None:
        config.check_sizes_given("num_layers", "hidden_size", "ffn_hidden_size")
        submodules = submodules or MLPSubmodules()
        if submodules.activation_func is not None:
            raise ConfigError("MLPSubmodules.activation_func is set; give TransformerConfig.activation_func instead")
        super().__init__(config)
        width, inner = input_size or config.hidden_size, ffn_hidden_size or config.ffn_hidden_size
        self.activation = activation_function(config.activation_func)
        self.is_gated = config.gated_linear_unit
        options = {"config": config, "bias": config.add_bias_linear, "tp_group": tp_group}
        fused = inner * (2 if self.is_gated else 1)
        self.linear_fc1 = build_module(submodules.linear_fc1, width, fused, init_method=config.init_method, **options)
        if self.is_gated:
            mark_parameter(self.linear_fc1, fused_rows=GATE_AND_UP)
        self.linear_fc2 = build_module(
            submodules.linear_fc2, inner, width, init_method=config.output_layer_init_method, **options
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Maps `[s, b, h]` to `[s, b, h]`, or this rank's `[s / tp, b, h]` each with sequence parallelism."""
        hidden = self.linear_fc1(hidden_states)[0]  # [s, b, ffn / tp], twice that when gated
        output: Tensor = self.linear_fc2(activate(hidden, self.activation, self.is_gated))[0]
        return output


def activate(hidden: Tensor, activation: Callable[[Tensor], Tensor], is_gated: bool) -> Tensor:
    """Maps `[..., ffn]` to `[..., ffn]`, or with alternating gate and up `[..., 2 ffn]` to `[..., ffn]`."""
    if not is_gated:
        return activation(hidden)
    output: Tensor
    if torch.compiler.is_compiling():  # the compiler saves as little as `_Gated`, and reads both in place
        gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
        output = activation(gate) * up
    elif activation in _DERIVATIVES:
        output = _Gated.apply(hidden, activation)
    else:
        gate, up = _gate_and_up(hidden)
        output = activation(gate) * up
    return output


def _gate_and_up(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Copies, because activations at a stride of two are not vectorised."""
    gate, up = hidden.unflatten(-1, (-1, 2)).unbind(-1)
    return gate.contiguous(), up.contiguous()


_DERIVATIVES: dict[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] = {
    ACTIVATIONS["silu"]: torch.ops.aten.silu_backward,
    ACTIVATIONS["gelu"]: torch.ops.aten.gelu_backward,
    ACTIVATIONS["gelu_tanh"]: partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}
"""What autograd calls for an activation function: maps the gradient of its result, and its input, to that of its
input."""


class _Gated(torch.autograd.Function):
    """Saves what it is given alone, where autograd would save gate, up and the activated gate. The same bits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.activation = activation
        gate, up = _gate_and_up(hidden)
        return activation(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gate, up = _gate_and_up(ctx.saved_tensors[0])
        grad_up = grad * ctx.activation(gate)
        grad_gate = _DERIVATIVES[ctx.activation](grad * up, gate)
        return torch.stack((grad_gate, grad_up), -1).flatten(-2), None
