"""Loads weights without a run's state: of a run's checkpoint, of Hugging Face, of Megatron-LM.

Each rank reads only its part of each tensor, under any wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ..datasets.tokenizer import Tokenizer, load_tokenizer
from ..device import current_device
from ..dist_checkpointing import load, load_metadata
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.format.folders import existing_folder
from ..dist_checkpointing.format.reader import read_index
from ..dist_checkpointing.format.verification import another_offered
from ..distributed.data_parallel_base import unwrap_model
from ..errors import CheckpointError, DataError
from ..files import brief
from ..models.gpt import GPTModel
from ..models.gpt.architecture import TRANSFORMER_FIELDS, base_state_dict, gpt_of
from ..models.gpt.hugging_face import load_hugging_face, read_hf_config
from ..models.gpt.megatron_layout import find_megatron, load_megatron
from ..transformer.lora import add_lora, is_adapter, merge_lora
from .checkpointing import TOKENIZER_FILE, find_checkpoint, load_weights
from .config import PretrainConfig
from .run_metadata import check_is_run
from .state import TrainingState

NO_HASHES = "{} has no hashes, so that the loaded tensors could not be compared with the saved ones"


def load_pretrained(state: TrainingState, folder: Path, *, verify: bool = True) -> str:
    """Starts a run from the weights in `folder`, in place. All ranks call it.

    The optimizer and LoRA adapters keep their new state.

    Args:
        folder: a run's folder, one of its checkpoints, a model of Hugging Face's, or a checkpoint of Megatron-LM's.
        verify: compare tensors of a run with the hashes that were saved.

    Returns:
        A line that names the tensors compared with hashes, and the time it took.

    Raises:
        CheckpointError: the folder is none of these, damaged, of another model, or has LoRA adapters.
    """
    optimizer = state.optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in optimizer.items() if name.startswith("master.")}
    model = unwrap_model(state.model)
    # Load fp32 masters instead of the parameters that are rounded from them, as in a checkpoint.
    targets = {name: masters.get(name, tensor) for name, tensor in base_state_dict(model).items()}
    line = NO_HASHES.format(folder)
    if is_hugging_face(folder):
        load_hugging_face(model, folder, targets=targets)
    elif find_megatron(folder) is not None:
        load_megatron(model, folder, targets=targets)
    else:
        lines: list[str] = []
        checkpoint = find_checkpoint(folder)
        load_run_weights(targets, gpt_of(model), checkpoint, verify=verify, report=lines.append)
        line = lines[0]
    state.optimizer.load_state_scalars(state.optimizer.state_scalars())  # writes the masters into the parameters
    return line


def load_run_weights(
    targets: Mapping[str, torch.Tensor],
    model: GPTModel,
    checkpoint: Path,
    *,
    verify: bool = True,
    report: Callable[[str], None] | None = None,
) -> None:
    """Fills `targets`, a model's tensors by name, from a checkpoint of a run of the same model.

    Args:
        verify, report: as in :func:`core.dist_checkpointing.load`.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    if any(map(is_adapter, metadata["model_tensors"])):
        raise CheckpointError(
            f"{checkpoint} holds LoRA adapters; continue their run with --load, or merge them with convert.py and "
            "start from what that writes"
        )
    theirs = metadata["config"]["model"]
    ours = {name: getattr(model.config, name) for name in TRANSFORMER_FIELDS}
    differing = [f"{name} {ours[name]!r} and {theirs[name]!r}" for name in ours if theirs.get(name) != ours[name]]
    tensors = {f"model.{name}": tensor for name, tensor in targets.items()}
    differing += sorted(tensors.keys() ^ set(metadata["model_tensors"]))
    if differing:
        raise CheckpointError(f"{checkpoint} is of another model: {', '.join(differing[:20])} (here and there)")
    with another_offered(checkpoint, Ranks()):
        load(tensors, checkpoint, strict=False, verify=verify, cast=True, report=report)


def is_hugging_face(folder: Path) -> bool:
    """Returns whether a folder is a model of Hugging Face's. A run's folder has a ``config.json`` too."""
    try:
        return "model_type" in read_hf_config(folder)
    except CheckpointError:
        return False


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
