"""A strategy of Lightning's Fabric: any module in one of this library's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import Tensor, nn
from torch.optim import Optimizer

from ...base.errors import CheckpointError, ConfigError, OptimizerError
from ...distributed import DistributedDataParallelConfig, _BaseDataParallel, finalize_model_grads
from ...distributed.fully_sharded_data_parallel_config import FSDP2
from ...distributed.step import Phase
from ..bridge.trained import Trained, mix_in
from . import shared


class NoSync(_BackwardSyncControl):
    """Fabric's ``no_backward_sync``: `no_sync` of the wrapper."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Lets gradients accumulate on this rank where `enabled`."""
        return shared.trained_of(module).wrapper.no_sync() if enabled else nullcontext()


class ShardstackFabricStrategy(shared.Processes, DDPStrategy):
    """Trains modules under any wrapper of `shardstack.distributed`, in a loop of the user's.

    `fabric.backward` reduces gradients, once a step where the others run in `fabric.no_backward_sync`; the optimizer's
    step zeroes them. `fabric.clip_gradients` clips by the norm of the whole model.

    Args:
        sharding: as in `ShardstackStrategy`.
        **arguments: ``units``, and Lightning's, as there.

    Raises:
        ConfigError: an unknown sharding.
    """

    def __init__(self, sharding: str | DistributedDataParallelConfig = FSDP2, **arguments: Any) -> None:
        super().__init__(sharding, **arguments)
        self._backward_sync_control = NoSync()
        # The model of each of the user's optimizers. `setup_optimizer` adds it.
        self._trained: dict[Optimizer, Trained] = {}

    def _configure_launcher(self) -> None:
        """Checks the precision. Fabric calls it when it has set the strategy's parts."""
        shared.check_precision(self.precision)
        super()._configure_launcher()

    # ---- setup

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Builds a module on this rank's device, or on meta with ``empty_init``."""
        return self.built_here(empty_init, self.precision.module_init_context())

    def setup_module(self, module: nn.Module) -> _BaseDataParallel:
        """Wraps a module."""
        return shared.wrap(module, self.settings, self.units).wrapper

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Wraps a module, and lets optimizers that were built from it update the wrapped one's parameters.

        Raises:
            OptimizerError: an optimizer of other parameters.
        """
        wrapper = self.setup_module(module)
        return wrapper, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Finds what updates the parameters for an optimizer.

        Raises:
            OptimizerError: built for another model, or one that cannot update its shards.
        """
        trained = shared.take_optimizer(optimizer)
        if any(other.wrapper is trained.wrapper for other in self._trained.values()):
            raise OptimizerError(
                f"{type(optimizer).__name__} is a second optimizer of one model; a step of the first zeroes the "
                "gradients of all: use one, with a group of parameters for each setting"
            )
        self._trained[optimizer] = trained
        vars(optimizer)["wrapper"] = trained.wrapper
        mix_in(optimizer, _ZeroesThroughWrapper)
        return optimizer

    # ---- a step

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Runs backward, and finishes the gradients of the models that it reached and that do not accumulate."""
        super().backward(tensor, module, *args, **kwargs)
        for trained in self._trained.values():  # in one order on all ranks
            wrapper = trained.wrapper
            if wrapper.step.phase is Phase.ACCUMULATING and wrapper.syncs_gradients:
                finalize_model_grads([wrapper])

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Updates the parameters, and zeroes gradients.

        Raises:
            ConfigError: a closure.
        """
        if kwargs.get("closure") is not None:
            raise ConfigError("optimizer.step was given a closure; run it before, and call step() without")
        self._trained[optimizer].step()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clips by the norm of the whole model's gradient, and returns that, 0-dim in fp32.

        Raises:
            ConfigError: another norm than L2.
            OptimizerError: a norm that is not finite, where that is to be an error.
        """
        norm = shared.trained_of(module).norm.clip(float(max_norm), norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise OptimizerError(
                f"the norm of the gradient is {norm.item()}; look for the cause, or give error_if_nonfinite=False"
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps each element of the gradient."""
        shared.trained_of(module).norm.clamp(float(clip_val))

    # ---- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Returns the tensors of the whole model, each rank with its part of their values."""
        return shared.trained_of(module).model_tensors()

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Writes a folder, on all ranks together: one model, its optimizer if there is one, and values.

        Raises:
            CheckpointError: several models or optimizers, or values that no checkpoint holds.
        """
        trained, values, has_optimizer = self._split(state)
        for name, value in values.items():
            if hasattr(value, "state_dict"):  # as of a scheduler
                values[name] = value.state_dict()
        model = self.get_module_state_dict(trained.wrapper)
        if foreign_names := [name for name in filter or {} if not isinstance(state.get(name), nn.Module)]:
            raise CheckpointError(f"filter names {', '.join(foreign_names)}; only the model's tensors can be filtered")
        for keeps in (filter or {}).values():
            model = {name: tensor for name, tensor in model.items() if keeps(name, tensor)}
        shared.save_folder(self.folder(path), trained, model, values, with_optimizer=has_optimizer)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fills the model, and its optimizer if given, from a folder, and puts saved values into `state`.

        Returns:
            The values that `state` does not name.

        Raises:
            CheckpointError: no model in `state`, another kind of file, another model, or damaged.
        """
        states = {"model": state} if isinstance(state, nn.Module) else state
        if not isinstance(states, dict):
            raise CheckpointError("fabric.load needs the model to fill; give state={'model': model, ...}")
        trained, values, has_optimizer = self._split(states)
        folder = self.folder(path)
        values_there: dict[str, Any] = shared.load_folder(folder, trained, strict=strict, with_optimizer=has_optimizer)
        missing = [name for name in values if name not in values_there]
        if strict and missing:
            raise CheckpointError(f"{folder} does not hold {', '.join(missing)}; give strict=False, or leave them out")
        for name, value in values.items():
            if name in values_there:
                value_there = values_there.pop(name)
                if hasattr(value, "load_state_dict"):
                    value.load_state_dict(value_there)
                else:
                    states[name] = value_there
        return values_there

    # ---- inside

    def _split(self, state: Mapping[str, Any]) -> tuple[Trained, dict[str, Any], bool]:
        """Returns the model, the values that are neither model nor optimizer, and whether there is an optimizer.

        Raises:
            CheckpointError: several models or optimizers, or an optimizer that was not set up.
        """
        models = [value for value in state.values() if isinstance(value, nn.Module)]
        optimizers = [value for value in state.values() if isinstance(value, Optimizer)]
        if len(models) != 1 or len(optimizers) > 1:
            raise CheckpointError(
                f"a checkpoint was asked for with {len(models)} models and {len(optimizers)} optimizers; a folder "
                "holds one model and at most one optimizer: use a folder for each"
            )
        trained = shared.trained_of(models[0])
        optimizer = getattr(optimizers[0], "optimizer", optimizers[0]) if optimizers else None
        if optimizer is not None and optimizer not in self._trained:
            raise CheckpointError(
                f"{type(optimizer).__name__} was not set up; give what fabric.setup(_optimizers) returned"
            )
        others = {name: value for name, value in state.items() if not isinstance(value, (nn.Module, Optimizer))}
        return trained, others, optimizer is not None


class _ZeroesThroughWrapper(Optimizer):
    """Mixed into the class of an optimizer, of which Fabric derives its own: ``zero_grad()`` zeroes the wrapper's."""

    wrapper: _BaseDataParallel
    """The wrapper of the optimizer's parameters. Set when the optimizer is set up. Never cleared."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of the whole model, unless they are zero."""
        if self.wrapper.step.phase is not Phase.ZEROED:
            self.wrapper.zero_grad_buffer()
