"""Transforms each unit before it is sharded: activation checkpointing, then `torch.compile`.

The order for a whole model is: tensor parallelism (built into its layers), activation checkpointing, compilation,
sharding. Each wraps the one before, so that compiled code includes recomputation, and FSDP2's hooks, which gather and
free parameters, are outside of both.

Replaces only a module's `forward`, on the instance, and adds no module, so that names in state dicts do not change.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..._torch_compat import NO_BACKWARD, current_backward
from ...tensor_parallel.random import recompute
from ...transformer import document_attention, piecewise_attention
from ..plan.parts import UnitTransform
from .compilation import compiled

SAVED_OPERATIONS: tuple[str, ...] = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    piecewise_attention.OPERATION,
    document_attention.OPERATION,
)
"""Operations, of `torch.ops.aten` where they name no library, whose results "selective" saves: those that take long
for the memory they would free.

Of `EVERY_SECOND_ONE` it saves the first, the third and so on. Everything else, such as norms and activations, is
recomputed.
"""

EVERY_SECOND_ONE: tuple[str, ...] = ("mm", "addmm")
"""Linear layers: saving half of their outputs costs about half of a layer's memory, for a quarter of its time."""


def transform_units(transforms: Iterable[UnitTransform]) -> None:
    """Replaces the forward of each module as planned, on the instance, before the model is sharded. Never restored.

    ``"full"`` recomputation saves only a module's inputs and computes the rest again in backward (Chen et al., 2016);
    ``"selective"`` also saves the results of `SAVED_OPERATIONS`. Each module is compiled by itself, recomputation
    included; equal modules share their code.
    """
    for transform in transforms:
        for module in transform.modules:
            if transform.recomputes != "none":
                module.forward = _recomputing(module, module.forward, transform.recomputes == "selective")
            if transform.is_compiled:
                module.forward = compiled(module.forward, transform.memory_budget)


def _recomputing(module: nn.Module, forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    contexts = _selective_contexts if selective else None

    def gathered(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and current_backward() != NO_BACKWARD and isinstance(module, FSDPModule):
            module.unshard()  # backward may come by another path than the unit's output, which gathers it
        return forward(*args, **kwargs)

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(functools.partial(gathered, **kwargs), *args, context_fn=contexts)

    return recomputing


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns a pair of contexts per forward: a policy counts the operations of one forward and its recomputation."""
    seen: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = _SAVED.get(operation)
        if name is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if name in EVERY_SECOND_ONE:
            count = seen[context.is_recompute]
            count["linear"] += 1
            if count["linear"] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return]


def _operation(name: str) -> Any:
    """Returns the operation that a name of `SAVED_OPERATIONS` means; None if this torch does not have it."""
    library, _, own = name.rpartition("::")
    found = getattr(getattr(torch.ops, library or "aten"), own, None)
    return None if found is None else found.default


_SAVED = {operation: name for name in SAVED_OPERATIONS if (operation := _operation(name)) is not None}
