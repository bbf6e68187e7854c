"""Whole weights for TRL's trainers, from a model in this library's wrappers: for vLLM, and for a reference model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...base.errors import ConfigError
from ...weights import WeightStream
from ...weights.names import name_without_adapters
from ..bridge.trained import mix_in
from ..bridge.translation import check_version
from .prepared import ShardstackPlugin

Named = Iterator[tuple[str, Tensor]]

_OWN_WAYS = ("_move_model_to_vllm", "_streaming_iter")
"""Methods of TRL's trainers that walk the parameters themselves: of Online DPO, Nash-MD and XPO, and of the
asynchronous ones."""


def use_whole_weights(trainer: Any, plugin: ShardstackPlugin) -> None:
    """Makes what copies the weights of a trainer of TRL get whole tensors. Does nothing to other trainers.

    Raises:
        ConfigError: the trainer copies them in a way that is not known here.
    """
    args, generation = trainer.args, vars(trainer).get("vllm_generation")
    own_way = next((name for name in _OWN_WAYS if hasattr(trainer, name)), None)
    if own_way and getattr(trainer, "use_vllm", True) and plugin.ddp_config.shards_parameters:
        raise ConfigError(
            f"use_shardstack: {type(trainer).__name__} sends weights to vLLM by {own_way}, which takes shards for "
            "whole tensors; use ShardstackPlugin('optim_grads'), or a trainer of trl's VLLMGeneration, as GRPOTrainer"
        )
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "sync_target_model"):
            mix_in(callback, SyncsWholeWeights)
    if generation is None:
        return
    check_version("trl", "shardstack.adapters.accelerate")
    if not hasattr(generation, "_iter_named_params"):
        raise ConfigError(
            "use_shardstack: vllm_generation of this trl has no _iter_named_params, so that it sends weights in a way "
            "that is not known here; install trl 1.16, or set use_vllm=False"
        )
    per_generation, accumulated = getattr(args, "steps_per_generation", 0), args.gradient_accumulation_steps
    if getattr(args, "vllm_enable_sleep_mode", False) and per_generation % accumulated:
        raise ConfigError(
            f"use_shardstack: vllm_enable_sleep_mode sends weights at each generation, which is within a step where "
            f"steps_per_generation is {per_generation} and gradient_accumulation_steps {accumulated}; make the first "
            "a multiple of the second"
        )
    if hasattr(trainer.model, "peft_config") and not hasattr(trainer.model.base_model, "merge_adapter"):
        raise ConfigError("use_shardstack: an adapter of PEFT that has nothing to merge; set use_vllm=False")
    mix_in(generation, SendsWholeWeights)
    whole_parameters(trainer.accelerator, trainer.model)  # raises for adapters that cannot be merged


def whole_parameters(accelerator: Any, model: nn.Module, receivers: list[int] | None = None) -> Named:
    """Returns a walk over a model's parameters as whole tensors, with adapters merged, under their names without
    adapters. Collective.

    Args:
        model: as it is without the wrapper that `accelerator` may have around it.

    Raises:
        ConfigError: an adapter of PEFT that cannot be merged.
        ShardstackError: a step has begun, or the model is released; before the walk begins.
    """
    wrappers = [other for other in accelerator._models if getattr(other, "module", None) is model]
    stream = WeightStream(wrappers[-1] if wrappers else model, "module", receivers=receivers)
    stream.check_between_steps()
    names = {name: name_without_adapters(name) for name, _ in model.named_parameters()}
    return ((names[name], tensor) for name, tensor in stream if name in names)  # a stream has buffers too


class SendsWholeWeights:
    """Mixed into TRL's ``VLLMGeneration``, whose walk over parameters then yields whole tensors, adapters merged.

    Every rank walks. In server mode only the first one gets tensors, which announces and sends them.
    """

    def _iter_named_params(self: Any) -> Named:
        # No generator, so that what cannot be sent raises before TRL announces it to the server.
        walk = whole_parameters(self.accelerator, self.model, [0] if self.mode == "server" else None)
        return ((self._fix_param_name_to_vllm(name), tensor) for name, tensor in walk)


class SyncsWholeWeights:
    """Mixed into TRL's ``SyncRefModelCallback``, which moves a reference model towards the trained one."""

    def sync_target_model(self: Any, model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        """Moves each weight of the reference model, which every rank has whole. Collective."""
        targets = dict(target_model.named_parameters())
        for name, tensor in whole_parameters(self.accelerator, model):
            targets[name].data.mul_(1.0 - alpha).add_(tensor, alpha=alpha)
