"""Activations of the MLP, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["gelu", "gelu_tanh", "silu"]
ActivationFunction = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(input_: torch.Tensor) -> torch.Tensor:
    return F.gelu(input_, approximate="tanh")


ACTIVATIONS: dict[Activation, ActivationFunction] = {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "silu": F.silu}


def name_of_activation(function: ActivationFunction) -> Activation | ActivationFunction:
    """The name of a function that has one, so that checkpoints and configs can hold it; else the function."""
    return next((name for name, known in ACTIVATIONS.items() if known is function), function)


def activation_function(activation: Activation | ActivationFunction) -> ActivationFunction:
    """The function of a name, or the function given."""
    return activation if callable(activation) else ACTIVATIONS[activation]
