"""Starts a run from weights alone: of a run's checkpoint, of Hugging Face, of Megatron-LM.

Each rank reads only its part of each tensor, under any wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardstack.base.errors import CheckpointError, ConfigError
from shardstack.base.files import brief
from shardstack.base.module_protocol import unwrap_model
from shardstack.dist_checkpointing import load, load_metadata
from shardstack.dist_checkpointing.agreement import Ranks
from shardstack.dist_checkpointing.foreign_layout import Recipe, Run, load_foreign
from shardstack.dist_checkpointing.format.folders import existing_folder
from shardstack.dist_checkpointing.format.reader import read_index
from shardstack.dist_checkpointing.good_checkpoints import another_offered, find_checkpoint
from shardstack.models.gpt import GPTModel
from shardstack.models.gpt.architecture import (
    EXPERT_FIELDS,
    TRANSFORMER_FIELDS,
    architecture_of,
    base_state_dict,
    differing_fields,
    gpt_of,
    model_fields,
)
from shardstack.models.gpt.expert_weights import dense_architecture, group_routers, upcycle_recipes
from shardstack.models.gpt.hugging_face import load_hugging_face, read_hf_config
from shardstack.models.gpt.megatron_layout import find_megatron, load_megatron
from shardstack.training.state import TrainingState, check_is_run
from shardstack.transformer.lora import is_adapter
from shardstack.transformer.transformer_config import TransformerConfig

NO_HASHES = "{} has no hashes, so that the loaded tensors could not be compared with the saved ones"


def load_pretrained(state: TrainingState, folder: Path, *, verify: bool = True, upcycle: int = 0) -> str:
    """Starts a run from the weights in `folder`, in place. All ranks call it.

    The optimizer and LoRA adapters keep their new state.

    Args:
        folder: a run's folder, one of its checkpoints, a model of Hugging Face's, or a checkpoint of Megatron-LM's.
        verify: compare tensors of a run with the hashes that were saved.
        upcycle: the weights are of a dense model; copy its MLPs (1), or so many pieces of each, into the experts.
            Routers keep their new state.

    Returns:
        A line that names the tensors compared with hashes, and the time it took.

    Raises:
        CheckpointError: the folder is none of these, damaged, of another model, or has LoRA adapters.
    """
    optimizer = state.optimizer.state_tensors()
    masters = {name.removeprefix("master."): t for name, t in optimizer.items() if name.startswith("master.")}
    models = [unwrap_model(stage) for stage in state.chunks]
    model = models[0]
    # Load fp32 masters instead of the parameters that are rounded from them, as in a checkpoint.
    targets = {name: masters.get(name, tensor) for name, tensor in base_state_dict(models).items()}
    line = NO_HASHES.format(folder)
    if is_hugging_face(folder):
        load_hugging_face(model, folder, targets=targets, upcycle=upcycle)
    elif find_megatron(folder) is not None:
        load_megatron(model, folder, targets=targets, upcycle=upcycle)
    elif upcycle:
        load_run_weights(targets, gpt_of(model), find_checkpoint(folder), upcycle=upcycle)
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
    upcycle: int = 0,
) -> None:
    """Fills `targets`, a model's tensors by name, from a checkpoint of a run of the same model.

    Args:
        verify, report: as in :func:`shardstack.dist_checkpointing.load`.
        upcycle: of its dense model, whose tensors are not compared with hashes.
    """
    metadata = load_metadata(checkpoint)
    check_is_run(metadata, checkpoint)
    if any(map(is_adapter, metadata["model_tensors"])):
        raise CheckpointError(
            f"{checkpoint} holds LoRA adapters; continue their run with --load, or merge them with shardstack convert "
            "and start from what that writes"
        )
    ours = model_fields(model.config)
    if upcycle:
        ours = dict(dense_architecture(architecture_of(model), upcycle).transformer)
    differing = differing_fields(ours, _fields_of_run(metadata, checkpoint))
    stored = {name.removeprefix("model."): name for name in metadata["model_tensors"]}
    if not upcycle:
        differing += sorted(targets.keys() ^ stored.keys())
    if differing:
        raise CheckpointError(f"{checkpoint} is of another model: {', '.join(differing[:20])} (here and there)")
    with another_offered(checkpoint, Ranks()):
        if not upcycle:
            tensors = {f"model.{name}": tensor for name, tensor in targets.items()}
            load(tensors, checkpoint, strict=False, verify=verify, cast=True, report=report)
            return
        index = Ranks().on_all(lambda: read_index(existing_folder(checkpoint)))
        rows = {name: index.tensors[name].shape[0] for name in stored.values() if name in index.tensors}
        dense = [Recipe(name, (Run(source, rows.get(source, 0)),)) for name, source in stored.items()]
        recipes, copies = upcycle_recipes(architecture_of(model), dense, targets, upcycle)
        load_foreign(copies, recipes, index, checkpoint, ignored_names=index.tensors.keys() - rows.keys())
        group_routers(targets, upcycle)


def _fields_of_run(metadata: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Returns `model_fields` of the model in a checkpoint."""
    stored = metadata["config"]["model"]
    names = [name for name in (*TRANSFORMER_FIELDS, *EXPERT_FIELDS) if name in stored]
    try:
        if stored["num_layers"] > len(metadata["model_tensors"]):
            raise ValueError("more layers than tensors")
        return model_fields(TransformerConfig(**{name: stored[name] for name in names}))
    except (ConfigError, KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{checkpoint}: no model can have its settings ({brief(str(error))})") from None


def is_hugging_face(folder: Path) -> bool:
    """Returns whether a folder is a model of Hugging Face's. A run's folder has a ``config.json`` too."""
    try:
        return "model_type" in read_hf_config(folder)
    except CheckpointError:
        return False
