"""Frozen weights of packed codes, as bitsandbytes' ``Params4bit``, in wrappers that cut and gather parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..plan.pieces import is_packed


def hold_packed_weights(model: nn.Module) -> None:
    """Makes packed weights plain parameters, which can be cut, and gives each what it is unpacked by at every forward.

    A class of its own cannot be cut and gathered. bitsandbytes' layers read ``weight.quant_state`` of whichever
    parameter they hold: FSDP2 gathers into a parameter without it. Scales stay whole on every rank. Never undone.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_packed(parameter) and type(parameter) is not nn.Parameter:
                attributes = {key: value for key, value in vars(parameter).items() if key != "module"}
                with torch._C.DisableTorchFunctionSubclass():
                    plain = nn.Parameter(parameter.detach().as_subclass(torch.Tensor), requires_grad=False)
                vars(plain).update(attributes)
                module._parameters[name] = plain
                module.register_forward_pre_hook(_Unpacking(name, attributes["quant_state"]))
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    # Else bitsandbytes would put its layout for inference in the place of gathered weights.
                    module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


class _Unpacking:
    """Sets the state that a weight is unpacked by, before each forward of the module that holds it."""

    def __init__(self, name: str, state: Any) -> None:
        # Both fixed: frozen codes are unpacked alike for ever. The state's scales are shared by all gathered copies.
        self._name, self._state = name, state

    def __call__(self, module: nn.Module, *unused: Any) -> None:
        module._parameters[self._name].quant_state = self._state  # type: ignore[union-attr]
