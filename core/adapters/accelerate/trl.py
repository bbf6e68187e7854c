"""Whole weights for TRL's trainers, from a model in this library's wrappers: for vLLM, and for a reference model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...base.dtypes import dtype_name
from ...base.errors import ConfigError
from ...weights import WeightStream
from ..bridge.trained import mix_in
from ..bridge.translation import check_version
from .prepared import ShardstackPlugin

_OWN_WAYS = ("_move_model_to_vllm", "_streaming_iter")
"""Methods of TRL's trainers that walk the parameters themselves: of Online DPO, Nash-MD and XPO, and of the
asynchronous ones."""


def use_whole_weights(trainer: Any, plugin: ShardstackPlugin) -> None:
    """Makes what copies the weights of a trainer of TRL get whole tensors. Does nothing to other trainers.

    Raises:
        ConfigError: the trainer copies them in a way that is not known here.
    """
    own_way = next((name for name in _OWN_WAYS if hasattr(trainer, name)), None)
    if own_way and getattr(trainer, "use_vllm", True) and plugin.ddp_config.shards_parameters:
        raise ConfigError(
            f"use_shardstack: {type(trainer).__name__} sends weights to vLLM by {own_way}, which takes shards for "
            "whole tensors; use ShardstackPlugin('optim_grads'), or a trainer of trl's VLLMGeneration, as GRPOTrainer"
        )
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "sync_target_model"):
            mix_in(callback, SyncsWholeWeights)
    generation = vars(trainer).get("vllm_generation")
    if generation is None:
        return
    check_version("trl", "shardstack.adapters.accelerate")
    if missing := [name for name in ("_iter_named_params", "_weight_metadata") if not hasattr(generation, name)]:
        raise ConfigError(
            f"use_shardstack: vllm_generation of this trl has no {missing[0]}, so that it sends weights in a way that "
            "is not known here; install trl 1.16, or set use_vllm=False"
        )
    args, accumulated = trainer.args, trainer.args.gradient_accumulation_steps
    if getattr(args, "vllm_enable_sleep_mode", False) and args.steps_per_generation % accumulated:
        raise ConfigError(
            f"use_shardstack: vllm_enable_sleep_mode sends weights at each generation, which is within a step where "
            f"steps_per_generation is {args.steps_per_generation} and gradient_accumulation_steps {accumulated}; make "
            "the first a multiple of the second"
        )
    mix_in(generation, SendsWholeWeights)
    generation._whole()  # raises for adapters that cannot be merged


def stream_of(accelerator: Any, model: nn.Module, receivers: list[int] | None = None) -> WeightStream:
    """Returns a stream of the parameters of a model, with the wrapper around it if it is prepared.

    Raises:
        ConfigError: an adapter of PEFT that cannot be merged.
    """
    if _is_peft(model) and not hasattr(model.base_model, "merge_adapter"):
        raise ConfigError("use_shardstack: an adapter of PEFT that has nothing to merge; set use_vllm=False")
    wrappers = [other for other in accelerator._models if getattr(other, "module", None) is model]
    return WeightStream(wrappers[-1] if wrappers else model, "module", receivers=receivers)


class SendsWholeWeights:
    """Mixed into TRL's ``VLLMGeneration``, whose walk over parameters then yields whole tensors, adapters merged.

    Every rank walks. In server mode only the first one gets tensors, which announces and sends them.
    """

    model: Any
    accelerator: Any
    mode: str
    _fix_param_name_to_vllm: Any
    _weight_metadata: Any
    _stream: WeightStream | None = None
    """Of the model as it was wrapped when `_whole` was last called, which replaces it once the model is wrapped."""

    def _whole(self) -> tuple[WeightStream, dict[str, str]]:
        """Returns the stream, and vLLM's names of what it has of the model's parameters: without buffers."""
        made = self._stream
        if made is None or not any(made.wrappers[0] is other for other in self.accelerator._models):
            made = self._stream = stream_of(self.accelerator, self.model, [0] if self.mode == "server" else None)
        names = {}
        for name, _ in self.model.named_parameters():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "") if _is_peft(self.model) else name
            names[name] = self._fix_param_name_to_vllm(plain, extra_prefixes=["modules_to_save.default."])
        return made, names

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        stream, names = self._whole()
        for name, tensor in stream:
            if name in names:
                yield names[name], tensor

    def sync_weights(self) -> None:
        """Sends the weights to vLLM. Collective."""
        stream, names = self._whole()
        metas = [meta for meta in stream.metadata() if meta.name in names]
        self._weight_metadata = [(names[meta.name], dtype_name(meta.dtype), [*meta.shape]) for meta in metas]
        super().sync_weights()  # type: ignore[misc]


class SyncsWholeWeights:
    """Mixed into TRL's ``SyncRefModelCallback``, which moves a reference model towards the trained one."""

    accelerator: Any

    def sync_target_model(self, model: nn.Module, target_model: nn.Module, alpha: float) -> None:
        """Moves each weight of the reference model, which every rank has whole. Collective."""
        targets = dict(target_model.named_parameters())
        for name, tensor in stream_of(self.accelerator, model):
            if name in targets:
                targets[name].data.mul_(1.0 - alpha).add_(tensor, alpha=alpha)


def _is_peft(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")
