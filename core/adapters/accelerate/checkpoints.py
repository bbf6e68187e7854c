"""A prepared model and its optimizer in a checkpoint that any strategy and number of ranks continues."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...dist_checkpointing import load, load_metadata, load_model_state_dict, model_state_dict, save
from ...dist_checkpointing.flat_range import whole
from ...distributed import _BaseDataParallel
from ...distributed.data_parallel_base import unwrap_model
from ...errors import CheckpointError
from ...optimizer import MegatronOptimizer
from ..bridge.gradients import StepGradients

FOLDER = "shardstack"
"""The folder of the first model, in that of a trainer's checkpoint; others have a number after it."""


def whole_state_dict(wrapper: _BaseDataParallel, *, keep: bool) -> dict[str, torch.Tensor]:
    """Returns the whole model's tensors on the CPU, one gathered at a time; every rank calls it.

    Of several names of one tensor (tied weights) it has the first.

    Args:
        keep: whether this rank needs them; else it gets an empty dict.
    """
    wrapper.settle_parameters()
    found = {}
    for name, tensor in model_state_dict(unwrap_model(wrapper)).items():
        gathered = whole(tensor)
        if keep:
            found[name] = gathered.to("cpu", copy=True)
    return found


def load_whole_state_dict(wrapper: _BaseDataParallel, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Copies what a plain model of this kind has saved into the wrapped one; every rank gives the whole tensors."""
    wrapper.settle_parameters()
    load_model_state_dict(unwrap_model(wrapper), state_dict, strict=False)
    wrapper.note_step()


def save_checkpoint(folder: Path, gradients: StepGradients) -> None:
    """Writes the model, and the optimizer that updates it, with a hash of each tensor; every rank calls it.

    A model with adapters (`peft`) is saved without its frozen weights.
    """
    optimizer = gradients.optimizer
    metadata = {"optimizer": {}, "groups": []} if optimizer is None else _scalars(optimizer)
    save(_tensors(gradients, with_optimizer=True), folder, metadata=metadata)


def load_checkpoint(folder: Path, gradients: StepGradients, *, weights_alone: bool = False) -> None:
    """Continues from `save_checkpoint`'s, which any strategy and number of ranks has written; every rank calls it.

    Raises:
        CheckpointError: it is missing, damaged, or of another model or optimizer.
    """
    optimizer = None if weights_alone else gradients.optimizer
    metadata = load_metadata(folder)
    if optimizer is not None and len(metadata.get("groups", ())) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{folder} is of an optimizer with {len(metadata.get('groups', ()))} groups of parameters, and this one "
            f"has {len(optimizer.param_groups)}; build it as the run did that saved it"
        )
    gradients.wrapper.settle_parameters()
    load(_tensors(gradients, optimizer is not None), folder, optional="optimizer." if optimizer is None else None)
    if optimizer is not None:
        optimizer.load_state_scalars(metadata["optimizer"])
        for group, saved in zip(optimizer.param_groups, metadata["groups"], strict=True):
            group.update(saved)
    gradients.wrapper.note_step()


def checkpoint_folder(root: str | os.PathLike[str], index: int = 0) -> Path:
    """Returns where the checkpoint of a model is in a trainer's folder."""
    return Path(root) / (f"{FOLDER}_{index}" if index else FOLDER)


def _tensors(gradients: StepGradients, with_optimizer: bool) -> dict[str, torch.Tensor]:
    model = unwrap_model(gradients.wrapper)
    tensors = {f"model.{name}": tensor for name, tensor in model_state_dict(model).items() if _is_saved(model, name)}
    if with_optimizer and gradients.optimizer is not None:
        tensors |= {f"optimizer.{name}": t for name, t in gradients.optimizer.state_tensors().items()}
    return tensors


def _is_saved(model: nn.Module, name: str) -> bool:
    if not hasattr(model, "peft_config"):
        return True
    owner, _, attribute = name.rpartition(".")
    tensor = getattr(model.get_submodule(owner), attribute)
    return not isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _scalars(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Returns what is no tensor: step counts, and the settings of each group, as a scheduler has left them."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"optimizer": optimizer.state_scalars(), "groups": groups}
