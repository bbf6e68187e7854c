"""The engines ``shardstack`` of verl: those for FSDP, with this library's wrapper around the model.

Batches, packed sequences, losses and Ulysses are verl's. Here are the wrapper, gradients, the optimizer's step,
checkpoints, weights for the rollout, and sleep.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from verl.utils.device import get_device_id, get_device_name
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import (
    EngineEvalModeCtx,
    EngineTrainModeCtx,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

from ...base.errors import ConfigError, OptimizerError
from ...base.module_protocol import unwrap_model
from ...distributed import _BaseDataParallel
from ..bridge.trained import Trained
from ..bridge.translation import check_settings
from .checkpoints import ShardstackCheckpointManager
from .exports import Named, Shards, whole_tensors
from .settings import BACKEND, ShardstackEngineConfig

_DEVICES = ["cuda", "cpu"]

logger = logging.getLogger(__name__)


class ShardstackEngine(FSDPEngineWithLMHead):
    """What both engines share. Their interface is that of verl's `BaseEngine`.

    Attributes:
        module: the wrapper of the model, once `initialize` has run.
        trained: the wrapped model, its optimizer, and what runs a step.
    """

    def __init__(self, model_config: Any, engine_config: Any, *configs: Any, **named_configs: Any) -> None:
        if not isinstance(engine_config, ShardstackEngineConfig):
            raise ConfigError(
                f"the engine got a {type(engine_config).__name__}; give _target_: "
                "shardstack.adapters.verl.ShardstackEngineConfig in its config"
            )
        check_settings(model_config, "verl model")
        super().__init__(model_config, engine_config, *configs, **named_configs)
        self._is_waking = False  # while a mode is entered, whose call of `to` wakes: `_entered` sets it

    # ---- building

    def initialize(self) -> None:
        """Builds model, optimizer and schedule, as configured, and puts to sleep what is offloaded between phases."""
        self._build_model_optimizer()
        self.checkpoint_manager = ShardstackCheckpointManager(
            self.trained, self.lr_scheduler, self.model_config.get_processor(), self.checkpoint_config
        )
        self.to("cpu", self._is_offload_param, self._is_offload_optimizer, self._is_offload_param)

    def _build_fsdp_module(self, module: nn.Module) -> _BaseDataParallel:
        if hasattr(module, "v_head"):
            raise ConfigError(
                f"{type(module).__name__} has TRL's value head; give a model with a class for token classification"
            )
        self._autocast_dtype = self.engine_config.compute_dtype
        if self.engine_config.forward_only:
            module.requires_grad_(False)
        device = torch.device(get_device_id())
        # Where verl left the model on the meta device, the wrapper brings the first rank's values.
        is_empty = any(parameter.is_meta for parameter in module.parameters())
        wrapper = self.engine_config.plugin().wrap(module.to_empty(device=device) if is_empty else module.to(device))
        self.trained = Trained(wrapper)
        return self.trained.wrapper

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer_config.clip_grad is None:
            raise ConfigError("optim.clip_grad is None; give a norm, or float('inf') to measure it alone")
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer: torch.optim.Optimizer = build_optimizer(trainable, self.optimizer_config)
        self.trained.take(optimizer)
        if self.trained.updates is None:
            raise OptimizerError(
                f"{type(optimizer).__name__} is not elementwise, and checkpoints hold no state of such an optimizer; "
                "use AdamW, or another elementwise one"
            )
        return optimizer

    # ---- a step

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        with nullcontext() if is_last_micro_batch else self.module.no_sync():
            yield

    def optimizer_zero_grad(self) -> None:
        """Zeroes gradients."""
        self.module.zero_grad_buffer()

    def optimizer_step(self) -> float:
        """Reduces gradients, unless backward has, clips them, and updates. Returns their norm before clipping.

        A norm that is not finite skips the update.
        """
        self.trained.finish_sums()
        norm = float(self.trained.norm.clip(self.optimizer_config.clip_grad))
        if math.isfinite(norm):
            self.trained.step()
        else:
            logger.warning("the gradient's norm is %s; the update is skipped", norm)
            self.module.zero_grad_buffer()
        return norm

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Runs the model without its adapters inside. Does nothing without adapters."""
        model: Any = unwrap_model(self.module)
        return model.disable_adapter() if hasattr(model, "peft_config") else nullcontext()

    # ---- sleep

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Trains inside: wakes what is offloaded, and puts it to sleep after."""
        return self._entered(EngineTrainModeCtx(self, **kwargs))

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Runs forward inside: wakes the model if it is offloaded, and puts it to sleep after."""
        return self._entered(EngineEvalModeCtx(self, **kwargs))

    @contextmanager
    def _entered(self, mode: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            self._is_waking = True
            try:
                stack.enter_context(mode)
            finally:
                self._is_waking = False
            yield

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Puts parts of the engine to sleep, with ``cpu``, or wakes them, with the device's name or ``device``.

        Where the device is the CPU, ``cpu`` is sleep too, but for the call with which verl enters a mode.

        Raises:
            ConfigError: another device.
        """
        BaseEngine.to(self, device, model, optimizer, grad)
        if device not in (get_device_name(), "device", "cpu"):
            raise ConfigError(f"to was given {device!r}; it takes {get_device_name()!r} or 'cpu'")
        moves = {"model": model, "optimizer": optimizer, "gradients": grad}
        parts = {part for part, is_asked in moves.items() if is_asked}
        parts &= {"model"} if self.engine_config.forward_only else parts
        self._move(parts, wakes=device != "cpu" or self._is_waking)

    def _move(self, parts: set[str], *, wakes: bool) -> None:
        if parts:
            (self.module.restore if wakes else self.module.release)(*sorted(parts))

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Wakes what is asleep, and puts it to sleep again after."""
        asleep = set(self.module.step.released)
        self._move(asleep, wakes=True)
        try:
            yield
        finally:
            self._move(asleep, wakes=False)

    # ---- checkpoints

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Saves as `ShardstackCheckpointManager.save_checkpoint`."""
        with self._awake():
            self.checkpoint_manager.save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Loads as `ShardstackCheckpointManager.load_checkpoint`."""
        with self._awake():
            self.checkpoint_manager.load_checkpoint(*args, **kwargs)

    # ---- weights

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Named, dict[str, Any] | None]:
        """Returns whole tensors, one at a time on every rank, and PEFT's config where adapters go out by themselves.

        Args:
            layered_summon: changes nothing: no more than a bucket of whole tensors is gathered in any case.
            base_sync_done: the server has the base model, and gets adapters alone.
        """
        merges = bool(self._is_lora and self.model_config.lora.get("merge", False))
        configs = getattr(unwrap_model(self.module), "peft_config", None)
        config = None if merges or configs is None else configs["default"].to_dict()
        return self._while_awake(lambda: whole_tensors(self.trained, merges, base_sync_done)), config

    def _while_awake(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        with self._awake():
            yield from make()

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """Returns this rank's part of each tensor in bf16, flat, with its place, and no config.

        Raises:
            ConfigError: the model has adapters.
        """
        self._reject_adapters()
        return self._while_awake(lambda: iter(Shards(self.module))), None

    def get_per_tensor_param_delta_shard(self, **kwargs: Any) -> tuple[Iterator[Any], None]:
        """Returns what changed since the last call or `prime_delta_snapshots`, in Hugging Face's coordinates.

        Raises:
            ConfigError: the model has adapters, or `prime_delta_snapshots` was not called.
        """
        self._reject_adapters()
        snapshots = getattr(self, "_delta_shard_snap", None)  # `prime_delta_snapshots` makes it
        if snapshots is None:
            raise ConfigError("deltas were asked for without a base; call prime_delta_snapshots after a full sync")
        return self._while_awake(lambda: Shards(self.module).changes(snapshots)), None

    def _reject_adapters(self) -> None:
        if hasattr(unwrap_model(self.module), "peft_config"):
            raise ConfigError("shards and deltas were asked for of a model with adapters; sync whole tensors instead")


@EngineRegistry.register("language_model", BACKEND, _DEVICES)
class ShardstackEngineWithLMHead(ShardstackEngine):
    """Trains policies, and language models by SFT: verl's ``language_model``."""


@EngineRegistry.register("value_model", BACKEND, _DEVICES)
class ShardstackEngineWithValueHead(ShardstackEngine, FSDPEngineWithValueHead):
    """Trains critics: verl's ``value_model``."""
