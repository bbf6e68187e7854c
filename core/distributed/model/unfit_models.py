"""Rejects models that a wrapper cannot train correctly, before it changes anything."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch
from torch import Tensor, nn

from ...errors import WrapError


def reject_unfit(module: nn.Module) -> None:
    """Raises for models that no wrapper can train as the plain module would.

    Raises:
        WrapError: a parameter is complex, parameters are trained on several devices, or two share memory without being
            one.
    """
    for name, parameter in module.named_parameters():
        if parameter.is_complex() and parameter.requires_grad:
            raise WrapError(
                f"parameter {name} is complex, which gradient norms and updates do not know; hold its real and "
                "imaginary parts in a real parameter, and view that with torch.view_as_complex"
            )
    devices = {p.device: name for name, p in module.named_parameters() if p.requires_grad and not p.is_meta}
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise WrapError(
            f"parameters are trained on several devices ({found}), whose backwards run at the same time; move the "
            "model to one device, or freeze those of the others"
        )
    _reject_shared_memory(module)


def reject_unfit_for_fsdp2(module: nn.Module) -> None:
    """Raises also for models that FSDP2 cannot shard, gather or reduce.

    Raises:
        WrapError: a parameter is a scalar, empty or not contiguous, or a module has sparse gradients.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise WrapError(f"parameter {name} is a scalar, which cannot be sharded; give it the shape (1,)")
        if parameter.numel() == 0:
            raise WrapError(
                f"parameter {name} has the shape {list(parameter.shape)}, without elements, which FSDP2 cannot "
                "gather; drop it, or use DistributedDataParallel"
            )
        if not parameter.is_contiguous():
            raise WrapError(
                f"parameter {name} is not contiguous in memory, as FSDP2 needs it; assign "
                "parameter.data = parameter.data.contiguous() before wrapping, or use DistributedDataParallel"
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse:
            raise WrapError(
                f"module {name or 'root'} has sparse gradients (sparse=True), which FSDP2 cannot reduce; use "
                "sparse=False, or DistributedDataParallel"
            )


def _reject_shared_memory(module: nn.Module) -> None:
    by_storage: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if type(parameter.data) is Tensor and parameter.layout == torch.strided and parameter.numel():
            start = int(parameter.storage_offset())
            last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            by_storage[parameter.untyped_storage()._cdata].append((start, start + int(last), name))
    for ranges in by_storage.values():
        ranges.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(ranges):
            if start <= end:
                raise WrapError(
                    f"parameters {first} and {second} are two parameters in the same memory, tied by .data, and "
                    "wrapping would untie them; tie them by assigning the parameter itself, as in "
                    "head.weight = embedding.weight"
                )
