"""The base of a model's modules, the half-precision wrapper of a model, and the move from meta to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..base.device import current_device
from ..base.dtypes import LOW_PRECISION
from ..base.errors import ConfigError
from ..base.initialization import allocate_meta_tensors, initialize_parameters, performs_initialization, root_seed
from ..base.parameters import is_packed
from ..dist_checkpointing.model_state import sharded_state_dict
from ..tensor_parallel.groups import resolve_group
from .transformer_config import TransformerConfig

Model = TypeVar("Model", bound=nn.Module)


class MegatronModule(nn.Module):
    """A module that knows its config."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the module's `state_dict`, under Megatron-LM's name."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    sharded_state_dict = sharded_state_dict


def mark_keep_in_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Marks a parameter so that `Float16Module` does not cast it, and returns it."""
    parameter.keep_in_fp32 = True  # type: ignore[attr-defined]
    return parameter


class Float16Module(MegatronModule):
    """Runs `module` in fp16 or bf16: casts parameters once, floating inputs on entry, and outputs to fp32.

    Parameters marked by :func:`mark_keep_in_fp32`, and packed codes, are not cast. Parameters stay the same objects
    with their attributes, so that an optimizer or wrapper built before still has them. Buffers keep their dtype. State
    dicts have the module's own names.

    Raises:
        ConfigError: neither fp16 nor bf16 is set.
    """

    is_model_wrapper = True

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        if not (config.fp16 or config.bf16):
            raise ConfigError("Float16Module with neither fp16 nor bf16 in its config; set one, or use it bare")
        super().__init__(config)
        self.module = module
        for parameter in module.parameters():
            is_kept = getattr(parameter, "keep_in_fp32", False) or is_packed(parameter)
            if parameter.is_floating_point() and not is_kept:
                parameter.data = parameter.data.to(config.compute_dtype)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """Calls the module with fp32 inputs cast to the compute dtype, and casts outputs to fp32, in containers too.

        Args:
            fp32_output: if False, do not cast the outputs.
        """
        inputs, kwargs = _cast((inputs, kwargs), (torch.float32,), self.config.compute_dtype)
        outputs = self.module(*inputs, **kwargs)
        return _cast(outputs, LOW_PRECISION, torch.float32) if fp32_output else outputs

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Calls the module's `set_input_tensor`."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Returns the module's state dict, without a prefix of this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Returns the module's state dict, without a prefix of this wrapper."""
        if isinstance(self.module, MegatronModule):
            return self.module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state dict into the module, with names without a prefix."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def materialize(model: Model, device: torch.device | str | None = None, *, seed: int | None = None) -> Model:
    """Allocates and initialises a model's tensors on the meta device, and returns the model.

        with torch.device("meta"):
            model = GPTModel(...)
        materialize(model)

    Works for a model that was sharded in between: each rank then allocates only its shards, and at most the tensors of
    one module are whole at a time. Values of this project's modules are bitwise those of direct construction under the
    same seed; see :func:`initialize_parameters` for other modules. Tensors with values keep them, and shared
    parameters stay shared. With `config.perform_initialization` False parameters stay uninitialised, for a checkpoint
    to fill.

    Args:
        device: None means the device of this process.
        seed: for modules outside of those with an `init_seed`; by default the model's, else one is drawn.

    Raises:
        ConfigError: nothing says how to fill a parameter or a buffer.
    """
    tensors = allocate_meta_tensors(model, device or current_device())
    if not performs_initialization(model):
        buffers = {id(buffer) for buffer in model.buffers()}
        tensors = [tensor for tensor in tensors if id(tensor) in buffers]
    if tensors:
        seed = root_seed(model) if seed is None else seed
        initialize_parameters(model, seed, only=tensors, tp_group=resolve_group(None))
    return model


def _cast(value: Any, from_dtypes: tuple[torch.dtype, ...], to_dtype: torch.dtype) -> Any:
    """Casts every tensor of `from_dtypes` in `value`, through tuples, lists and dicts."""

    def cast(leaf: Any) -> Any:
        return leaf.to(to_dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in from_dtypes else leaf

    return tree_map(cast, value)
