"""The optimizer that a user has built, over the shards of a wrapped model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.errors import ConfigError, OptimizerError, warn_once
from ..base.module_protocol import settle_parameters, unwrap_model
from ..dist_checkpointing.agreement import pipeline_ranks
from ..distributed.data_parallel_base import check_chunks
from ..distributed.step_marks import is_own_optimizer
from .distrib_optimizer import assemble, check_model, groups_of_model
from .main_params import MainParam
from .main_ranges import find_main_params
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig


def shard_optimizer(
    torch_optimizer: Optimizer,
    model: nn.Module | Sequence[nn.Module],
    *,
    clip_grad: float = 0.0,
    loss_scale: float | None = None,
) -> MegatronOptimizer:
    """Makes a torch optimizer update the shards of a wrapped model, with the bits of one process.

    ::

        model = wrap_model(net, FullyShardedDataParallelConfig())
        optimizer = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)

    Any optimizer whose update is elementwise will do: torch's AdamW, Adam, SGD, RMSprop, NAdam, RAdam, Adagrad, and
    others, or a class of your own, with groups as it takes them. A probe of small tensors tells, at construction and
    in `add_param_group`. Rates, decay and other settings are read from its groups at each step. Schedules and hooks of
    steps bind to what is returned as to torch's own; schedules and hooks that the torch optimizer has go on working.

    The state is a shard's too. Checkpoints hold it under the names that the optimizer gives it, and load into any
    wrapper and number of ranks, and into `get_megatron_optimizer`'s where the names are the same (AdamW).

    A parameter in low precision is updated as an fp32 master. In fp16 the loss scale is dynamic: call
    ``optimizer.scale_loss(loss).backward()``.

    Args:
        torch_optimizer: built with parameters of the model, before or after it was wrapped. It may have a part of
            them, if other optimizers have the rest. State goes on: of steps of the plain model, or loaded by torch's
            `load_state_dict`. From now on its `step`, `zero_grad`, `add_param_group`, `state_dict` and
            `load_state_dict` are those of what is returned.
        model: what `wrap_model` returned, a plain module on one rank, or the chunks of a pipeline stage.
        clip_grad: largest global L2 norm of the gradient of these parameters. 0 turns clipping off.
        loss_scale: a constant factor of losses.

    Returns:
        The optimizer. Its `step` returns ``(updated, grad_norm, num_zeros)``.

    Raises:
        OptimizerError: the optimizer is not elementwise, was built for another model, has a group without parameters,
            or was given to this function before.
        ConfigError: an argument of another type, or out of its range.
    """
    if not isinstance(torch_optimizer, Optimizer):
        raise ConfigError(
            f"shard_optimizer takes a torch optimizer and the model, and was given a {type(torch_optimizer).__name__} "
            "first; give torch.optim.AdamW(model.parameters()), for example"
        )
    name = type(torch_optimizer).__name__
    if is_own_optimizer(torch_optimizer):
        raise OptimizerError(f"{name} updates shards already; give shard_optimizer a torch optimizer, once")
    chunks = check_chunks([model] if isinstance(model, nn.Module) else model, "shard_optimizer")
    params = [param for chunk in chunks for param in unwrap_model(chunk).parameters()]
    is_fp16 = any(p.dtype == torch.float16 for p in params) or any(
        getattr(getattr(chunk, "config", None), "fp16", False) for chunk in chunks
    )
    config = OptimizerConfig(clip_grad=clip_grad, loss_scale=loss_scale, fp16=is_fp16)
    from .torch_rule import TorchRule  # a plug-in: runs with other optimizers do not load it

    groups = groups_of_model(chunks)
    settle_parameters(*chunks)

    def choose() -> dict[nn.Parameter, MainParam]:
        given = [param for group in torch_optimizer.param_groups for param in group["params"]]
        found = find_main_params(name, given, chunks)
        check_model(config, chunks, list(found.values()))
        updated = {param for chunk in chunks for param in getattr(chunk, "updated_parameters", ())}
        if (is_fp16 or loss_scale is not None) and updated - {p.param for p in found.values()}:
            raise OptimizerError(
                "the model has another optimizer, and a loss has one scale; give one optimizer all parameters, in "
                "groups, or train in bf16 without loss_scale"
            )
        return found

    stages = pipeline_ranks(groups, OptimizerError)
    found = stages.on_all(choose)
    sizes = stages.all_gather([len(group["params"]) for group in torch_optimizer.param_groups])
    empty = [index for index, of_group in enumerate(zip(*sizes, strict=False)) if not any(of_group)]
    if empty:  # as of a trainer that decays no weight of an adapter
        warn_once(
            f"group {empty[0]} of {name} has no parameter; if it was to have some, look at the condition that chose "
            "them: their names may begin otherwise"
        )
    rule = stages.on_all(lambda: TorchRule(torch_optimizer, found))
    optimizer = assemble(config, chunks, list(found.values()), rule, groups)
    _step_through(torch_optimizer, optimizer)
    return optimizer


def _step_through(torch_optimizer: Any, optimizer: MegatronOptimizer) -> None:
    """Makes a torch optimizer's own methods those of the optimizer over shards."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedulers do not replace it then
    torch_optimizer.step = step
    for name in ("zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        setattr(torch_optimizer, name, getattr(optimizer, name))
