"""A strategy of Lightning's Trainer that puts the LightningModule into one of this library's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ...distributed import _BaseDataParallel, finalize_model_grads
from ...errors import CheckpointError, ConfigError
from ...optimizer import MegatronOptimizer
from ..bridge.trained import Trained
from .checkpoint import load_folder, save_folder
from .optimizers import updates_of
from .processes import Processes, unsupported, wrap


class _StepsThroughStrategy(Precision):
    """Clips and steps through the strategy; mixed in before one of Lightning's plugins."""

    strategy: ShardstackStrategy
    """The `ShardstackStrategy`. Set by `of_strategy`, once, before Lightning gets the plugin."""

    def optimizer_step(
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward, clips, and makes the step; none where ``training_step`` returned None."""
        result = self._wrap_closure(model, optimizer, closure)
        if result is not None:
            self.strategy.make_step(optimizer)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips the gradient of the model by its global norm."""
        self.strategy.clip_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamps every element of the gradient."""
        self.strategy.clip_by_value(float(clip_val))


class FullPrecision(_StepsThroughStrategy, Precision):
    """``32-true``."""


class BFloat16Autocast(_StepsThroughStrategy, MixedPrecision):
    """``bf16-mixed``: fp32 parameters, and `torch.autocast` around forward."""


class BFloat16(_StepsThroughStrategy, HalfPrecision):
    """``bf16-true``: bf16 parameters."""


def of_strategy(plugin: Precision | None, strategy: ShardstackStrategy) -> Precision:
    """Returns the counterpart of one of Lightning's plugins.

    Raises:
        ConfigError: a precision without a counterpart.
    """
    made: _StepsThroughStrategy
    if plugin is None or type(plugin) is Precision:
        made = FullPrecision()
    elif type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        made = BFloat16Autocast("bf16-mixed", plugin.device)
    elif type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        made = BFloat16("bf16-true")
    else:
        raise unsupported(plugin)
    made.strategy = strategy
    return made


class ShardstackStrategy(Processes, DDPStrategy):
    """Trains a LightningModule under any wrapper of `core.distributed`.

    A step: micro-batches accumulate on their rank; the last one's backward reduces gradients, once; they are clipped
    by the norm of the whole model; the optimizer updates what this rank holds.

    Args:
        sharding: ``no_shard``, ``optim``, ``optim_grads``, ``optim_grads_params`` or ``fsdp2``; or the settings of a
            wrapper, a config of `core.distributed`.
        units: classes, or their names, whose modules are gathered and freed together; by default those of the layers
            that the model repeats.
        **lightning: arguments of Lightning's `DDPStrategy` that are not torch's: ``process_group_backend``, by default
            gloo on CPU and NCCL on CUDA; ``timeout`` of collectives; and a Trainer's parts that are given here.

    Raises:
        ConfigError: an unknown sharding.
    """

    strategy_name = "shardstack"
    _precision_plugin: Precision | None
    """Lightning's. Its constructor and the setter of `precision_plugin` set it; always from `of_strategy` or None."""

    grad_norm: Tensor | None = None
    """The norm of the last step's gradient before clipping, 0-dim in fp32; None if it was not measured. `make_step`
    sets it."""

    # The norm of the current step's gradient before clipping. `clip_by_norm` sets it, `make_step` clears it.
    _clipped_norm: Tensor | None = None
    # The wrapped model and its optimizer. `setup` sets it, again for another model; None before.
    _trained: Trained | None = None
    # True inside `block_backward_sync`, which sets and clears it: backward then reduces no gradients.
    _is_accumulating = False

    # ---- parts

    @property
    def precision_plugin(self) -> Precision:
        """The plugin of the Trainer's precision, which clips and steps by this strategy."""
        if self._precision_plugin is None:
            self._precision_plugin = of_strategy(None, self)
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else of_strategy(plugin, self)

    @property
    def wrapper(self) -> _BaseDataParallel:
        """The wrapped LightningModule.

        Raises:
            ConfigError: asked for before the Trainer has set the strategy up.
        """
        return self._trained_model().wrapper

    # ---- setup

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Builds what ``configure_model`` makes on this rank's device; on meta with ``empty_init``."""
        place = torch.device("meta") if empty_init else self.root_device
        with place, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Wraps the model, then lets ``configure_optimizers`` see its sharded parameters."""
        module = self._connected_module()
        if self.accelerator is None:
            raise ConfigError("the strategy has no accelerator; give it to a Trainer, which sets one")
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            _check_is_supported(trainer, module)
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
            OptimizerError: one that was built before the model was wrapped, or cannot update its shards.
        """
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        if len(self.optimizers) != 1 or not isinstance(self.optimizers[0], Optimizer):
            names = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
            raise ConfigError(
                f"configure_optimizers gave {names or 'nothing'}; this strategy takes one torch optimizer"
            )
        trained = self._trained_model()
        trained.optimizer, trained.updates = self.optimizers[0], updates_of(self.optimizers[0], self.wrapper)

    # ---- a step

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lets gradients accumulate on this rank; no collective runs in backward."""
        self._is_accumulating = True
        try:
            with self.wrapper.no_sync() if self._trained is not None else nullcontext():
                yield
        finally:
            self._is_accumulating = False

    def post_backward(self, closure_loss: Tensor) -> None:
        """Finishes the gradients of a step, after its last backward."""
        if not self._is_accumulating:
            finalize_model_grads([self.wrapper])

    def clip_by_norm(self, max_norm: float) -> None:
        """Clips the gradient of the whole model by its norm, and keeps that as `grad_norm`.

        Raises:
            ConfigError: the optimizer clips too, by another norm.
        """
        trained = self._trained_model()
        updates = trained.updates
        own = updates.config.clip_grad if isinstance(updates, MegatronOptimizer) else 0.0
        if own and own != max_norm:
            raise ConfigError(
                f"gradient_clip_val is {max_norm} in the Trainer and clip_grad {own} in OptimizerConfig; give one "
                "alone (clip_grad=0.0 turns the optimizer's off)"
            )
        if not own:
            self._clipped_norm = trained.norm.clip(max_norm)

    def clip_by_value(self, limit: float) -> None:
        """Clamps each element of the gradient."""
        self._trained_model().norm.clamp(limit)

    def make_step(self, optimizer: Optimizer) -> None:
        """Updates the parameters, and zeroes gradients."""
        measured = self._trained_model().step()
        norm, self._clipped_norm = self._clipped_norm, None
        self.grad_norm = torch.tensor(measured) if norm is None and measured is not None else norm

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint fills the sharded model in place."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` continues the optimizer."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the tensors of the whole model, each rank with its part of their values."""
        return dict(self._trained_model().model_tensors())

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
        folder = self._folder(filepath)
        values = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        save_folder(
            folder,
            self._trained_model(),
            checkpoint["state_dict"],
            values,
            with_optimizer="optimizer_states" in checkpoint,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Fills the model, and in training the optimizer, from a folder that `save_checkpoint` wrote.

        Args:
            weights_only: Lightning's; no file is unpickled in any case.

        Raises:
            CheckpointError: another kind of file, another model, or damaged.
        """
        module = self._connected_module()
        trained = self._trained_model()
        values: dict[str, Any] = load_folder(
            self._folder(checkpoint_path),
            trained,
            strict=module.strict_loading,
            with_optimizer=trained.updates is not None and module.trainer.state.fn == TrainerFn.FITTING,
        )
        return values | {"state_dict": trained.model_tensors()}

    def teardown(self) -> None:
        """Ends what the parts hold; the model stays where it is, and wrapped."""
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            if part is not None:
                part.teardown()

    # ---- inside

    def _folder(self, path: Any) -> Path:
        path = self.broadcast(path)
        if "://" in str(path):
            raise CheckpointError(f"{path} is remote, and checkpoints are folders of a file system that ranks share")
        return Path(path)

    def _connected_module(self) -> LightningModule:
        if self.lightning_module is None:
            raise ConfigError("the strategy has no model; give it to a Trainer, and call fit")
        return self.lightning_module

    def _trained_model(self) -> Trained:
        if self._trained is None:
            raise ConfigError("the model is wrapped when fit, validate, test or predict begins; ask for it after that")
        return self._trained


def _check_is_supported(trainer: Trainer, module: LightningModule) -> None:
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} has automatic_optimization=False, whose backward runs inside the wrapper's "
            "forward; leave it True, or write the loop with Fabric and ShardstackFabricStrategy"
        )
