"""Translates torch's optimizers into settings of `core.optimizer`, whose optimizers update shards."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Adam, AdamW, Optimizer

from ..optimizer import OptimizerConfig

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
