"""Runs a wrapped model in another library's loop: reduces its gradient once a step, measures, clips, and updates.

`core.optimizer` makes a torch optimizer's updates on shards (`build_update`), or the torch optimizer makes them itself
(`TorchOptimizer`). Both have the interface of `MegatronOptimizer`: step, tensors by name, and scalars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...base.errors import CheckpointError, ConfigError, OptimizerError
from ...base.module_protocol import unwrap_model
from ...dist_checkpointing import global_view, model_state_dict
from ...distributed import _BaseDataParallel
from ...distributed.engine.engine import owner_of
from ...optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from ...optimizer.clip_grads import clip_coefficient, multiply_gradients
from ...optimizer.distrib_optimizer import collect_main_params, gradient_statistics
from ...optimizer.optimizer_state import scalars_of
from ...optimizer.param_groups import groups_to_json, load_groups, saved_settings

_ABSENT = {"amsgrad": False, "maximize": False, "differentiable": False, "nesterov": False, "dampening": 0}
"""Settings of torch's optimizers with the one value that `core.optimizer`'s have."""


def unlike_ours(optimizer: Optimizer) -> str:
    """Names a torch optimizer with an option that `core.optimizer` lacks, as ``AdamW(amsgrad=True)``. "" if none."""
    kind, groups = type(optimizer), optimizer.param_groups
    if kind not in (AdamW, Adam, SGD):
        return kind.__name__
    differences = [
        f"{name}={group[name]}" for group in groups for name, ours in _ABSENT.items() if group.get(name, ours) != ours
    ]
    if kind is Adam:  # adds the decay to the gradient
        coupled = (group for group in groups if not group.get("decoupled_weight_decay"))
        differences += [f"weight_decay={group['weight_decay']}" for group in coupled if group["weight_decay"]]
    if len({group.get("momentum") for group in groups}) > 1:
        differences.append("momentum by group")
    return f"{kind.__name__}({differences[0]})" if differences else ""


def replace_parameters(optimizer: Optimizer, replacements: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Puts the parameters of a wrapped model into an optimizer's groups, in the place of the plain model's."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(param, param) for param in group["params"]]


def build_update(optimizer: Optimizer, wrapper: _BaseDataParallel, advice: str, **fields: Any) -> MegatronOptimizer:
    """Builds the optimizer of `core.optimizer` that makes a torch optimizer's updates on a wrapper's shards.

    AdamW, SGD, and Adam without weight decay have one. The torch optimizer shares groups and state with it, so that
    schedulers of either take effect. Groups differ in learning rate and weight decay, and in nothing else.

    Args:
        optimizer: its parameters are the wrapper's; frozen ones are left out.
        advice: what else a user may choose, for the message.
        fields: others of the config.

    Raises:
        OptimizerError: an update that `core.optimizer` does not have, or groups that do not hold every trainable
            parameter of the model once.
    """
    if unlike := unlike_ours(optimizer):
        raise OptimizerError(
            f"{unlike} cannot update the shards of {wrapper.plan.strategy}; use AdamW, SGD or Adam without weight "
            f"decay, with torch's defaults otherwise, or {advice}"
        )
    groups = optimizer.param_groups
    fields |= {"lr": float(groups[0]["lr"]), "clip_grad": 0.0, "weight_decay": 0.0}
    if isinstance(optimizer, SGD):
        config = OptimizerConfig(optimizer="sgd", sgd_momentum=float(groups[0]["momentum"]), **fields)
    else:
        beta1, beta2 = map(float, groups[0]["betas"])
        config = OptimizerConfig(adam_beta1=beta1, adam_beta2=beta2, adam_eps=groups[0]["eps"], **fields)
    update = get_megatron_optimizer(config, [wrapper], {})
    mains = update.main_tensors()
    trainable = [[param for param in group["params"] if param in mains or param.requires_grad] for group in groups]
    counts = Counter(param for params in trainable for param in params)
    if counts.keys() != mains.keys() or len(counts) != counts.total():
        raise OptimizerError(
            f"{type(optimizer).__name__} lacks {len(mains.keys() - counts)} of the model's trainable parameters, has "
            f"{len(counts.keys() - mains)} others and {counts.total() - len(counts)} twice, and sharding "
            f"{wrapper.plan.strategy!r} updates each once; put every trainable parameter into one group, and freeze "
            f"the others (requires_grad_(False)) before the model is wrapped, or use {advice}"
        )
    update.param_groups.clear()
    for group, params in zip(groups, trainable, strict=True):
        own = {"params": [mains[param] for param in params], "lr": float(group["lr"])}
        update.optimizer.add_param_group(group | own)
    share_groups(optimizer, update)
    return update


def share_groups(optimizer: Optimizer, updates: MegatronOptimizer) -> None:
    """Gives a torch optimizer the groups and state of its updates, not copies. Call it again after loading."""
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
        # Trained parameters by name.
        self._named = {names[p]: p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in self._named.items()}

    def step(self) -> tuple[bool, float | None, int | None]:
        """Updates the parameters, and returns what `MegatronOptimizer.step` does, without a norm."""
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
        moments: dict[str, Tensor] = {}
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
                moments[f"{kind}.{name}"] = global_view(parameter, value)
        return moments

    def state_scalars(self) -> dict[str, Any]:
        """Returns step counts and the settings of groups, as JSON."""
        state = self.optimizer.state
        counts = {name: int(state.get(p, {}).get("step", 0)) for name, p in self._named.items()}
        return scalars_of(counts, {}, groups_to_json(self.optimizer.param_groups, self._names))

    def check_state_scalars(self, scalars: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the settings that each group would get.

        Raises:
            CheckpointError: groups with other parameters.
        """
        return saved_settings(self.optimizer.param_groups, self._names, scalars.get("groups", []))

    def load_state_scalars(self, scalars: Mapping[str, Any]) -> None:
        """Sets step counts and the settings of groups, once the moments are loaded."""
        load_groups(self.optimizer.param_groups, self.check_state_scalars(scalars))
        if isinstance(self.optimizer, SGD):  # counts nothing
            return
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        for name, parameter in self._named.items():
            if state := self.optimizer.state.get(parameter):
                count = float(scalars["step_of"].get(name, scalars["step"]))
                state["step"] = torch.tensor(count, device=parameter.device if on_device else "cpu")


Updates = MegatronOptimizer | TorchOptimizer
"""What a trainer steps, saves and loads for the user's optimizer."""

_TRAINED = "_trained"
"""Attribute of a wrapper: the last `Trained` that was made of the wrapper."""


def wrapper_of(module: nn.Module) -> _BaseDataParallel | None:
    """Returns the wrapper of `module`, a model or a part of one. Returns a wrapper itself. None without a wrapper."""
    if isinstance(module, _BaseDataParallel):
        return module
    owners = map(owner_of, module.parameters())
    return next((owner for owner in owners if isinstance(owner, _BaseDataParallel)), None)


def mix_in(target: Any, kind: type) -> None:
    """Makes an object use the methods of `kind`, a subclass of the object's base, before its own class's methods.

    Nothing puts the old class back. A second call changes nothing.
    """
    own = type(target)
    if issubclass(kind, own):
        target.__class__ = kind
    elif not isinstance(target, kind):
        target.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


class GradientNorm:
    """The whole gradient of a wrapped model as one vector: measures its norm, clips and clamps it.

    The norm is equal on every rank. Squares are summed in double over shards and ranks, and rounded once, so that the
    norm does not depend on the sharding.

    Args:
        wrapper: the wrapper, from `core.distributed.wrap_model`.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        self._wrapper = wrapper
        self._params = collect_main_params([wrapper], has_master=False)
        self._statistics = gradient_statistics(
            self._params, wrapper.plan.groups.model, is_exact=wrapper.plan.settings.reproducible_across_ranks
        )

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales the gradient down to a norm of at most `max_norm`, in place, and returns the norm before, in fp32.

        A norm that is not finite leaves the gradient as it is. Collective.

        Raises:
            ConfigError: another norm than L2.
            OptimizerError: gradients are not reduced.
        """
        if float(norm_type) != 2.0:
            raise ConfigError(
                f"norm_type is {norm_type}; gradients over several ranks are clipped by their L2 norm, 2"
            )
        gradients = self._gradients()
        norm = self._statistics.measure(gradients)[0].float()
        factor = clip_coefficient(norm.double(), max_norm)
        factor = torch.where(torch.isfinite(norm), factor, torch.ones_like(factor))
        multiply_gradients([gradient for gradient in gradients if gradient is not None], factor)
        return norm

    @torch.no_grad()
    def clamp(self, limit: float) -> None:
        """Clamps each element of the gradient to ``[-limit, limit]``, in place.

        Raises:
            OptimizerError: gradients are not reduced.
        """
        if present := [gradient for gradient in self._gradients() if gradient is not None]:
            torch._foreach_clamp_min_(present, -limit)
            torch._foreach_clamp_max_(present, limit)

    def _gradients(self) -> list[Tensor | None]:
        if not self._wrapper.step.is_reduced:
            raise OptimizerError(
                f"gradients are {self._wrapper.step.phase.value} where they were to be measured or clipped; "
                "do it after the last backward of a step, which reduces them, and before the optimizer's step"
            )
        return [param.local_gradient() for param in self._params]


class Trained:
    """A wrapped model, and what updates it.

    Attributes:
        wrapper: the model's wrapper.
        optimizer: the user's optimizer. A trainer sets it with `updates`. None before, and outside of training.
        updates: what updates the parameters in its place. None before, and if the user's own updates replicas.
        loss_is_global: whether losses of the step are divided by the tokens of all ranks already, so that the sum of
            gradients is the result. Else each rank's loss is a mean, and the result is the mean of gradients. A
            trainer whose wrapper sums gradients sets it before a step's gradients are finished.
    """

    def __init__(self, wrapper: _BaseDataParallel) -> None:
        vars(wrapper)[_TRAINED] = self
        self.wrapper = wrapper
        self.optimizer: Optimizer | None = None
        self.updates: Updates | None = None
        self.loss_is_global = False

    @staticmethod
    def of(wrapper: object) -> Trained | None:
        """Returns the `Trained` that an adapter made of a wrapper, or None."""
        return cast("Trained | None", getattr(wrapper, "__dict__", {}).get(_TRAINED))

    @staticmethod
    def of_parameters(parameters: Iterable[object]) -> Trained | None:
        """Returns the `Trained` of the one wrapper that has all of these parameters, or None."""
        owners = set(map(owner_of, parameters))
        return Trained.of(owners.pop()) if len(owners) == 1 else None

    @cached_property
    def norm(self) -> GradientNorm:
        """The gradient as one vector, which is measured and clipped."""
        return GradientNorm(self.wrapper)

    def finish_sums(self) -> None:
        """Makes summed gradients global, once a step. Each rank gets the whole result, or its own shard."""
        if self.wrapper.step.is_reduced:
            return
        self.wrapper.finish_grad_sync()
        if not self.loss_is_global and (ranks := self.wrapper.process_group.size()) > 1:
            self.wrapper.scale_gradients(1.0 / ranks)

    def step(self) -> float | None:
        """Updates the parameters, and zeroes gradients, which have to be gone before the next forward.

        Returns:
            The norm of the gradient, if the update measures it.

        Raises:
            ConfigError: before the optimizer is set up.
        """
        if self.optimizer is None or self.updates is None:
            raise ConfigError("the optimizer is set up when training begins; step and clip after that")
        _, norm, _ = self.updates.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        self.wrapper.zero_grad_buffer()
        return norm

    def check_complete(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raises unless these are all trainable parameters of the model.

        Raises:
            ConfigError: a part of them.
        """
        identities = {id(parameter) for parameter in parameters if parameter.requires_grad}
        params = [parameter for parameter in self.wrapper.module.parameters() if parameter.requires_grad]
        if missing := sum(id(parameter) not in identities for parameter in params):
            raise ConfigError(
                f"gradients are clipped by the norm of the whole model, and {missing} of its {len(params)} trainable "
                "parameters were not given; give model.parameters()"
            )

    def model_tensors(self) -> dict[str, Tensor]:
        """Returns the model's state by name, as tensors of the whole model that share this rank's storage."""
        self.wrapper.engine.parameters.settle()
        return model_state_dict(unwrap_model(self.wrapper))
