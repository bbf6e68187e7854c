"""Finishes and scales gradients, once per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..base import device
from ..base.errors import ConfigError, ParallelConfigError
from ..base.module_protocol import CountsInStep, unwrap_model
from ..base.parameters import kept_range
from ..comm.collectives import all_reduce, all_reduce_by_backend
from ..comm.gloo import Sum
from ..process_groups_config import ProcessGroupCollection
from .data_parallel_base import _BaseDataParallel, check_chunks
from .groups import managed_parameters
from .step import Call, Phase


def finalize_model_grads(
    model: Sequence[_BaseDataParallel],
    num_tokens: torch.Tensor | float | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
    *,
    tp_group: dist.ProcessGroup | None = None,
) -> None:
    """Finishes the gradients of a step, after which the optimizer may read them (Megatron-LM's function of this name).

    In order: every chunk finishes its data-parallel reduction; gradients of parameters that are replicated over
    tensor-parallel ranks but used on different tokens (norms under sequence parallelism) are summed over those ranks;
    the gradients of a weight that the first and the last pipeline stage share are summed over both; with a token
    count, all gradients are divided by the number of tokens of all ranks; whole gradients are gathered from what is
    then final, if they are asked for. What modules have counted in the step is then summed, as by `end_step`.

    Args:
        model: the wrapped model, in the list that Megatron's interfaces take; several are a rank's virtual pipeline
            stages.
        num_tokens: this rank's number of unmasked tokens in the step, for ``config.calculate_per_token_loss``. It is
            summed over data and context parallel ranks here, and the argument is not changed. Of pipeline stages that
            of the last one counts.
        pg_collection: process groups; its `tp` is used as `tp_group`, and replicas are those of the wrapper.
        force_all_reduce: leave whole gradients on every rank, if the wrapper keeps whole ones.
        tp_group: the tensor-parallel ranks; by default the one group of the model's layers, or those of the wrapper.

    Raises:
        ParallelConfigError: gradients are partial sums over tensor-parallel ranks, and the group is unknown.
            Or `force_all_reduce` is given where the wrapper releases whole gradients.
        ConfigError: a token count is given without ``calculate_per_token_loss``, or the reverse.
        ShardstackError: it was already called in this step, or a backward ran late or did not end.
    """
    check_chunks(model, "finalize_model_grads", _BaseDataParallel)
    for chunk in model:
        if chunk.plan.sums_gradients != (num_tokens is not None):
            raise ConfigError(
                f"calculate_per_token_loss is {chunk.plan.sums_gradients}, but num_tokens is {num_tokens}; "
                "gradients are divided either by the number of ranks or by the number of tokens: give both or neither"
            )
        chunk.step.check(Call.FINALIZE)
    for chunk in model:
        chunk.finish_grad_sync()
    tensor_ranks = tp_group if tp_group is not None or pg_collection is None else pg_collection.tp
    _sum_over_sequence_parallel_ranks(model, tensor_ranks)
    _sum_shared_embedding(model)
    if num_tokens is not None:
        scaling_factor = _one_over_global_tokens(num_tokens, model)
        for chunk in model:
            chunk.scale_gradients(scaling_factor)
    for chunk in model if force_all_reduce else ():  # last, of what nothing sums or scales any more
        chunk.engine.gradients.gather()
    end_step([module for chunk in model for module in chunk.counting_modules], model[0].process_group)
    for chunk in model:
        chunk.step.enter(Phase.FINALIZED)


@torch.no_grad()
def end_step(modules: Sequence[CountsInStep], group: dist.ProcessGroup | None) -> None:
    """Adds up over ranks what modules have counted in the step, and ends the step for them.

    `finalize_model_grads` calls it, before the optimizer's step and whether or not that is skipped. All ranks of a
    model call it.

    Args:
        group: the data-parallel and context-parallel ranks; None if this rank is alone.
    """
    by_ranks: dict[dist.ProcessGroup | None, list[CountsInStep]] = defaultdict(list)
    for module in modules:
        by_ranks[module.step_sums_group].append(module)
    for more_ranks, members in by_ranks.items():
        totals = torch.cat([module.step_sums for module in members])
        for ranks in (group, more_ranks):
            if ranks is not None and ranks.size() > 1:
                all_reduce_by_backend(totals, ranks, what="what modules count in a step")
        for module, sums in zip(members, totals.split([len(m.step_sums) for m in members]), strict=True):
            module.use_step_sums(sums)


def _one_over_global_tokens(num_tokens: torch.Tensor | float, model: Sequence[_BaseDataParallel]) -> torch.Tensor:
    # Sum in double, because fp32 counts exactly only up to 16.7 million. Do not read it: that would synchronize a GPU.
    here = device.current_device()
    if isinstance(num_tokens, torch.Tensor):
        total = num_tokens.to(here, torch.float64, copy=True)
    else:
        total = torch.full((), num_tokens, dtype=torch.float64, device=here)
    all_reduce_by_backend(total, model[0].process_group, what="the number of tokens")
    sum_of_last_stage(total, model)
    return torch.where(total > 0, 1.0 / total, 0.0)


def is_last_stage(chunk: torch.nn.Module) -> bool:
    """Returns whether a model, wrapped or not, ends with the loss. One without `post_process` does."""
    return bool(getattr(unwrap_model(chunk), "post_process", True))


def sum_of_last_stage(values: torch.Tensor, model: Sequence[_BaseDataParallel]) -> None:
    """Copies values, in place, from the ranks with the last pipeline stage to all stages. Every stage calls it.

    Args:
        model: this rank's stages.
    """
    stages = model[0].plan.groups.model.pp
    if stages is None or stages.size() == 1:
        return
    if not any(is_last_stage(chunk) for chunk in model):
        values.zero_()
    all_reduce_by_backend(values, stages, what="values of the last pipeline stage")


def _sum_shared_embedding(model: Sequence[_BaseDataParallel]) -> None:
    """Sums the reduced gradients of the weight that the first and the last pipeline stage share, over both.

    Both stages have equal shards of it, except in units of flat buffers: there its place depends on the rest of the
    unit, and whole gradients are summed.
    """
    group = model[0].plan.groups.model.embd
    if group is None or group.size() == 1:
        return
    for chunk in model:
        for name, parameter in unwrap_model(chunk).named_parameters():
            if not (getattr(parameter, "shared_embedding", False) and parameter.requires_grad):
                continue
            gradient, own_range = chunk.engine.gradients.of(parameter), kept_range(parameter)
            if gradient is None or (own_range is not None and own_range[0].numel() != gradient.numel()):
                raise ParallelConfigError(
                    f"this rank has no gradient of {name} for its part of the weight, which the first and the last "
                    "pipeline stage share; untie them, or leave outer_dp_sharding_strategy at no_shard"
                )
            if own_range is None:
                all_reduce_by_backend(gradient, group, what=f"the gradient of {name}")
                continue
            whole = gradient.new_zeros(parameter.numel())
            part = whole[own_range[1] : own_range[1] + gradient.numel()]
            part.copy_(gradient)
            for ranks in (chunk.plan.groups.shard, group):
                all_reduce_by_backend(whole, ranks, what=f"the gradient of {name}")
            gradient.copy_(part)


def _sum_over_sequence_parallel_ranks(model: Sequence[_BaseDataParallel], tp_group: dist.ProcessGroup | None) -> None:
    group = _tensor_parallel_group(model, tp_group)
    if group is not None and group.size() == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for chunk in model:
        for name, parameter in managed_parameters(unwrap_model(chunk)):
            if not getattr(parameter, "sequence_parallel", False):
                continue
            if group is None:
                raise ParallelConfigError(
                    f"the gradient of {name} is a partial sum over tensor-parallel ranks (sequence_parallel), and "
                    "nothing says which ranks; give finalize_model_grads tp_group or pg_collection, or initialise "
                    "shardstack.parallel_state"
                )
            gradient = chunk.engine.gradients.of(parameter)
            if gradient is not None:
                by_dtype[gradient.dtype].append(gradient)
    is_reproducible = any(chunk.plan.settings.reproducible_across_ranks for chunk in model)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if is_reproducible and group is not None:  # the backend's order may depend on an element's place in a shard
            order = (range(group.size()),)
            all_reduce(flat, group, Sum(order=order), what="gradients under sequence parallelism")
        else:
            all_reduce_by_backend(flat, group, what="gradients under sequence parallelism")
        totals = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [t.view_as(g) for t, g in zip(totals, gradients, strict=True)])


def _tensor_parallel_group(
    model: Sequence[_BaseDataParallel], tp_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Returns the group of the caller, else the one group of the layers, else the wrapper's, else None."""
    if tp_group is not None:
        return tp_group
    of_layers = {group for chunk in model for group in chunk.tensor_parallel_groups}
    return of_layers.pop() if len(of_layers) == 1 else model[0].plan.groups.model.tp
