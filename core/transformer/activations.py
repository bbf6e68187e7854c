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
    """Returns the name of a known function, which configs and checkpoints can store; else the function."""
    return next((name for name, known in ACTIVATIONS.items() if known is function), function)


def activation_function(activation: Activation | ActivationFunction) -> ActivationFunction:
    """Returns the function of a name; returns a function as it is."""
    return activation if callable(activation) else ACTIVATIONS[activation]
