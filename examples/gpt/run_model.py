"""Loads the model and the tokenizer of a run that pretrain_gpt.py saved, whole in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from core.base.device import current_device
from core.base.errors import CheckpointError, DataError
from core.base.files import brief
from core.datasets.tokenizer import Tokenizer, load_tokenizer
from core.dist_checkpointing import load_metadata
from core.dist_checkpointing.format.folders import existing_folder
from core.dist_checkpointing.format.reader import read_index
from core.models.gpt import GPTModel
from core.training.checkpointing import TOKENIZER_FILE, load_weights
from core.training.config import PretrainConfig
from core.training.state import check_is_run
from core.transformer.lora import add_lora, merge_lora


def load_run_model(
    checkpoint: Path, *, verify: bool = True, report: Callable[[str], None] | None = None
) -> tuple[PretrainConfig, GPTModel]:
    """Loads a checkpoint's model, whole in this process, and its run's settings.

    LoRA adapters are merged into the weights.

    Args:
        verify, report: as in :func:`core.dist_checkpointing.load`.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    config = PretrainConfig.from_json(metadata["config"])
    alone = replace(
        config.model,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=False,
        perform_initialization=False,  # the checkpoint fills every parameter
    )

    def build() -> GPTModel:
        model = GPTModel(
            alone,
            vocab_size=metadata["vocab_size"],
            max_sequence_length=config.max_sequence_length,
            share_embeddings_and_output_weights=not config.gpt.untie_embeddings_and_output_weights,
            position_embedding_type=config.gpt.position_embedding_type,
        )
        add_lora(model, config.gpt.lora_rank, config.gpt.lora_alpha, config.gpt.lora_targets)
        return model

    _check_description(checkpoint, config, build)
    model = build()
    load_weights(model, checkpoint, verify=verify, report=report)
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
