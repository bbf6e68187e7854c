"""Loads the model and the tokenizer of a run that pretrain_gpt.py saved, whole in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from shardstack.base.device import current_device
from shardstack.base.errors import CheckpointError, DataError
from shardstack.base.files import brief
from shardstack.dist_checkpointing import load_metadata, load_weights
from shardstack.dist_checkpointing.format.folders import existing_folder
from shardstack.dist_checkpointing.format.reader import read_index
from shardstack.models.gpt import GPTModel
from shardstack.tokenizers import Tokenizer, load_tokenizer
from shardstack.training.checkpointing import TOKENIZER_FILE
from shardstack.training.config import PretrainConfig
from shardstack.training.state import build_gpt, check_is_run
from shardstack.transformer.lora import add_lora, merge_lora


def load_run_model(
    checkpoint: Path, *, verify: bool = True, report: Callable[[str], None] | None = None
) -> tuple[PretrainConfig, GPTModel]:
    """Loads a checkpoint's model, whole in this process, and its run's settings.

    LoRA adapters are merged into the weights.

    Args:
        verify, report: as in :func:`shardstack.dist_checkpointing.load`.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    config = PretrainConfig.from_json(metadata["config"])
    whole: dict[str, Any] = {field.name: field.default for field in fields(config.model) if "parallel" in field.name}
    whole |= {"num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None}
    # The checkpoint fills every parameter.
    alone = replace(config, model=replace(config.model, **whole, perform_initialization=False))

    def build() -> GPTModel:
        model = build_gpt(alone, metadata["vocab_size"])
        add_lora(model, config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
        return model

    _check_description(checkpoint, config, build)
    model = build()
    load_weights(checkpoint, model, verify=verify, report=report)
    merge_lora(model)
    if (config.model.fp16 or config.model.bf16) and current_device().type == "cuda":
        model = model.to(torch.float16 if config.model.fp16 else torch.bfloat16)
    return config, model.to(current_device())


def _check_description(checkpoint: Path, config: PretrainConfig, build: Callable[[], GPTModel]) -> None:
    """Refuses a checkpoint whose settings describe another model than its tensors, before allocating that model."""
    stored = read_index(existing_folder(checkpoint)).tensors
    try:
        fits = config.model.num_layers <= len(stored)
        with torch.device("meta"):
            shapes = {f"model.{name}": tuple(t.shape) for name, t in build().state_dict().items()} if fits else {}
    except (TypeError, ValueError, RuntimeError, OverflowError, AttributeError, MemoryError) as error:
        raise CheckpointError(f"{checkpoint}: no model can be made of its settings ({brief(str(error))})") from None
    differing = [name for name, shape in shapes.items() if name in stored and stored[name].shape != shape]
    if not fits or differing or not shapes.keys() & stored.keys():
        which = f": {brief(differing[0])}, for one," if differing else ""
        raise CheckpointError(
            f"{checkpoint}: its settings are those of another model than it holds{which}; load another"
        )


def load_run_tokenizer(checkpoint: Path) -> Tokenizer:
    """Loads the tokenizer that the run saved next to its checkpoints."""
    path = checkpoint.parent / TOKENIZER_FILE
    if not path.exists():
        raise DataError(f"{path} does not exist: the run had no tokenizer; put the corpus's tokenizer.json there")
    return load_tokenizer(path)
