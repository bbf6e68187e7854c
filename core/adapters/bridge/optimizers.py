"""Torch's optimizers on shards: `core.optimizer` makes their updates, with the groups and settings of the user's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from ...distributed import _BaseDataParallel
from ...errors import OptimizerError
from ...optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

_ABSENT = {"amsgrad": False, "maximize": False, "differentiable": False, "nesterov": False, "dampening": 0}
"""Settings of torch's optimizers with the one value that `core.optimizer`'s have."""


def same_update(optimizer: Optimizer, **fields: Any) -> OptimizerConfig | None:
    """Returns the config of the update that a torch optimizer makes; None if `core.optimizer` has none.

    AdamW, SGD, and Adam without weight decay have one. Groups differ in learning rate and weight decay, which are set
    on the groups of what is built, and in nothing else.

    Args:
        fields: others of the config.
    """
    if unlike_ours(optimizer):
        return None
    group = optimizer.param_groups[0]
    fields |= {"lr": float(group["lr"]), "clip_grad": 0.0, "weight_decay": 0.0}
    if isinstance(optimizer, SGD):
        return OptimizerConfig(optimizer="sgd", sgd_momentum=float(group["momentum"]), **fields)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    return OptimizerConfig(adam_beta1=beta1, adam_beta2=beta2, adam_eps=group["eps"], **fields)


def unlike_ours(optimizer: Optimizer) -> str:
    """Names a torch optimizer with an option that `core.optimizer` lacks, as ``AdamW(amsgrad=True)``; "" if none."""
    kind, groups = type(optimizer), optimizer.param_groups
    if kind not in (AdamW, Adam, SGD):
        return kind.__name__
    found = [
        f"{name}={group[name]}" for group in groups for name, ours in _ABSENT.items() if group.get(name, ours) != ours
    ]
    if kind is Adam:  # adds the decay to the gradient
        added = (group for group in groups if not group.get("decoupled_weight_decay"))
        found += [f"weight_decay={group['weight_decay']}" for group in added if group["weight_decay"]]
    if len({group.get("momentum") for group in groups}) > 1:
        found.append("momentum by group")
    return f"{kind.__name__}({found[0]})" if found else ""


def build_update(
    optimizer: Optimizer, wrapper: _BaseDataParallel, groups: Sequence[dict[str, Any]], advice: str, **fields: Any
) -> MegatronOptimizer:
    """Builds the optimizer of `core.optimizer` that makes a torch optimizer's updates on a wrapper's shards.

    Args:
        groups: the torch optimizer's, whose parameters are the wrapper's; frozen ones are left out.
        advice: what else a user may choose, for the message.
        fields: others of the config.

    Raises:
        OptimizerError: an update that `core.optimizer` does not have, or groups that do not hold every trainable
            parameter of the model once.
    """
    config = same_update(optimizer, **fields)
    if config is None:
        raise OptimizerError(
            f"{unlike_ours(optimizer)} cannot update the shards of {wrapper.plan.strategy}; use AdamW, SGD or Adam "
            f"without weight decay, with torch's defaults otherwise, or {advice}"
        )
    built = get_megatron_optimizer(config, [wrapper], {})
    mains = built.main_tensors()
    chosen = [[param for param in group["params"] if param in mains or param.requires_grad] for group in groups]
    counts = Counter(param for params in chosen for param in params)
    if counts.keys() != mains.keys() or len(counts) != counts.total():
        raise OptimizerError(
            f"{type(optimizer).__name__} lacks {len(mains.keys() - counts)} of the model's trainable parameters, has "
            f"{len(counts.keys() - mains)} others and {counts.total() - len(counts)} twice, and sharding "
            f"{wrapper.plan.strategy!r} updates each once; put every trainable parameter into one group, and freeze "
            f"the others (requires_grad_(False)) before the model is wrapped, or use {advice}"
        )
    built.param_groups.clear()
    for group, params in zip(groups, chosen, strict=True):
        own = {"params": [mains[param] for param in params], "lr": float(group["lr"])}
        built.optimizer.add_param_group(group | own)
    return built
