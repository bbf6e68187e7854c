"""Tensor parallelism by a plan of module names and styles: Hugging Face's names become torch's `ParallelStyle`s."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ...base.errors import ParallelConfigError, WrapError, warn_once
from ...base.text import choices
from ...distributed.model.initial_values import broadcast_tensors, parameter_attributes_kept
from ..bridge.sharding import TENSOR_AXES, axis_sizes

Plan = Mapping[str, ParallelStyle]
"""By module name, in which ``*`` matches any one part."""

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "sequence_parallel": SequenceParallel,
    # transformers 4.5x: `_rep` has a replicated end where the plain style has a sharded one
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    # transformers 5.x
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "all_reduce": lambda: PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate()),
    # Whole parameters on every rank's part of the activations, here of the heads. Which dimension is cut changes no
    # number, because these modules, as Qwen3's q_norm, compute along the last one alone.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
    "replicate": PrepareModuleInput,  # which without layouts changes nothing
}


@functools.cache
def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Returns torch's style for one of Hugging Face's names, the same object each time.

    Raises:
        ParallelConfigError: (a ValueError) an unknown name, listing the known ones; or one that torch has no means
            for.
    """
    if style not in _STYLES:  # as those of transformers for fused weights and for experts
        raise ParallelConfigError(
            f"the tensor-parallel style {style!r} has no counterpart among torch's styles; {choices(style, _STYLES)}. "
            "Leave its modules out of the plan, or shard this model without tensor parallelism"
        )
    return _STYLES[style]()


def get_hf_tp_shard_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """Returns the plan that a Hugging Face model brings, for `fsdp2_strategy_parallelize`, as ``{module:
    ParallelStyle}``.

    It is joined from the plans of the model's class, of the instance, and of the model inside it (``model.``), each
    overriding those before. What names no module of this model, as an entry for another of its variants, is left out.

    Raises:
        ParallelConfigError: the model brings no plan, or one with a style that torch has no means for.
    """
    inner = getattr(model, "model", None)
    styles: dict[str, Any] = {}
    for owner, prefix in ((type(model), ""), (model, ""), (type(inner), "model."), (inner, "model.")):
        plan = getattr(owner, "_tp_plan", None) or {}
        styles |= {f"{prefix}{name}": style for name, style in plan.items()}
    if not styles:
        raise ParallelConfigError(
            f"{type(model).__name__} brings no tensor-parallel plan (_tp_plan); write one, {{module name: "
            "ParallelStyle}, or shard it without tensor parallelism"
        )
    names = [name for name, _ in model.named_modules()]
    return {
        pattern: style if isinstance(style, ParallelStyle) else translate_to_torch_parallel_style(style)
        for pattern, style in styles.items()
        if any(_matches(pattern, name) for name in names)
    }


def cut_as_planned(
    model: nn.Module, tensor_mesh: DeviceMesh | None, plan: Plan | None, device_mesh: DeviceMesh
) -> None:
    """Cuts the model's parameters over `tensor_mesh` in place. Parameters that were one stay one.

    All its ranks begin with what the first of them holds. Where the plan names one of two modules that share a
    weight, the other is cut in the way that fits. Warns once of a plan for a mesh that has no such axis at all.

    Args:
        tensor_mesh: the tensor-parallel axis of `device_mesh`. None, if it has one rank: nothing is cut.

    Raises:
        ParallelConfigError: no plan; or one with an entry that matches no module, or for a kind of module that
            torch cannot cut; or a number of attention heads that the ranks do not divide.
        WrapError: a plan that cuts a shared weight in two ways.
    """
    if tensor_mesh is None:
        if plan and not any(name in (device_mesh.mesh_dim_names or ()) for name in TENSOR_AXES):
            warn_once(
                f"tp_shard_plan has no effect on a mesh ({axis_sizes(device_mesh)}) without {' or '.join(TENSOR_AXES)}"
            )
        return
    if not plan:
        raise ParallelConfigError(
            f"the mesh ({axis_sizes(device_mesh)}) has {tensor_mesh.size()} tensor-parallel ranks, but there is no "
            "tp_shard_plan; give one, as get_hf_tp_shard_plan(model) does, or a mesh without tensor parallelism"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):  # in configs of Hugging Face's
        heads = getattr(getattr(model, "config", None), name, None)
        if isinstance(heads, int) and heads % (ranks := tensor_mesh.size()):
            raise ParallelConfigError(
                f"{ranks} tensor-parallel ranks do not divide the model's {name} {heads}; choose a divisor of it"
            )
    _check_plan(model, plan)
    broadcast_tensors([*model.parameters(), *model.buffers()], tensor_mesh.get_group())
    names_of: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    ties = [names for names in names_of.values() if len(names) > 1]
    whole_plan = {**plan, **_plan_of_partners(model, plan, ties)}
    with parameter_attributes_kept(model):
        for pattern, style in whole_plan.items():
            try:
                parallelize_module(model, tensor_mesh, {pattern: style})
            except NotImplementedError as error:
                raise ParallelConfigError(
                    f"tp_shard_plan has {pattern!r} as {type(style).__name__}, and torch cannot split that module: "
                    f"{error}"
                ) from error
    for names in ties:
        _tie(model, names)


def _check_plan(model: nn.Module, plan: Plan) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle):
            raise ParallelConfigError(
                f"tp_shard_plan has {style!r} for {pattern!r}; it takes a ParallelStyle of torch, as "
                "translate_to_torch_parallel_style gives"
            )
        if not any(_matches(pattern, name) for name in names):
            # A number in a name is that of a layer: the suggestions name all layers at once.
            forms = (".".join("*" if part.isdecimal() else part for part in name.split(".")) for name in names if name)
            raise ParallelConfigError(
                f"tp_shard_plan names {pattern!r}, which matches no module of {type(model).__name__}; "
                f"{choices(pattern, forms)}"
            )


def _matches(pattern: str, name: str) -> bool:
    parts, name_parts = pattern.split("."), name.split(".")
    return len(parts) == len(name_parts) and all(map(fnmatchcase, name_parts, parts))


def _plan_of_partners(model: nn.Module, plan: Plan, ties: list[list[str]]) -> dict[str, ParallelStyle]:
    """Returns styles for embeddings and linear layers that share a weight with one that the plan cuts by
    vocabulary."""
    styles = {}
    for names in ties:
        modules = [name.rpartition(".")[0] for name in names]
        matching = [name for name in modules if any(_matches(pattern, name) for pattern in plan)]
        for name in set(modules) - set(matching) if matching else ():
            module = model.get_submodule(name)
            if isinstance(module, nn.Embedding):
                styles[name] = translate_to_torch_parallel_style("embedding_rowwise")
            elif isinstance(module, nn.Linear):
                styles[name] = translate_to_torch_parallel_style("colwise_gather_output")
    return styles


def _tie(model: nn.Module, names: list[str]) -> None:
    """Ties parameters again, which `parallelize_module` has separated: sets the first module's in all others."""
    first, *others = (model.get_parameter(name) for name in names)
    for name, other in zip(names[1:], others, strict=True):
        if _layout(other) != _layout(first):
            raise WrapError(
                f"{names[0]} and {name} are one parameter, and tp_shard_plan cuts them differently ({_layout(first)} "
                f"and {_layout(other)}); give equal cuts, as embedding_rowwise and colwise_gather_output"
            )
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, first)


def _layout(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "whole"
