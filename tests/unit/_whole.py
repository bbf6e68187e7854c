"""Gathers tensors whole."""

from __future__ import annotations

from torch import Tensor, nn

from core.base.module_protocol import unwrap_model
from core.dist_checkpointing import model_state_dict
from core.dist_checkpointing.gathering import TensorStream


def whole(tensor: Tensor) -> Tensor:
    """Gathers a tensor whose shards or flat ranges ranks hold. All ranks call it."""
    ((_, gathered),) = TensorStream({"the tensor": tensor.detach()})
    return gathered


def wholes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns copies of several such tensors, whole. All ranks call it."""
    return {name: tensor.detach().clone() for name, tensor in TensorStream(tensors)}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters and buffers of a model, wrapped or not, whole. All ranks call it."""
    return wholes(model_state_dict(unwrap_model(model)))
