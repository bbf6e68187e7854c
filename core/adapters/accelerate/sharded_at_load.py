"""`ShardedAtLoadTrainer`: transformers' Trainer with a model that `DistributedConfig` sharded as it was loaded."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as torch_state

from ...base.errors import ConfigError
from ...dist_checkpointing import model_state_dict
from ..bridge.trained import Trained, mix_in
from .prepared import ShardstackPlugin
from .trainer import KeepsCheckpoints

_FLAT = torch_state.StateDictOptions(flatten_optimizer_state_dict=True)


def use_own_checkpoints(trainer: Any, plugin: ShardstackPlugin | None) -> None:
    """Makes a trainer, whose model transformers sharded at load, save and load checkpoints of this library's.

    Transformers builds such a trainer with ``save_only_model`` alone, which is switched off.

    Raises:
        ConfigError: a plugin is given, or the model is cut along other ranks than data parallel ones or has tied
            embeddings that these do not divide.
    """
    model, sizes = trainer.model, trainer.model.config.distributed_config
    if plugin is not None:
        _refuse("stays so", "give no ShardstackPlugin")
    for name in ("tp_size", "ep_size", "pp_size"):
        if (size := getattr(sizes, name)) > 1:
            _refuse(f"has {name}={size}", "load it with fsdp_size alone")
    for name in getattr(model, "all_tied_weights_keys", None) or ():
        if (rows := len(model.get_parameter(name))) % sizes.fsdp_size:
            _refuse(
                f"has {name} tied, of {rows} rows over {sizes.fsdp_size} ranks, of which one would go on with old "
                "weights, with or without use_shardstack (torch pads a tied tensor twice)",
                f"save it with resize_token_embeddings(pad_to_multiple_of={sizes.fsdp_size})",
            )
    mix_in(trainer, ShardedAtLoadTrainer)
    trainer.args.save_only_model = False


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ConfigError(
        f"use_shardstack: the model, which DistributedConfig sharded at load, {what}; {remedy}, or load it whole"
    )


class ShardedAtLoadTrainer(KeepsCheckpoints):
    """The class that `use_shardstack` gives to a `Trainer` whose model transformers sharded at load, by FSDP2.

    The model stays as it was sharded. Its checkpoints are this library's, so that training resumes: transformers saves
    none of the optimizer.
    """

    @property
    def _trained(self) -> Trained:
        return TrainedByTorch(self.model, getattr(self.optimizer, "optimizer", None))


class TrainedByTorch(Trained):
    """A model under torch's `fully_shard` and its optimizer, with what a checkpoint asks of a wrapped model.

    It is its own `updates`. Tensors of the state are the optimizer's own, which loading fills in place. An optimizer
    that has not stepped gets its state, without a change of weights.
    """

    optimizer: torch.optim.Optimizer

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.wrapper, self.optimizer, self.updates = model, optimizer, self  # type: ignore[assignment]

    def model_tensors(self) -> dict[str, Tensor]:
        return model_state_dict(self.wrapper)

    def updated(self) -> None: ...

    def state_tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._state().items() if isinstance(value, Tensor)}

    def state_scalars(self) -> dict[str, Any]:
        return {name: value for name, value in self._state().items() if not isinstance(value, Tensor)}

    def check_state_scalars(self, scalars: dict[str, Any]) -> None: ...

    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        torch_state.set_optimizer_state_dict(self.wrapper, self.optimizer, self._state() | scalars, options=_FLAT)

    def _state(self) -> dict[str, Any]:
        return torch_state.get_optimizer_state_dict(self.wrapper, self.optimizer, options=_FLAT)
