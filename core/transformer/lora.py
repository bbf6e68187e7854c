"""Low-rank adaptation (LoRA, Hu et al., 2021): freezes linear layers and trains a small update next to each.

A layer `y = x W^T + b` becomes `y = x W^T + b + alpha / rank x (x A^T) B^T`, with `A` `[rank, k]` and `B` `[n, rank]`.
`B` starts at zero, so that the adapted model first computes the same as the model. The layer keeps its class, its
parameters and their names; the update is its submodule `adapter` with `linear_in` (A) and `linear_out` (B), as in
Megatron Bridge. A model with adapters therefore has the same initial values, and loads the same weights, as one
without.

Each matrix is split like its layer. For a column-parallel layer every rank has the whole `A` and its rows of `B`; for
a row-parallel one its columns of `A` and the whole `B`. Only activations of `rank` features cross ranks.

`freeze_parameters` excludes parameters from training by patterns of their names, without adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..base.errors import ConfigError
from ..base.initialization import Initializer, initialize_parameters, performs_initialization, root_seed
from ..dist_checkpointing.agreement import pipeline_ranks
from ..model_parallel_config import ModelParallelConfig
from ..tensor_parallel.groups import Group
from ..tensor_parallel.initialization import ParameterOwner, deferred_initialization, mark_parameter
from ..tensor_parallel.layers import ColumnParallelLinear, Output, RowParallelLinear
from ..tensor_parallel.weight_gradients import linear
from .moe.experts import GroupedLinear

LoRATarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""The linear layers of a transformer layer, by Megatron's names."""

_Layer = ColumnParallelLinear | RowParallelLinear


class Adapter(nn.Module):
    """The update of one layer: maps the layer's input to a tensor that is added to its output.

    The layer owns the adapter, as its attribute ``adapter``, from `add_lora` until `merge_into`.

    Args:
        layer: linear layer to adapt, whose sizes and layout the adapter has.
        rank: rank of the update.
        alpha: numerator of the update's factor `alpha / rank`.

    Attributes:
        hook: handle of the hook that adds the update to the layer's output. `merge_into` removes it.
    """

    def __init__(self, layer: _Layer, rank: int, alpha: float) -> None:
        super().__init__()
        self.scale = alpha / rank
        self.linear_in: _WholeLinear | RowParallelLinear
        self.linear_out: _WholeLinear | ColumnParallelLinear
        config, group = layer.config, layer.tp_group
        options: dict[str, Any] = {"config": config, "bias": False, "tp_group": group}
        if isinstance(layer, ColumnParallelLinear):
            self.linear_in = _WholeLinear(layer.input_size, rank, config, _uniform_by_inputs, group)
            self.linear_out = ColumnParallelLinear(
                rank, layer.output_size, init_method=nn.init.zeros_, gather_output=layer.gather_output, **options
            )
            if fused := getattr(layer.weight, "fused_rows", None):
                mark_parameter(self.linear_out, fused_rows=fused)
        else:
            is_cut = layer.input_is_parallel
            self.linear_in = RowParallelLinear(
                layer.input_size, rank, init_method=_uniform_by_inputs, input_is_parallel=is_cut, **options
            )
            self.linear_out = _WholeLinear(rank, layer.output_size, config, nn.init.zeros_, group)
        self.hook = layer.register_forward_hook(self._add_to_output)

    def forward(self, input_: Tensor) -> Tensor:
        """Maps `[s, b, k]` to `[s, b, n]`, each split like the layer's input and output."""
        features = self.linear_in(input_)[0]  # [s, b, rank]
        output: Tensor = self.linear_out(features * self.scale)[0]
        return output

    def merge_into(self, layer: nn.Module) -> None:
        """Adds `alpha / rank x B A` to this rank's part of the layer's weight, and removes itself from the layer."""
        low_in, low_out = (part.get_parameter("weight") for part in (self.linear_in, self.linear_out))
        layer.get_parameter("weight").add_(low_out @ low_in, alpha=self.scale)
        self.hook.remove()
        del layer.adapter

    def _add_to_output(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Output | Tensor) -> Output | Tensor:
        if isinstance(output, Tensor):  # losses, from a layer that has added the update itself
            return output
        return output[0] + self(inputs[0]), output[1]


class _WholeLinear(ParameterOwner):
    """`y = x A^T` with `A` replicated on tensor-parallel ranks, for a whole sequence or this rank's part of it."""

    weight: nn.Parameter

    def __init__(
        self, input_size: int, output_size: int, config: ModelParallelConfig, init_method: Initializer, group: Group
    ) -> None:
        super().__init__(group)
        self.add_parameter(
            "weight", (output_size, input_size), init_method, config=config, sequence_parallel=config.sequence_parallel
        )

    def forward(self, input_: Tensor) -> Output:
        return linear(input_, self.weight), None


def add_lora(
    model: nn.Module, rank: int | None, alpha: float | None = None, targets: Sequence[str] | None = None
) -> list[str]:
    """Freezes a model and adds trainable adapters to its linear layers. Call it before the model is wrapped.

    Adapters are initialised like the model's parameters: by name, from its seed, or when it leaves the meta device.

    Args:
        rank: rank of every update, at any tensor-parallel size; None adds and freezes nothing.
        alpha: updates are scaled by `alpha / rank`; None means the rank.
        targets: last parts of the names of column-parallel and row-parallel layers; None means all `LoRATarget`.

    Returns:
        The names of these layers.

    Raises:
        ConfigError: there is no target, a target matches no layer or matrices of experts, or the model has adapters
            already.
    """
    if rank is None:
        return []
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _Layer) and module.weight is not None
    }
    layer_names = {name.rpartition(".")[2] for name in linears}
    if any(isinstance(module, Adapter) for module in model.modules()):
        raise ConfigError("the model has LoRA adapters; merge them first, or train those")
    targets = get_args(LoRATarget) if targets is None else targets
    if not targets:
        raise ConfigError("LoRA adapters are requested without a target; name a layer, or leave targets out")
    for target in targets:
        if target not in layer_names:
            has = ", ".join(sorted(layer_names)) or "none"
            raise ConfigError(f"LoRA target {target!r} names no linear layer of the model, which has {has}")
    of_experts = (name for name, module in model.named_modules() if isinstance(module, GroupedLinear))
    if matrices := [name for name in of_experts if name.rpartition(".")[2] in targets]:
        raise ConfigError(
            f"LoRA targets {' '.join(targets)} include {matrices[0]}, and the matrices of experts take no adapters; "
            "give linear_qkv and linear_proj alone"
        )
    model.requires_grad_(False)
    layers = {name: layer for name, layer in linears.items() if name.rpartition(".")[2] in targets}
    adapters: list[nn.Parameter] = []
    for layer in layers.values():
        with deferred_initialization(), layer.get_parameter("weight").device:
            layer.adapter = adapter = Adapter(layer, rank, rank if alpha is None else alpha)
        adapters += adapter.parameters()
    if performs_initialization(model) and not any(parameter.is_meta for parameter in adapters):
        initialize_parameters(model, root_seed(model), only=adapters)
    return list(layers)


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Adds every update to its layer's weight, removes the adapters, and unfreezes all parameters."""
    for layer in list(model.modules()):
        if isinstance(adapter := getattr(layer, "adapter", None), Adapter):
            adapter.merge_into(layer)
    model.requires_grad_(True)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter of this name is an adapter's."""
    return ".adapter." in name


def _uniform_by_inputs(tensor: Tensor, generator: torch.Generator) -> None:
    """Draws from U(-1 / sqrt(k), 1 / sqrt(k)) for a `[rank, k]` matrix, as the paper's code and peft do."""
    bound = 1.0 / math.sqrt(tensor.shape[1])
    tensor.uniform_(-bound, bound, generator=generator)


def freeze_parameters(model: nn.Module | Sequence[nn.Module], patterns: Sequence[str]) -> list[str]:
    """Excludes parameters from training, before the model is wrapped, and returns their names.

    Args:
        model: the model, or all of this rank's pipeline stages; then every rank of the pipeline calls it.
        patterns: shell patterns of parameter names, such as ``decoder.layers.0.*``.

    Raises:
        ConfigError: a pattern matches no parameter, or nothing is left to train.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    names = [name for stage in models for name, _ in stage.named_parameters()]
    names = list(dict.fromkeys(name for of_rank in pipeline_ranks().all_gather(names) for name in of_rank))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"freeze {pattern!r} matches no parameter; names are as {names[0]} and {names[-1]}")
    if all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        raise ConfigError(f"freeze {' '.join(patterns)} matches all {len(names)} parameters; leave some to train")
    return [name for stage in models for name in freeze_matching(stage, patterns)]


def freeze_matching(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freezes the matching parameters of a stage and returns their names. Patterns may match none of them, or all."""
    names = []
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
            names.append(name)
    return names
