"""What every module of a model shares, half precision around a whole model, and the way from meta to a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..absent_names import MODEL_STATE_DICT, absent_method
from ..device import current_device
from ..errors import ConfigError
from ..tensor_parallel.allocation import allocate_meta_tensors
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
        """What a checkpoint holds of this module: its `state_dict`."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)

    sharded_state_dict = absent_method("sharded_state_dict", MODEL_STATE_DICT)

    def set_is_first_microbatch(self) -> None:
        """Tells modules of a script's own that keep quantised weights (``is_first_microbatch``) to make them anew.

        As in Megatron-LM only where the config says that weights are quantised, which no module here does.
        """
        if any(getattr(self.config, name, None) for name in ("fp8", "fp4", "quant_recipe", "use_kitchen")):
            for module in self.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True  # type: ignore[assignment]


def mark_keep_in_fp32(parameter: nn.Parameter) -> nn.Parameter:
    """Marks a parameter that `Float16Module` leaves in its dtype, and returns it."""
    parameter.keep_in_fp32 = True  # type: ignore[attr-defined]
    return parameter


class Float16Module(MegatronModule):
    """`module` computing in fp16 or bf16: parameters cast once, floating inputs cast in, outputs cast to fp32.

    Parameters under :func:`mark_keep_in_fp32` stay as they are.

    The parameters stay the same objects with the attributes they carry, so that an optimizer or a wrapper made
    before still holds them. Buffers keep their dtype. State dicts have the module's own names.

    Raises:
        ConfigError: neither fp16 nor bf16 is set.
    """

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        if not (config.fp16 or config.bf16):
            raise ConfigError(
                "Float16Module with neither fp16 nor bf16 in its config; set one, or use the module bare"
            )
        super().__init__(config)
        self.module = module
        for parameter in module.parameters():
            if parameter.is_floating_point() and not getattr(parameter, "keep_in_fp32", False):
                parameter.data = parameter.data.to(config.compute_dtype)

    def forward(self, *inputs: Any, fp32_output: bool = True, **kwargs: Any) -> Any:
        """The module's forward: fp32 inputs in the compute dtype, outputs in fp32, also inside containers.

        Args:
            fp32_output: False leaves the outputs in their dtype.
        """
        inputs, kwargs = _cast((inputs, kwargs), (torch.float32,), self.config.compute_dtype)
        outputs = self.module(*inputs, **kwargs)
        return _cast(outputs, (torch.float16, torch.bfloat16), torch.float32) if fp32_output else outputs

    def set_input_tensor(self, input_tensor: Any) -> None:
        """The module's, as `GPTModel.set_input_tensor`."""
        self.module.set_input_tensor(input_tensor)  # type: ignore[operator]

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's, without a prefix of this wrapper."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """The module's, without a prefix of this wrapper."""
        if isinstance(self.module, MegatronModule):
            return self.module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The module's, from names without a prefix."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def materialize(model: Model, device: torch.device | str | None = None, *, seed: int | None = None) -> Model:
    """Gives what a model has on the meta device its storage and its initial values, and returns the model.

        with torch.device("meta"):
            model = GPTModel(...)
        materialize(model)

    Works the same for a model that has been sharded in between: each rank then allocates its shards alone, and at most
    the tensors of one module exist whole at a time. Of this project's modules the values are, bit for bit, those of
    direct construction under the same seed; :func:`initialize_parameters` says what others get. Tensors that have
    values keep them, shared parameters stay shared. With `config.perform_initialization` False parameters are left as
    allocated, for a checkpoint to fill.

    Args:
        device: None is the device of this process.
        seed: for modules outside those that keep an `init_seed`; by default the model's, else one is drawn.

    Raises:
        ConfigError: nothing says how to fill a parameter or a buffer.
    """
    made = allocate_meta_tensors(model, device or current_device())
    if not performs_initialization(model):
        buffers = {id(buffer) for buffer in model.buffers()}
        made = [tensor for tensor in made if id(tensor) in buffers]
    if made:
        initialize_parameters(model, root_seed(model) if seed is None else seed, only=made)
    return model


def root_seed(model: nn.Module) -> int:
    """What initial values outside modules with an `init_seed` of their own are drawn from: its own, or a new one."""
    owner = model.module if isinstance(model, Float16Module) else model
    seed = getattr(owner, "init_seed", None)
    return draw_init_seed() if seed is None else seed


def performs_initialization(model: nn.Module) -> bool:
    """Whether its config, if it has one, wants initial values."""
    return bool(getattr(getattr(model, "config", None), "perform_initialization", True))


def _cast(value: Any, from_dtypes: tuple[torch.dtype, ...], to_dtype: torch.dtype) -> Any:
    """`value` with every tensor of `from_dtypes` in it cast, through tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(to_dtype) if value.dtype in from_dtypes else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, from_dtypes, to_dtype) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(item, from_dtypes, to_dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, from_dtypes, to_dtype) for key, item in value.items()}
    return value
