"""What is done to each unit before it is sharded: activation checkpointing, then `torch.compile`.

The order of a whole model is: tensor parallelism (its layers have it built in), activation checkpointing, compilation,
sharding. Each wraps the one before, so that what is compiled knows what it recomputes, and FSDP2's hooks, which gather
and free parameters, stand outside both.

Only a module's `forward` is replaced, on the instance: no module is added, so that names in state dicts stay.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ...errors import ParallelConfigError
from ...tensor_parallel.initialization import ParameterOwner
from ...tensor_parallel.random import recompute
from .units import Unit

ActivationCheckpointing = Literal["none", "full", "selective"]

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
)
"""Operations of `torch.ops.aten` whose results "selective" keeps: those that take long for the memory they give back.

Of `EVERY_SECOND_ONE` it keeps the first, the third and so on. Everything else, as norms and activations, is computed
again.
"""

EVERY_SECOND_ONE: tuple[str, ...] = ("mm", "addmm")
"""Linear layers: half of their outputs kept is about the memory of half of the layer, for a quarter of its time."""


def prepare_units(
    units: Iterable[Unit],
    *,
    activation_checkpointing: ActivationCheckpointing = "none",
    every_nth: int = 1,
    compile_units: bool = False,
) -> None:
    """Replaces the forward of every unit as asked, in place, before `shard_model` shards it.

    Units that are one layer of weights (an embedding, a projection) are left alone and not counted: to compute their
    one operation again would save nothing. So are units inside units, which are part of what is done to these.

    Args:
        units: as `plan_units` gives them.
        activation_checkpointing: ``"full"`` keeps a unit's inputs alone and computes the rest again in backward (Chen
            et al., 2016); ``"selective"`` also keeps the results of `SAVED_OPERATIONS`.
        every_nth: do so to units number 0, n, 2 n, ... of those that count.
        compile_units: compile each unit by itself, with what it recomputes. Equal units share their code.

    Raises:
        ParallelConfigError: a value that is not one of these; a model that recomputes by itself as well
            (``recompute_granularity``); or no unit that it could be done to.
    """
    if activation_checkpointing not in get_args(ActivationCheckpointing):
        raise ParallelConfigError(
            f"activation_checkpointing is {activation_checkpointing!r}; it takes one of "
            f"{', '.join(get_args(ActivationCheckpointing))}"
        )
    if every_nth < 1:
        raise ParallelConfigError(f"activation_checkpointing_interval is {every_nth}; it takes a positive number")
    if activation_checkpointing == "none" and not compile_units:
        return
    units = list(units)
    inside = {below for unit in units for module in unit.modules for below in module.modules() if below is not module}
    layers = [
        unit
        for unit in units
        if unit.is_needed_in_backward
        and not inside.issuperset(unit.modules)
        and not all(map(_is_one_layer, unit.modules))
    ]
    if not layers:
        raise ParallelConfigError(
            f"activation_checkpointing is {activation_checkpointing!r} and compile_units {compile_units}, but no unit "
            "has more than one layer of weights; name the classes of the model's blocks in sub_modules_to_wrap"
        )
    if activation_checkpointing != "none":
        _reject_own_recomputation(layers, activation_checkpointing)
        for module in itertools.chain(*(unit.modules for unit in layers[::every_nth])):
            module.forward = _recomputing(module.forward, activation_checkpointing == "selective")
    if compile_units:
        for module in itertools.chain(*(unit.modules for unit in layers)):
            module.forward = torch.compile(module.forward)


def _is_one_layer(module: nn.Module) -> bool:
    is_torchs = type(module).__module__.startswith("torch.nn.modules.") and not any(True for _ in module.children())
    return is_torchs or isinstance(module, ParameterOwner)


def _reject_own_recomputation(units: Iterable[Unit], activation_checkpointing: str) -> None:
    for module in itertools.chain(*(unit.modules for unit in units)):
        for submodule in module.modules():
            granularity = getattr(getattr(submodule, "config", None), "recompute_granularity", None)
            if granularity is not None:
                raise ParallelConfigError(
                    f"activation_checkpointing is {activation_checkpointing!r} in the wrapper's settings and "
                    f"recompute_granularity is {granularity!r} in the model's config: both would compute the same "
                    "activations again; drop one of the two"
                )


def _recomputing(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    contexts = _selective_contexts if selective else None

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(functools.partial(forward, **kwargs), *args, context_fn=contexts)

    return recomputing


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """One pair for each forward: what is kept depends on how many operations came before, in it and in its replay."""
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


_SAVED = {getattr(torch.ops.aten, name).default: name for name in SAVED_OPERATIONS if hasattr(torch.ops.aten, name)}
