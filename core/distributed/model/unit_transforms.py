"""Transforms a model before it is sharded: activation checkpointing, `torch.compile`, packed and left-out weights.

The order for a whole model is: tensor parallelism (built into its layers), activation checkpointing, compilation,
sharding. Each wraps the one before, so that compiled code includes recomputation, and FSDP2's hooks, which gather and
free parameters, are outside of both.

Replaces only a module's `forward`, on the instance, and packed weights, such as bitsandbytes' ``Params4bit``. Adds no
module, so that names in state dicts do not change.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ...base._torch_compat import NO_BACKWARD, current_backward, missing_compiler
from ...base.errors import ParallelConfigError
from ...base.module_protocol import saved_operations
from ...base.parameters import is_packed, packing_of
from ...base.recomputation import Contexts, recompute
from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..groups import LEFT_OUT, DataParallelGroups, is_expert_parameter
from ..plan.parts import UnitTransform
from ..plan.pieces import ParameterNames

SAVED_OPERATIONS: tuple[str, ...] = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    "_scaled_dot_product_attention_math",
)
"""Operations of `torch.ops.aten` whose results "selective" saves: those that take long for the memory they would free.

It also saves those that modules name in ``saved_operations``. Of `EVERY_SECOND_ONE` it saves the first, the third and
so on. Everything else, such as norms and activations, is recomputed.
"""

EVERY_SECOND_ONE: tuple[str, ...] = ("mm", "addmm")
"""Linear layers: saving half of their outputs costs about half of a layer's memory, for a quarter of its time."""


def transform_units(transforms: Iterable[UnitTransform]) -> None:
    """Replaces the forward of each module as planned, on the instance, before the model is sharded. Never restored.

    ``"full"`` recomputation saves only a module's inputs and computes the rest again in backward (Chen et al., 2016);
    ``"selective"`` also saves the results of `SAVED_OPERATIONS`. Each module is compiled by itself, recomputation
    included but for modules with buffers; equal modules share their code.
    """
    for transform in transforms:
        for module in transform.modules:
            # What is compiled with its recomputation writes buffers in both.
            is_compiled_alone = transform.is_compiled and next(module.buffers(), None) is not None
            if is_compiled_alone:
                module.forward = compile_forward(module.forward)
            if transform.recomputes != "none":
                module.forward = _recompute_forward(module, module.forward, transform.recomputes == "selective")
            if transform.is_compiled and not is_compiled_alone:
                module.forward = compile_forward(module.forward)


def _recompute_forward(module: nn.Module, forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    contexts = _selective_contexts(module) if selective else None

    def gather_and_run(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and current_backward() != NO_BACKWARD and isinstance(module, FSDPModule):
            module.unshard()  # backward may come by another path than the unit's output, which gathers it
        return forward(*args, **kwargs)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recompute(functools.partial(gather_and_run, **kwargs), *args, modules=(module,), context_fn=contexts)

    return run


def _selective_contexts(module: nn.Module) -> Callable[[], Contexts]:
    """Returns a function that makes a pair of contexts per forward, whose policy counts the operations of one forward
    and its recomputation."""
    names = (*SAVED_OPERATIONS, *saved_operations(module))
    saved = {operation: name for name in names if (operation := _operation(name)) is not None}

    def make() -> Contexts:
        counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}

        def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = saved.get(operation)
            if name is None:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if name in EVERY_SECOND_ONE:
                count = counts[context.is_recompute]
                count["linear"] += 1
                if count["linear"] % 2 == 0:
                    return CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return]

    return make


def _operation(name: str) -> Any:
    """Returns the operation, of `torch.ops.aten` if it names no library. None if this process does not have it."""
    library, _, own = name.rpartition("::")
    packet = getattr(getattr(torch.ops, library or "aten"), own, None)
    return None if packet is None else packet.default


COMPILER = "inductor"
"""Torch's name of the compiler of units."""


def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that is compiled at its first call.

    Raises (at the first call of what is returned):
        ParallelConfigError: torch has no compiler for this device here.
    """
    compiled_forward = torch.compile(forward, backend=COMPILER)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled_forward(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            if (missing := missing_compiler(error)) is None:
                raise
            problem, remedy = missing
            message = f"compile_units cannot compile here ({problem}); {remedy}, or drop compile_units"
            raise ParallelConfigError(message) from None

    return run


def hold_packed_weights(model: nn.Module) -> None:
    """Makes packed weights plain parameters, which can be cut, and gives each what it is unpacked by at every forward.

    A class of its own cannot be cut and gathered. Layers read what `packing_of` returns of whichever parameter they
    hold: FSDP2 gathers into a parameter without it. Scales stay whole on every rank. Never undone.
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_packed(parameter):
                attributes = {key: value for key, value in vars(parameter).items() if key != "module"}
                with torch._C.DisableTorchFunctionSubclass():
                    plain = nn.Parameter(parameter.detach().as_subclass(torch.Tensor), requires_grad=False)
                vars(plain).update(attributes)
                module._parameters[name] = plain
                module.register_forward_pre_hook(functools.partial(_restore_state, name, packing_of(plain)))
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    # Else bitsandbytes would put its layout for inference in the place of gathered weights.
                    module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _restore_state(name: str, packing: dict[str, Any], module: nn.Module, *unused: Any) -> None:
    """Sets what a weight is unpacked by, before each forward of the module that holds it."""
    vars(module._parameters[name]).update(packing)


# ---- parameters that settings leave out of sharding


def leave_out(
    model: nn.Module, settings: DistributedDataParallelConfig, groups: DataParallelGroups, *, shards: bool
) -> DataParallelGroups:
    """Marks the parameters that ``replicated`` and ``ignored`` name. Every rank calls it.

    Args:
        shards: False where every rank keeps and updates all parameters, so that ``replicated`` changes nothing.

    Returns:
        `groups`, with those of replicated parameters if there are any.

    Raises:
        ParallelConfigError: a pattern matches nothing, or one name of a tied parameter alone; a parameter is named by
            both settings, is replicated and an expert with ranks of its own, is ignored and on the meta device, or is
            a weight of two pipeline stages. Of a stage a pattern may match nothing: it may be of another's.
    """
    names = ParameterNames(model).of
    is_stage = getattr(getattr(model, "config", None), "pipeline_model_parallel_size", 1) > 1
    replicated = _match_patterns("replicated", settings.replicated, names, is_stage)
    ignored = _match_patterns("ignored", settings.ignored, names, is_stage)
    for parameter in (*replicated, *ignored):
        problem = ""
        if parameter in replicated and parameter in ignored:
            problem = "named by replicated and by ignored; drop one"
        elif parameter in replicated and groups.experts is not None and is_expert_parameter(parameter):
            problem = "named by replicated, and an expert with ranks of its own; give a pattern without experts"
        elif is_stage and getattr(parameter, "shared_embedding", False):
            problem = "left out, and a weight of two pipeline stages; untie the embeddings, or give another pattern"
        elif parameter in ignored and parameter.is_meta:
            problem = "named by ignored, and on the meta device, where no wrapper gives it values; materialize it"
        if problem:
            raise ParallelConfigError(f"parameter {names[parameter][0]} is {problem}")
    kinds = [*(("replicated", parameter) for parameter in replicated if shards), *(("ignored", p) for p in ignored)]
    for kind, parameter in kinds:
        setattr(parameter, LEFT_OUT, kind)
    return groups.with_replicated() if replicated and shards else groups


def _match_patterns(
    setting: str, patterns: Sequence[str], names: Mapping[nn.Parameter, tuple[str, ...]], is_stage: bool
) -> dict[nn.Parameter, None]:
    for pattern in patterns:
        if not is_stage and not any(fnmatchcase(name, pattern) for own in names.values() for name in own):
            first = next((own[0] for own in names.values()), "decoder.weight")
            raise ParallelConfigError(
                f"{setting} has the pattern {pattern!r}, which matches no parameter; give shell patterns of whole "
                f"names, such as {first}"
            )
    parameters: dict[nn.Parameter, None] = {}
    for parameter, own in names.items():
        matched = [name for name in own if any(fnmatchcase(name, pattern) for pattern in patterns)]
        if matched and len(matched) < len(own):
            other = next(name for name in own if name not in matched)
            raise ParallelConfigError(
                f"{setting} matches {matched[0]} and not {other}, which are one tied parameter; name both, or neither"
            )
        if matched:
            parameters[parameter] = None
    return parameters
