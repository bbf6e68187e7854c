"""`ShardedAtLoadTrainer`: transformers' Trainer with a model that `DistributedConfig` sharded as it was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from ...base.errors import CheckpointError, ConfigError
from ...dist_checkpointing import load, model_state_dict, save
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.format.folders import existing_folder
from ...dist_checkpointing.format.reader import read_index
from ...dist_checkpointing.model_state import MODEL, OPTIMIZER
from ..bridge.checkpoints import checkpoint_folder
from ..bridge.trained import mix_in
from .prepared import ShardstackPlugin

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def use_own_checkpoints(trainer: Any, plugin: ShardstackPlugin | None) -> None:
    """Makes a trainer, whose model transformers sharded at load, save and load checkpoints of this library's.

    Transformers builds such a trainer with ``save_only_model`` alone, which is switched off.

    Raises:
        ConfigError: a plugin is given, or the model is cut along other ranks than data parallel ones or has tied
            embeddings.
    """
    config = trainer.model.config
    if getattr(config, "tie_word_embeddings", False):
        raise ConfigError(
            "use_shardstack: model of the trainer has tied embeddings and was sharded at load, and its steps were "
            "seen to differ from those of a whole model (transformers 5.24); load it whole"
        )
    for name in ("tp_size", "ep_size", "pp_size"):
        if (size := getattr(config.distributed_config, name)) > 1:
            raise ConfigError(
                f"use_shardstack: model of the trainer was loaded with DistributedConfig({name}={size}); load it with "
                "fsdp_size alone, or whole"
            )
    if plugin is not None:
        raise ConfigError(
            "use_shardstack: the model was sharded at load, by DistributedConfig, and stays so; give no "
            "ShardstackPlugin, or load it whole"
        )
    mix_in(trainer, ShardedAtLoadTrainer)
    trainer.args.save_only_model = False


class ShardedAtLoadTrainer(Trainer):
    """The class that `use_shardstack` gives to a `Trainer` whose model transformers sharded at load, by FSDP2.

    The model stays as it was sharded. Its checkpoints are this library's, with hashes, so that training resumes;
    transformers saves none of the optimizer.
    """

    def _state(self, with_optimizer: bool = True) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
        """Returns tensors by their names in a checkpoint, the optimizer's other values, and its whole flat state.

        An optimizer that has not stepped gets its state, without a change of weights.
        """
        tensors = {f"{MODEL}{name}": tensor for name, tensor in model_state_dict(self.model).items()}
        if not with_optimizer:
            return tensors, {}, {}
        state: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer.optimizer, options=_FLAT)
        of_optimizer = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in state.items() if name not in of_optimizer}
        return tensors | {f"{OPTIMIZER}{name}": value for name, value in of_optimizer.items()}, others, state

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        tensors, others, _ = self._state()
        save(tensors, checkpoint_folder(output_dir), metadata={"optimizer": others})
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not checkpoint_folder(resume_from_checkpoint).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} was saved without use_shardstack; load its weights with from_pretrained"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._load(checkpoint)
            scheduler = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        self._load(str(self.state.best_model_checkpoint), with_optimizer=False)

    def _load(self, checkpoint: str, with_optimizer: bool = True) -> None:
        folder = checkpoint_folder(checkpoint)
        tensors, _, state = self._state(with_optimizer)
        index = Ranks().from_first(lambda: read_index(existing_folder(folder)))
        compared = (MODEL, OPTIMIZER) if with_optimizer else MODEL
        if differing := sorted(name for name in tensors.keys() ^ index.tensors.keys() if name.startswith(compared)):
            raise CheckpointError(f"{folder} is of another model or optimizer; only one side has {differing[0]}")
        load(tensors, folder, strict=False)
        if with_optimizer:
            state |= index.metadata["optimizer"]
            set_optimizer_state_dict(self.model, self.optimizer.optimizer, state, options=_FLAT)
