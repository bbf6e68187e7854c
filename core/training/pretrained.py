"""Loads weights without a run's state: of a run's checkpoint, of Hugging Face, of Megatron-LM.

Each rank reads only its part of each tensor, under any wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..dist_checkpointing import load, load_metadata
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.format.verification import another_offered
from ..distributed.data_parallel_base import unwrap_model
from ..errors import CheckpointError
from ..models.gpt import GPTModel
from ..models.gpt.architecture import TRANSFORMER_FIELDS, base_state_dict, gpt_of
from ..models.gpt.hugging_face import load_hugging_face, read_hf_config
from ..models.gpt.megatron_layout import find_megatron, load_megatron
from ..transformer.lora import is_adapter
from .checkpointing import find_checkpoint
from .state import TrainingState, check_is_run

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
