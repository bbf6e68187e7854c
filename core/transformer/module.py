"""The base of a model's modules, the half-precision wrapper of a model, and the move from meta to a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..base.device import current_device
from ..base.dtypes import LOW_PRECISION
from ..base.errors import ConfigError
from ..base.parameters import is_packed
from ..dist_checkpointing.model_state import sharded_state_dict
from ..tensor_parallel.initialization import draw_init_seed, initialize_parameters
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


@torch.no_grad()
def allocate_meta_tensors(
    model: nn.Module,
    device: torch.device | str,
    parameter_device: torch.device | str | None = None,
    *,
    parameters_have_memory: bool = True,
) -> list[torch.Tensor]:
    """Replaces parameters and buffers on the meta device by empty ones, and returns these.

    A sharded parameter (FSDP2) gets storage for its shard. torch's `to_empty` would also discard existing values,
    untie shared plain parameters, and drop attributes of parameters. `parameter_device`, if given, is the device of
    parameters, for example the host of offloaded shards. Without `parameters_have_memory` they have a shape, a dtype
    and a device, and one element of memory, until a wrapper makes them views of its own.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places[parameter].append((module, name))
    attributes = [dict(vars(parameter)) for parameter in places]
    buffers = [(module, name, b) for module in model.modules() for name, b in module._buffers.items()]
    on_meta = [(module, name) for module, name, buffer in buffers if buffer is not None and buffer.is_meta]
    memory: dict[torch.Tensor, torch.Tensor] = {}

    def storage_for(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta and tensor not in memory:
            is_parameter = tensor in places
            where = parameter_device if parameter_device and is_parameter else device
            if is_parameter and not parameters_have_memory:
                memory[tensor] = tensor.new_empty((1,) * tensor.ndim, device=where).expand(tensor.shape)
            else:
                memory[tensor] = torch.empty_like(tensor, device=where)
        return memory.get(tensor, tensor)

    if places or on_meta:
        model._apply(storage_for)
    for holders, values in zip(places.values(), attributes, strict=True):
        first, name = holders[0]
        parameter = first._parameters[name]
        for module, other in holders[1:]:
            module._parameters[other] = parameter
        for key, value in values.items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
    tensors: list[torch.Tensor | None] = [holders[0][0]._parameters[holders[0][1]] for holders in places.values()]
    tensors += dict.fromkeys(module._buffers[name] for module, name in on_meta)
    return [tensor for tensor in tensors if tensor is not None]


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
        initialize_parameters(model, root_seed(model) if seed is None else seed, only=tensors)
    return model


def root_seed(model: nn.Module) -> int:
    """Returns the seed of modules without an `init_seed`: the model's, or a new one."""
    owner = model.module if isinstance(model, Float16Module) else model
    seed = getattr(owner, "init_seed", None)
    return draw_init_seed() if seed is None else seed


def performs_initialization(model: nn.Module) -> bool:
    """Returns whether the model is to be initialised: False only if its config says so."""
    return bool(getattr(getattr(model, "config", None), "perform_initialization", True))


def _cast(value: Any, from_dtypes: tuple[torch.dtype, ...], to_dtype: torch.dtype) -> Any:
    """Casts every tensor of `from_dtypes` in `value`, through tuples, lists and dicts."""

    def cast(leaf: Any) -> Any:
        return leaf.to(to_dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in from_dtypes else leaf

    return tree_map(cast, value)
