"""A strategy of Lightning's Trainer that puts the LightningModule into one of this library's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ...base.errors import ConfigError
from ...distributed import DistributedDataParallelConfig, _BaseDataParallel, finalize_model_grads
from ..bridge.trained import Trained, mix_in
from .shared import Processes, check_precision, load_folder, save_folder, take_optimizer, wrap


class StepsThroughStrategy(Precision):
    """Mixed into the class of the Trainer's precision plugin, which clips and steps: the strategy does."""

    strategy: ShardstackStrategy
    """Set by the strategy when it gets the plugin. Never cleared."""

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward, clips, and makes the step, unless ``training_step`` returned None."""
        norm_before = self.strategy.grad_norm
        if (result := self._wrap_closure(model, optimizer, closure)) is not None:
            norm = self.strategy.trained.step()
            if self.strategy.grad_norm is norm_before:  # nothing was clipped
                self.strategy.grad_norm = None if norm is None else torch.tensor(norm)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips the gradient of the model by its global norm, which becomes the strategy's `grad_norm`."""
        self.strategy.grad_norm = self.strategy.trained.norm.clip(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps every element of the gradient."""
        self.strategy.trained.norm.clamp(float(clip_val))


class ShardstackStrategy(Processes, DDPStrategy):
    """Trains a LightningModule under any wrapper of `shardstack.distributed`.

    A step: micro-batches accumulate on their rank; the last one's backward reduces gradients, once; they are clipped
    by the norm of the whole model; the optimizer updates what this rank holds.

    Args:
        sharding: ``no_shard``, ``optim``, ``optim_grads``, ``optim_grads_params`` or ``fsdp2``; or the settings of a
            wrapper, a config of `shardstack.distributed`.
        units: classes, or their names, whose modules are gathered and freed together; by default those of the layers
            that the model repeats.
        **lightning: arguments of Lightning's `DDPStrategy` that are not torch's: ``process_group_backend``, by default
            gloo on CPU and NCCL on CUDA; ``timeout`` of collectives; and a Trainer's parts that are given here.

    Raises:
        ConfigError: an unknown sharding.
    """

    strategy_name = "shardstack"
    # Lightning's. Its constructor and the Trainer set it, and `_configure_launcher` replaces None by a plugin.
    _precision_plugin: Precision | None
    grad_norm: Tensor | None = None
    """The norm of the last step's gradient before clipping, 0-dim in fp32. None if it was not measured. Clipping sets
    it, or else the step."""

    # The wrapped model and its optimizer. `setup` sets it, again for another model; None before.
    _trained: Trained | None = None
    # Of Lightning: a checkpoint fills the sharded model in place, and `load_checkpoint` continues the optimizer too.
    restore_checkpoint_after_setup = True
    lightning_restore_optimizer = False

    # ---- parts

    def _configure_launcher(self) -> None:
        """Lets the Trainer's precision plugin clip and step by this strategy. Lightning calls it."""
        plugin: Any = self._precision_plugin or Precision()
        check_precision(plugin)
        mix_in(plugin, StepsThroughStrategy)
        plugin.strategy = self
        self._precision_plugin = plugin
        super()._configure_launcher()

    @property
    def trained(self) -> Trained:
        """The wrapped LightningModule and its optimizer.

        Raises:
            ConfigError: asked for before the Trainer has set the strategy up.
        """
        if self._trained is None:
            raise ConfigError("the model is wrapped when fit, validate, test or predict begins; ask for it after that")
        return self._trained

    @property
    def wrapper(self) -> _BaseDataParallel:
        """The wrapped LightningModule. Raises as `trained` does."""
        return self.trained.wrapper

    # ---- setup

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Builds what ``configure_model`` makes on this rank's device, or on meta with ``empty_init``."""
        return self.built_here(empty_init, self.precision_plugin.tensor_init_context())

    def setup(self, trainer: Trainer) -> None:
        """Wraps the model, then lets ``configure_optimizers`` see its sharded parameters."""
        module = self._connected_module()
        if self.accelerator is None:
            raise ConfigError("the strategy has no accelerator; give it to a Trainer, which sets one")
        self.accelerator.setup(trainer)
        if is_fitting := trainer.state.fn == TrainerFn.FITTING:
            _check_is_supported(trainer, module, self.settings)
        if self._trained is None or self._trained.wrapper.module is not module:
            if is_fitting and self._layer_sync is not None:
                self._layer_sync.apply(module)  # Trainer(sync_batchnorm=True)
            self.model = self.precision_plugin.convert_module(module)
            self.model_to_device()
            self._trained = wrap(module, self.settings, self.units)
        self.model = self._trained.wrapper  # Lightning's attribute: the model that it runs, from here on
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Moves the model, unless it is on the meta device, from which wrapping takes it."""
        self.module_to_device(self._connected_module())

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Calls ``configure_optimizers``.

        Raises:
            ConfigError: no optimizer, or several.
            OptimizerError: one that was built for another model, or cannot update its shards.
        """
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], Optimizer):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigError(f"configure_optimizers gave {names or 'nothing'}; return one torch optimizer")
        take_optimizer(self.optimizers[0])

    # ---- a step

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Lets gradients accumulate on this rank. No collective runs in backward."""
        return self.wrapper.no_sync()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finishes the gradients of a step, after its last backward."""
        if self.wrapper.syncs_gradients:
            finalize_model_grads([self.wrapper])

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the tensors of the whole model, each rank with its part of their values."""
        return dict(self.trained.model_tensors())

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Does nothing: `load_checkpoint` has filled the model."""

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns nothing: `save_checkpoint` saves the state of the optimizer by the names of its parameters."""
        return {}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Does nothing: `load_checkpoint` has continued the optimizer."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a folder of that name, on all ranks together.

        Raises:
            CheckpointError: a remote path, or values that no checkpoint holds.
        """
        values = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        folder, has_optimizer = self.folder(filepath), "optimizer_states" in checkpoint
        save_folder(folder, self.trained, checkpoint["state_dict"], values, with_optimizer=has_optimizer)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fills the model, and in training the optimizer, from a folder that `save_checkpoint` wrote.

        Args:
            weights_only: Lightning's; no file is unpickled in any case.

        Raises:
            CheckpointError: another kind of file, another model, or damaged.
        """
        module = self._connected_module()
        continues = self.trained.optimizer is not None and module.trainer.state.fn == TrainerFn.FITTING
        folder, strict = self.folder(checkpoint_path), module.strict_loading
        values = dict(load_folder(folder, self.trained, strict=strict, with_optimizer=continues))
        return values | {"state_dict": self.trained.model_tensors()}

    def teardown(self) -> None:
        """Ends what the parts hold. The model stays where it is, and wrapped."""
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            if part is not None:
                part.teardown()

    # ---- inside

    def _connected_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise ConfigError("the strategy has no model; give it to a Trainer, and call fit")
        return self.lightning_module


def _check_is_supported(trainer: Trainer, module: LightningModule, settings: DistributedDataParallelConfig) -> None:
    looks_up = "looks the optimizer's parameters up among the module's"
    reasons: dict[str, tuple[str, ...]] = {looks_up: ("BaseFinetuning",)}
    if settings.shards_parameters:
        reasons["averages whole parameters"] = ("WeightAveraging", "StochasticWeightAveraging")
    for callback in trainer.callbacks:
        for reason, unfit in reasons.items():
            if not {kind.__name__ for kind in type(callback).__mro__}.isdisjoint(unfit):
                raise ConfigError(
                    f"{type(callback).__name__} {reason}, and a rank has parts of them here; docs/lightning.md names "
                    "what to do instead"
                )
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} has automatic_optimization=False, whose backward runs inside the wrapper's "
            "forward; leave it True, or write the loop with Fabric and ShardstackFabricStrategy"
        )
