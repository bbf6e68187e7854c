"""What verl saves and loads of an engine: a folder ``shardstack`` with hashes, next to Hugging Face's files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

from ...base.errors import CheckpointError, ConfigError
from ...base.module_protocol import unwrap_model
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.format.folders import existing_folder
from ...dist_checkpointing.format.reader import read_index
from ...dist_checkpointing.model_state import named_for_checkpoint
from ...weights import save_pretrained
from ..bridge.checkpoints import checkpoint_folder, load_trained, save_trained, saved_tensors
from ..bridge.trained import Trained
from ..bridge.translation import check_settings

_HUGGING_FACE = "huggingface"


class ShardstackCheckpointManager(BaseCheckpointManager):
    """Saves and loads what ``checkpoint.save_contents`` and ``load_contents`` list, and keeps the last few.

    Args:
        trained: the engine's model and optimizer.
        lr_scheduler: None in an engine that only runs forward.
        processing_class: tokenizer or processor, saved next to the model's config.
        checkpoint_config: verl's.

    Raises:
        ConfigError: contents that a checkpoint here does not have.
        ParallelConfigError: a setting of verl's that has no counterpart here.
    """

    def __init__(self, trained: Trained, lr_scheduler: Any, processing_class: Any, checkpoint_config: Any) -> None:
        super().__init__(trained.wrapper, trained.optimizer, lr_scheduler, processing_class, checkpoint_config)
        self.trained, self.ranks = trained, Ranks()
        check_settings(checkpoint_config, "verl checkpoint")
        for contents, also in ((self.checkpoint_save_contents, ["hf_model"]), (self.checkpoint_load_contents, [])):
            known = ["model", "optimizer", "extra", *also]
            if "model" not in contents or set(contents) - set(known):
                raise ConfigError(f"contents of checkpoints are {list(contents)}; list 'model', and any of {known}")

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Writes a checkpoint, and removes those of this run that are too many. Collective.

        Raises:
            CheckpointError: on all ranks: it cannot be written.
            ParallelConfigError: a path of HDFS is given.
        """
        check_settings({"hdfs_path": hdfs_path}, "verl checkpoint path")
        if local_path is None:
            return
        if self.ranks.is_first:
            self.ensure_checkpoint_capacity(max_ckpt_to_keep)
        tensors = saved_tensors(self.trained) if self.should_save_lora_only else self.trained.model_tensors()
        parts = {"with_optimizer": self.should_save_optimizer, "with_streams": self.should_save_extra}
        values = {"save_contents": list(self.checkpoint_save_contents), "global_step": global_step}
        values["lr_scheduler"] = self.lr_scheduler and self.lr_scheduler.state_dict()
        save_trained(checkpoint_folder(local_path), self.trained, tensors, **parts, metadata=values)
        folder = Path(local_path) / _HUGGING_FACE
        self.ranks.from_first(lambda: shutil.rmtree(folder, ignore_errors=True))
        if self.should_save_hf_model:
            save_pretrained(self.trained.wrapper, folder)
        self.ranks.from_first(lambda: self._describe(folder))
        if self.ranks.is_first:
            self.register_checkpoint(local_path, max_ckpt_to_keep)

    def _describe(self, folder: Path) -> None:
        model: Any = unwrap_model(self.trained.wrapper)
        for described in (model.config, getattr(model, "generation_config", None), self.processing_class):
            if described is not None:
                described.save_pretrained(folder)

    def load_checkpoint(
        self, local_path: str | None, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Continues from a checkpoint of any strategy and number of ranks. Collective.

        Args:
            del_local_after_load: remove a copy made for loading. There is none: paths are of a shared file system.

        Raises:
            CheckpointError: on all ranks, before anything is changed: it is missing, damaged, of another model, or
                lacks what ``load_contents`` lists.
        """
        check_settings({"hdfs_path": hdfs_path}, "verl checkpoint path")
        if local_path is None:
            return
        folder = checkpoint_folder(local_path)
        contents = self.ranks.from_first(lambda: read_index(existing_folder(folder)).metadata)
        if lacking := sorted(set(self.checkpoint_load_contents) - set(contents["save_contents"])):
            raise CheckpointError(
                f"{folder} was saved without {', '.join(lacking)}, which checkpoint.load_contents lists; drop it there"
            )
        tensors = saved_tensors(self.trained)
        if sorted(named_for_checkpoint(tensors, {})) != contents["model_tensors"]:  # not of adapters alone
            tensors = self.trained.model_tensors()
        parts = {"with_optimizer": self.should_load_optimizer, "with_streams": self.should_load_extra}
        load_trained(folder, self.trained, tensors, **parts)
        if self.should_load_extra and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(contents["lr_scheduler"])
