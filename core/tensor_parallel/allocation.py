"""Allocates a model's tensors that are on the meta device, keeping ties and custom attributes."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import nn


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
    and a device, and one element of memory (`has_no_memory`), until a wrapper makes them views of its own.
    """
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places[parameter].append((module, name))
    attributes = [dict(vars(parameter)) for parameter in places]
    on_meta = [(module, name) for module in model.modules() for name, b in module._buffers.items() if _is_meta(b)]
    allocated: dict[torch.Tensor, torch.Tensor] = {}

    def storage_for(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta and tensor not in allocated:
            is_parameter = tensor in places
            where = parameter_device if parameter_device and is_parameter else device
            if is_parameter and not parameters_have_memory:
                allocated[tensor] = tensor.new_empty((1,) * tensor.ndim, device=where).expand(tensor.shape)
            else:
                allocated[tensor] = torch.empty_like(tensor, device=where)
        return allocated.get(tensor, tensor)

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
    tensors = itertools.chain(
        (holders[0][0]._parameters[holders[0][1]] for holders in places.values()),
        dict.fromkeys(module._buffers[name] for module, name in on_meta),
    )
    return [tensor for tensor in tensors if tensor is not None]


def has_no_memory(parameter: torch.Tensor) -> bool:
    """Returns whether `allocate_meta_tensors` gave a parameter only a shape."""
    return parameter.numel() > 1 and parameter.untyped_storage().nbytes() == parameter.element_size()


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta
