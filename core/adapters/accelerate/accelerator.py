"""`ShardstackAccelerator`: accelerate's Accelerator, with models in this library's wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ...base.errors import CheckpointError, ConfigError, OptimizerError
from ...distributed import _BaseDataParallel
from ...distributed.engine.engine import owner_of
from ..bridge.checkpoints import checkpoint_folder, load_trained, save_trained, saved_tensors, whole_state_dict
from ..bridge.trained import Trained, wrapper_of
from .prepared import PreparedOptimizer, ShardstackPlugin


class ShardstackAccelerator(Accelerator):
    """The class that `use_shardstack` gives to an `Accelerator`. Scripts use it as accelerate's.

    `prepare` wraps each model with trainable parameters, and makes each optimizer update this rank's part of them.
    Gradients are reduced once a step, in the last backward or after it. The methods that a script calls in its loop
    (`accumulate`, `backward`, `clip_grad_norm_`, ...) and for checkpoints act on wrapped models and their optimizers.
    """

    plugin: ShardstackPlugin
    """Chooses the wrapper of models. `use_shardstack` sets it, once."""

    # Accelerate's lists of prepared models and optimizers. Its `prepare` adds to them and `free_memory` clears them.
    # `prepare_model` replaces a model by its wrapper. `save_state` and `load_state` take our optimizers out while
    # accelerate's methods run, and put them back.
    _models: list[nn.Module]
    _optimizers: list[torch.optim.Optimizer]

    # ---- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares as accelerate does, but wraps models before it prepares optimizers, in any order of arguments."""
        models = {arg: self.prepare_model(arg) for arg in args if isinstance(arg, nn.Module)}
        objects = [models[arg] if isinstance(arg, nn.Module) else self._with_own_gradients(arg) for arg in args]
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wraps a model that has trainable parameters.

        Raises:
            WrapError: the model is wrapped already, or cannot be.
        """
        if Trained.of(model) is not None:
            if not any(other is model for other in self._models):
                self._models.append(model)
            return model
        on_device: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()):
            return on_device
        self._models = [other for other in self._models if other is not on_device]
        wrapper = self.plugin.wrap(on_device)
        Trained(wrapper)
        self._models.append(wrapper)
        return wrapper

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> torch.optim.Optimizer:
        """Makes an optimizer update this rank's part of a wrapped model.

        Raises:
            OptimizerError: the optimizer cannot update shards, or has parameters of another model.
        """
        ours: torch.optim.Optimizer = self._with_own_gradients(optimizer)
        if not isinstance(ours, PreparedOptimizer):
            return cast(torch.optim.Optimizer, super().prepare_optimizer(ours, device_placement))
        if not any(other is ours for other in self._optimizers):
            self._optimizers.append(ours)
        return ours

    def _with_own_gradients(self, arg: Any) -> Any:
        """Prepares an optimizer of a wrapped model. Returns any other object unchanged."""
        if not isinstance(arg, torch.optim.Optimizer) or isinstance(arg, AcceleratedOptimizer):
            return arg
        params = [param for group in arg.param_groups for param in group["params"]]
        trained = Trained.of_parameters(params)
        if trained is None and not self._prepared() and not any(map(owner_of, params)):
            return arg
        if trained is None:
            raise OptimizerError(
                f"{type(arg).__name__} has parameters of no prepared model, or of several; build it from one model, "
                "and give both to prepare(model, optimizer)"
            )
        return PreparedOptimizer(arg, trained)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the model as it was before `prepare`. Its parameters stay where the wrapper has them."""
        inside = model.module if isinstance(model, _BaseDataParallel) else model
        return cast(nn.Module, super().unwrap_model(inside, *args, **kwargs))

    # ---- a step

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Lets a backward inside it accumulate on this rank alone."""
        return model.no_sync() if isinstance(model, _BaseDataParallel) else super().no_sync(model)

    def clip_grad_norm_(
        self, parameters: Iterable[nn.Parameter] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        """Clips by the exact norm of the whole model, the same on all ranks, and returns it.

        Raises:
            ConfigError: another norm, or a part of the model's parameters.
        """
        params = _as_list(parameters)
        if (trained := self._with_global_gradient(params)) is None:
            return super().clip_grad_norm_(params, max_norm, norm_type)
        return trained.norm.clip(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter] | Tensor, clip_value: float) -> None:
        """Clamps the gradients of the whole model."""
        params = _as_list(parameters)
        if (trained := self._with_global_gradient(params)) is None:
            super().clip_grad_value_(params, clip_value)
        else:
            trained.norm.clamp(clip_value)

    def _with_global_gradient(self, parameters: list[nn.Parameter]) -> Trained | None:
        """Returns the prepared model that has all these parameters, its gradient reduced. None if there is none."""
        owners = {owner_of(parameter) for parameter in parameters}
        if len(owners) > 1:
            raise ConfigError("gradients of several models were given to one call that clips; call it for each")
        if (trained := Trained.of(next(iter(owners), None))) is not None:
            trained.check_complete(parameters)
        elif len(models := self._prepared()) == 1:
            # Copies that FSDP2 has gathered know no wrapper.
            copies = {id(copy) for copy in models[0].wrapper.engine.parameters.receivers()}
            trained = models[0] if any(id(parameter) in copies for parameter in parameters) else None
        if trained is not None:
            trained.finish_sums()
        return trained

    # ---- checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Returns the whole model's tensors on the first rank of each machine, else an empty dict. All ranks call
        it."""
        wrapper = wrapper_of(model)
        if wrapper is None or model not in (wrapper, wrapper.module):
            return super().get_state_dict(model, unwrap)
        return whole_state_dict(wrapper, keep=self.is_local_main_process)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Saves what accelerate saves, and wrapped models with their optimizers, with hashes, for `load_state`."""
        with self._without_own_optimizers():
            location = super().save_state(output_dir, *args, **kwargs)
        for index, trained in enumerate(self._prepared()):
            save_trained(checkpoint_folder(location, index), trained, saved_tensors(trained))
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Loads what `save_state` wrote, under any strategy and number of ranks.

        A model that a hook of `register_load_state_pre_hook` takes off its list is the hook's to load.

        Raises:
            CheckpointError: it is missing, damaged, or of another model.
        """
        own_models = self._prepared()
        unhooked_models: list[nn.Module] = []  # the models that no hook of the user has taken; set by `take_own`
        folders: list[Path] = []  # of `own_models`, in the folder that accelerate chose; set by `take_own`

        def take_own(models: list[nn.Module], folder: str) -> None:
            folders.extend(checkpoint_folder(folder, index) for index in range(len(own_models)))
            if missing := [path.name for path in folders if not path.is_dir()]:
                raise CheckpointError(
                    f"{folder} has no folder {missing[0]}: it was not saved by an accelerator of use_shardstack; load "
                    "its weights into the model before prepare"
                )
            unhooked_models.extend(models)
            models[:] = [model for model in models if Trained.of(model) is None]

        handle = self.register_load_state_pre_hook(take_own)
        try:
            with self._without_own_optimizers():
                super().load_state(input_dir, *args, **kwargs)
        finally:
            handle.remove()
        for folder, trained in zip(folders, own_models, strict=True):
            if any(model is trained.wrapper for model in unhooked_models):
                load_trained(folder, trained, saved_tensors(trained))

    @contextmanager
    def _without_own_optimizers(self) -> Iterator[None]:
        """Hides inside it the optimizers that this library updates, whose state is in its own checkpoint."""
        optimizers = self._optimizers
        self._optimizers = [
            other for other in optimizers if not (isinstance(other, PreparedOptimizer) and other.megatron is not None)
        ]
        try:
            yield
        finally:
            self._optimizers = optimizers

    def _prepared(self) -> list[Trained]:
        return [trained for model in self._models if (trained := Trained.of(model)) is not None]


def _as_list(parameters: Iterable[nn.Parameter] | Tensor) -> list[Any]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
