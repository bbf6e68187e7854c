"""Optimizers for Lightning: for each optimizer of the user, the one that updates the wrapped parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...dist_checkpointing import global_view
from ...distributed import _BaseDataParallel
from ...distributed.flat_data_parallel import shards_buffers
from ...distributed.gradient_state import Phase
from ...distributed.parameter_owner import owner_of
from ...errors import CheckpointError, OptimizerError
from ...optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from ...optimizer.optimizer_state import scalars_of
from ..bridge.optimizers import build_update


class ShardstackOptimizer(Optimizer):
    """The optimizer of `get_megatron_optimizer` with torch's interface, for schedulers and trainers.

    Build it after the model is wrapped: in ``configure_optimizers``, or after ``fabric.setup_module``.

    Args:
        params: the model's parameters; all trainable ones of the model are updated.
        config: the update rule. Its ``clip_grad`` clips in the step, by the norm of the whole model.

    Raises:
        OptimizerError: the parameters' model is not wrapped.
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig) -> None:
        wrapper = owner_of(next(iter(params), None))
        if not isinstance(wrapper, _BaseDataParallel):
            raise OptimizerError(
                "ShardstackOptimizer was given parameters of a model that is not wrapped; build it in "
                "configure_optimizers, or after fabric.setup_module, from the parameters that the model has then"
            )
        self.wrapper = wrapper
        self.megatron = get_megatron_optimizer(config, [wrapper])
        super().__init__(self.megatron.param_groups, {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Runs `closure` if given, which has to leave reduced gradients, and updates the parameters."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self.megatron.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of the whole model, unless they are zero."""
        _zero(self.wrapper)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state, in torch's layout."""
        return self.megatron.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`."""
        self.megatron.load_state_dict(state_dict)


class TranslatedOptimizer:
    """Carries out a torch optimizer's update on a wrapper's shards.

    Schedulers set the settings in the groups of the user's optimizer, and each step reads them there.

    Raises:
        OptimizerError: shards of flat buffers do not support the optimizer's update.
    """

    def __init__(self, optimizer: Optimizer, wrapper: _BaseDataParallel) -> None:
        self._groups = optimizer.param_groups
        advice = "ShardstackOptimizer, or the sharding 'fsdp2' or 'no_shard'"
        self.megatron = build_update(optimizer, wrapper, self._groups, advice)

    def step(self) -> tuple[bool, float | None, int | None]:
        """Makes a step, as `MegatronOptimizer.step`."""
        for group, updated in zip(self._groups, self.megatron.param_groups, strict=True):
            updated["lr"] = float(group["lr"])
            for name in ("weight_decay", "betas", "eps", "momentum"):
                if name in group:
                    updated[name] = group[name]
        return self.megatron.step()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the state as `MegatronOptimizer.state_tensors`."""
        return self.megatron.state_tensors()

    def state_scalars(self) -> dict[str, Any]:
        """Returns the rest as `MegatronOptimizer.state_scalars`."""
        return self.megatron.state_scalars()

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Continues as `MegatronOptimizer.load_state_scalars`."""
        self.megatron.load_state_scalars(scalars)


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
                if not isinstance(value, Tensor) or _is_count(kind, value, parameter):
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
        return scalars_of({name: self._count(parameter) for name, parameter in self._named.items()}, {})

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Sets the step counts, once the moments are loaded."""
        if isinstance(self.optimizer, torch.optim.SGD):  # counts nothing
            return
        on_device = any(group.get("capturable") or group.get("fused") for group in self.optimizer.param_groups)
        for name, parameter in self._named.items():
            state = self.optimizer.state.get(parameter)
            if state:
                count = float(scalars["step_of"].get(name, scalars["step"]))
                state["step"] = torch.tensor(count, device=parameter.device if on_device else "cpu")

    def _count(self, parameter: nn.Parameter) -> int:
        return int(self.optimizer.state.get(parameter, {}).get("step", 0))


def _is_count(kind: str, value: Tensor, parameter: nn.Parameter) -> bool:
    return kind == "step" and value.numel() == 1


Updates = MegatronOptimizer | TranslatedOptimizer | TorchOptimizer
"""Any of the optimizers that a strategy can step, save and load."""


def updates_of(optimizer: Optimizer, wrapper: _BaseDataParallel) -> Updates:
    """Returns what updates the parameters of a wrapped model for an optimizer.

    Raises:
        OptimizerError: built before the model was wrapped, or one that cannot update it.
    """
    if isinstance(optimizer, ShardstackOptimizer):
        return optimizer.megatron
    own = set(wrapper.parameters())
    if any(param not in own for group in optimizer.param_groups for param in group["params"]):
        raise OptimizerError(
            f"{type(optimizer).__name__} holds parameters that the wrapped model has not: it was built before the "
            "model was wrapped, or for another one; build it in configure_optimizers, or give it to fabric.setup "
            "together with the model"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise OptimizerError(
            "LBFGS computes gradients several times in a step, which this strategy does not; use AdamW or SGD"
        )
    if shards_buffers(wrapper):
        return TranslatedOptimizer(optimizer, wrapper)
    return TorchOptimizer(optimizer, wrapper.module)


class _ZeroesThroughWrapper:
    """`zero_through_wrapper` mixes it into the class of an optimizer."""

    wrapper: _BaseDataParallel
    """`zero_through_wrapper` sets it on the user's optimizer; never cleared."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of the whole model, unless they are zero."""
        _zero(self.wrapper)


def zero_through_wrapper(optimizer: Optimizer, wrapper: _BaseDataParallel) -> None:
    """Lets ``optimizer.zero_grad()`` zero the wrapper's gradients, which ``param.grad`` may not show."""
    if not isinstance(optimizer, (ShardstackOptimizer, _ZeroesThroughWrapper)):
        kind = type(optimizer)
        # Both attributes are set on the user's optimizer and never removed: its parameters belong to this wrapper.
        optimizer.wrapper = wrapper  # type: ignore[attr-defined]
        optimizer.__class__ = type(kind.__name__, (_ZeroesThroughWrapper, kind), {})


def _zero(wrapper: _BaseDataParallel) -> None:
    if wrapper.gradient_state.phase is not Phase.ZEROED:  # between a forward and its backward it would gather again
        wrapper.zero_grad_buffer()
