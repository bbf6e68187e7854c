"""The engines ``shardstack`` of verl: those for FSDP, with this library's wrapper around the model.

Batches, packed sequences, losses and Ulysses are verl's. Here are the wrapper, gradients, the optimizer's step,
replayed experts, checkpoints, weights for the rollout, and sleep.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from verl.utils.device import get_device_id, get_device_name
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import EngineEvalModeCtx, EngineTrainModeCtx, FSDPEngineWithValueHead
from verl.workers.engine.spec import ShardSpec

from ...base.errors import ConfigError, OptimizerError
from ...base.module_protocol import unwrap_model
from ...distributed import _BaseDataParallel
from ..bridge.trained import Trained
from .checkpoints import ShardstackCheckpointManager
from .exports import delta_entry, shards, whole_tensors
from .routing import RoutedSteps
from .settings import BACKEND, ShardstackEngineConfig

T = TypeVar("T")


class ShardstackEngine(RoutedSteps):
    """What both engines share. Their interface is that of verl's `BaseEngine`.

    Attributes:
        module: the wrapper of the model, once `initialize` has run.
        trained: the wrapped model, its optimizer, and what runs a step.
    """

    def __init__(self, model_config: Any, engine_config: ShardstackEngineConfig, *configs: Any, **more: Any) -> None:
        engine_config.check_model(model_config)
        super().__init__(model_config, engine_config, *configs, **more)

    # ---- building

    def initialize(self) -> None:
        """Builds model, optimizer and schedule, as configured, and puts to sleep what is offloaded between phases."""
        self._build_model_optimizer()
        self.checkpoint_manager = ShardstackCheckpointManager(
            self.trained, self.lr_scheduler, self.model_config.get_processor(), self.checkpoint_config
        )
        self._move(self._offloaded, wakes=False)

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
        module = module.to_empty(device=device) if is_empty else module.to(device)
        self.trained = Trained(self.engine_config.plugin().wrap(module))
        return self.trained.wrapper

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super()._build_optimizer(module)
        self.trained.take(optimizer)
        if self.trained.updates is None:
            raise OptimizerError(
                f"{type(optimizer).__name__} is not elementwise, and checkpoints hold no state of such an optimizer; "
                "use AdamW, or another elementwise one"
            )
        return optimizer

    # ---- a step

    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last_micro_batch else self.module.no_sync()

    def optimizer_zero_grad(self) -> None:
        """Zeroes gradients."""
        self.module.zero_grad_buffer()

    def optimizer_step(self) -> float:
        """Reduces gradients, unless backward has, clips them, and updates. Returns their norm before clipping.

        A norm that is not finite skips the update. Without ``clip_grad`` the norm is measured alone.
        """
        self.trained.finish_sums()
        limit = self.optimizer_config.clip_grad
        norm = self.trained.norm.clip(math.inf if limit is None else limit)
        self.trained.step()
        return float(norm)

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """Runs the model without its adapters inside. Does nothing without adapters."""
        model: Any = unwrap_model(self.module)
        return model.disable_adapter() if self._is_lora else nullcontext()

    # ---- sleep

    @property
    def _offloaded(self) -> set[str]:
        """Parts that sleep between phases."""
        parts = {"model", "gradients"} if self._is_offload_param else set()
        return parts | ({"optimizer"} if self._is_offload_optimizer else set())

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Trains inside: wakes what is offloaded, and puts it to sleep after."""
        return self._mode(EngineTrainModeCtx, self._offloaded, **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """Runs forward inside: wakes the model if it is offloaded, and puts it to sleep after."""
        return self._mode(EngineEvalModeCtx, self._offloaded & {"model"}, **kwargs)

    @contextmanager
    def _mode(self, kind: Any, parts: set[str], disable_auto_offload: bool = False, **kwargs: Any) -> Iterator[None]:
        with self._awake(set() if disable_auto_offload else parts), kind(self, disable_auto_offload=True, **kwargs):
            yield

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Puts parts of the engine to sleep, with ``cpu``, or wakes them, with the device's name or ``device``.

        Raises:
            ConfigError: another device.
        """
        BaseEngine.to(self, device, model, optimizer, grad)
        if device not in (get_device_name(), "device", "cpu"):
            raise ConfigError(f"to was given {device!r}; it takes {get_device_name()!r} or 'cpu'")
        moves = {"model": model, "optimizer": optimizer, "gradients": grad}
        self._move({part for part, is_moved in moves.items() if is_moved}, wakes=device != "cpu")

    def _move(self, parts: set[str], *, wakes: bool) -> None:
        if parts:
            (self.module.restore if wakes else self.module.release)(*sorted(parts))

    @contextmanager
    def _awake(self, parts: set[str] | None = None) -> Iterator[None]:
        """Wakes parts, by default those that sleep, and puts them to sleep after."""
        parts = set(self.module.step.released) if parts is None else parts
        self._move(parts, wakes=True)
        try:
            yield
        finally:
            self._move(parts, wakes=False)

    def _while_awake(self, stream: Iterator[T]) -> Iterator[T]:
        """Yields what the stream, whose first item begins it, yields of a model that is awake."""
        with self._awake():
            yield from stream

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
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """Returns whole tensors, one at a time on every rank, and PEFT's config where adapters go out by themselves.

        Args:
            layered_summon: changes nothing: no more than a bucket of whole tensors is gathered in any case.
            base_sync_done: the server has the base model, and gets adapters alone.
        """
        model: Any = unwrap_model(self.module)
        merges = bool(self._is_lora and self.model_config.lora.get("merge", False))
        config = model.peft_config["default"].to_dict() if self._is_lora and not merges else None
        return self._while_awake(whole_tensors(self.trained, merges, base_sync_done)), config

    def get_per_tensor_param_shard(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], None]:
        """Returns this rank's part of each tensor in bf16, flat, with its place, and no config.

        verl's `prime_delta_snapshots` and `get_per_tensor_param_delta_shard` take it too.

        Raises:
            ConfigError: the model has adapters.
        """
        if self._is_lora:
            raise ConfigError("shards were asked for of a model with adapters; sync whole tensors instead")
        return self._while_awake(shards(self.module)), None

    _hf_delta_entry = staticmethod(delta_entry)


@EngineRegistry.register("language_model", BACKEND, ["cuda", "cpu"])
class ShardstackEngineWithLMHead(ShardstackEngine):
    """Trains policies, and language models by SFT: verl's ``language_model``."""


@EngineRegistry.register("value_model", BACKEND, ["cuda", "cpu"])
class ShardstackEngineWithValueHead(ShardstackEngine, FSDPEngineWithValueHead):
    """Trains critics: verl's ``value_model``."""
