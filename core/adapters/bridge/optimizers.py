"""Torch's optimizers over wrapped models: `core.optimizer` makes their updates on shards, or they make their own.

Both kinds of updates have the interface of `MegatronOptimizer`: step, tensors by name, and scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...dist_checkpointing import global_view
from ...distributed import _BaseDataParallel
from ...errors import CheckpointError, OptimizerError
from ...optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from ...optimizer.optimizer_state import scalars_of

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


def replace_parameters(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Puts the parameters of a wrapped model into an optimizer's groups, in the place of the plain model's."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(param, param) for param in group["params"]]


def build_update(optimizer: Optimizer, wrapper: _BaseDataParallel, advice: str, **fields: Any) -> MegatronOptimizer:
    """Builds the optimizer of `core.optimizer` that makes a torch optimizer's updates on a wrapper's shards.

    The torch optimizer shares groups and state with it, so that schedulers of either take effect.

    Args:
        optimizer: its parameters are the wrapper's; frozen ones are left out.
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
    groups = optimizer.param_groups
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
    share_groups(optimizer, built)
    return built


def share_groups(optimizer: Optimizer, updates: MegatronOptimizer) -> None:
    """Gives a torch optimizer the groups and state of its updates, not copies; also after they were loaded."""
    optimizer.param_groups[:] = updates.param_groups
    optimizer.state = updates.optimizer.state


class TorchOptimizer:
    """Steps a torch optimizer over whole parameters or DTensors, and names its state by parameter.

    Moments are tensors ``<kind>.<parameter>``, as those of `MegatronOptimizer`, so that another sharding and another
    number of ranks continue from them.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        names = {parameter: name for name, parameter in reversed(list(model.named_parameters()))}
        # Trained parameters by name; fixed.
        self._named = {names[p]: p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}

    def step(self) -> tuple[bool, float | None, int | None]:
        """Updates the parameters; returns what `MegatronOptimizer.step` does, without a norm."""
        self.optimizer.step()
        return True, None, None

    def create(self, kinds: Iterable[str]) -> None:
        """Creates moments of these kinds, as zeros, where there are none yet, for a checkpoint to fill."""
        for parameter in self._named.values():
            for kind in kinds:
                if kind not in self.optimizer.state[parameter]:
                    self.optimizer.state[parameter][kind] = torch.zeros_like(parameter)

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the moments that exist, as tensors of the whole model, which share this rank's storage.

        Raises:
            CheckpointError: a state in another shape than its parameter's.
        """
        found: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor) or (kind == "step" and value.numel() == 1):
                    continue
                if value.shape != parameter.shape:
                    raise CheckpointError(
                        f"{type(self.optimizer).__name__} keeps {kind} of parameter {name} in the shape "
                        f"{list(value.shape)}, and checkpoints hold state in the parameter's, "
                        f"{list(parameter.shape)}; use an optimizer that keeps it so, as AdamW does"
                    )
                found[f"{kind}.{name}"] = global_view(parameter, value)
        return found

    def state_scalars(self) -> dict[str, Any]:
        """Returns the step count, and the parameters that deviate from it, as JSON."""
        state = self.optimizer.state
        return scalars_of({name: int(state.get(p, {}).get("step", 0)) for name, p in self._named.items()}, {})

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Sets the step counts, once the moments are loaded."""
        if isinstance(self.optimizer, SGD):  # counts nothing
            return
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        for name, parameter in self._named.items():
            if state := self.optimizer.state.get(parameter):
                count = float(scalars["step_of"].get(name, scalars["step"]))
                state["step"] = torch.tensor(count, device=parameter.device if on_device else "cpu")


Updates = MegatronOptimizer | TorchOptimizer
"""What a trainer steps, saves and loads for the user's optimizer."""
