"""`ShardstackTrainer`: transformers' Trainer, with its model in this library's wrappers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer import SCHEDULER_NAME

from ...base.errors import CheckpointError
from ...base.module_protocol import unwrap_model
from ...dist_checkpointing.safetensors_io import open_safetensors
from ..bridge.checkpoints import checkpoint_folder, load_trained, load_whole_state_dict, save_trained, saved_tensors
from ..bridge.trained import Trained
from .accelerator import ShardstackAccelerator


class KeepsCheckpoints(Trainer):
    """A Trainer that saves and loads its model and optimizer in a checkpoint of this library, with hashes."""

    @property
    def _trained(self) -> Trained | None:
        """The trained model and its optimizer. None before training."""
        raise NotImplementedError

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trained = self._trained
        if trained is None or trained.updates is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_trained(checkpoint_folder(output_dir), trained, saved_tensors(trained))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if checkpoint_folder(resume_from_checkpoint).is_dir():
            return  # its weights come with its optimizer, compared with their hashes
        if (trained := self._trained) is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            _load_weights(trained, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trained = self._trained
        if checkpoint is None or trained is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder, of_scheduler = checkpoint_folder(checkpoint), Path(checkpoint) / SCHEDULER_NAME
        if trained.updates is None:
            if folder.is_dir():
                raise CheckpointError(
                    f"{folder} has the state of another optimizer; resume with the optimizer that saved it"
                )
            super()._load_optimizer_and_scheduler(checkpoint)
        elif folder.is_dir():
            load_trained(folder, trained, saved_tensors(trained))
            self.lr_scheduler.load_state_dict(torch.load(of_scheduler, weights_only=True))
        elif of_scheduler.is_file():  # else it is one of `save_only_model`
            raise CheckpointError(
                f"{checkpoint} has an optimizer that was saved without use_shardstack; start from its weights, with "
                "from_pretrained, or resume without use_shardstack"
            )

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if (trained := self._trained) is None or best is None:
            super()._load_best_model()
        elif checkpoint_folder(best).is_dir():
            load_trained(checkpoint_folder(best), trained, saved_tensors(trained), with_optimizer=False)
        else:
            _load_weights(trained, best)


class ShardstackTrainer(KeepsCheckpoints):
    """The class that `use_shardstack` gives to a `Trainer`, or to an instance of a subclass.

    As under torch's DDP, `model` is the model, whose ``generate`` works, and `model_wrapped` the wrapper around it.
    """

    accelerator: ShardstackAccelerator
    _is_in_step = False
    """Whether `training_step` runs, which sets and clears it."""
    _leaves_out_ranks = False
    """Whether the loss of the last micro-batch was divided by the tokens of all ranks. `training_step` clears it when
    it begins. `get_tp_size` sets it, because `compute_loss` calls that only for such a loss."""

    # ---- a step

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Runs a micro-batch. A loss that is divided by the tokens of all ranks is not multiplied by their number,
        because gradients are summed over ranks, not averaged. The loss that is logged is multiplied."""
        self._is_in_step, self._leaves_out_ranks = True, False
        try:
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._is_in_step = False
        if (trained := self._trained) is not None:
            trained.loss_is_global = self._leaves_out_ranks
        return loss * self.accelerator.num_processes if self._leaves_out_ranks else loss

    def get_tp_size(self) -> int:
        """Returns the number by which `compute_loss` divides the number of ranks, to get the factor of the loss.

        In a step with this library's gradients that is the number of ranks, so that the factor is 1: gradients are
        summed over ranks, not averaged. Elsewhere it is 1, the number of ranks that share a batch.
        """
        if not (self._is_in_step and self._trained is not None):
            return 1
        self._leaves_out_ranks = True
        return int(self.accelerator.num_processes)

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # what clips is the accelerator's, over any mesh

    # ---- the model

    @property
    def _trained(self) -> Trained | None:
        """The wrapped model and its optimizer. None before training."""
        return Trained.of(self.model_wrapped)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if (trained := self._trained) is not None:  # evaluation during or after training
            return trained.wrapper
        return super()._wrap_model(model, training, dataloader)  # type: ignore[no-any-return]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if state_dict is None and (trained := self._trained) is not None:
            state_dict = self.accelerator.get_state_dict(trained.wrapper)
        super()._save(output_dir, state_dict)


def _load_weights(trained: Trained, folder: str | os.PathLike[str]) -> None:
    """Loads what `save_pretrained` has written, which may be under other names than in memory: experts one by one.

    Raises:
        CheckpointError: there is nothing, or it is damaged, or lacks weights of the model.
    """
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors; give a checkpoint with weights")
    readers = [open_safetensors(file) for file in files]
    weights = {name: reader.get_tensor(name) for reader in readers for name in reader.keys()}  # noqa: SIM118  # no dict
    try:
        load_whole_state_dict(trained, weights)
    except CheckpointError:
        model = unwrap_model(trained.wrapper)
        if not isinstance(model, PreTrainedModel):
            raise
        converted, found = type(model).from_pretrained(folder, output_loading_info=True)  # by its own conversion
        if found["missing_keys"] or found["mismatched_keys"]:
            raise
        load_whole_state_dict(trained, converted.state_dict())
