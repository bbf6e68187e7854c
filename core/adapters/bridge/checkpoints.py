"""A trained model and its optimizer in a folder of this library's format, and other values as JSON.

Tensors are ``model.<name>`` and ``optimizer.<kind>.<name>``, with fp32 masters in the place of parameters in low
precision, as in the checkpoints of a pretraining run. Any sharding and number of ranks continues from them, and
`shardstack.dist_checkpointing.load_weights` reads the weights. Random streams are ``rng.rank<i>``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...base.errors import CheckpointError
from ...base.module_protocol import settle_parameters, unwrap_model
from ...base.random_streams import packed_rng_state, set_packed_rng_state
from ...dist_checkpointing import load, load_model_state_dict, model_state_dict, save
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.format.folders import existing_folder
from ...dist_checkpointing.format.reader import read_index
from ...dist_checkpointing.gathering import TensorStream
from ...dist_checkpointing.model_state import MODEL, OPTIMIZER, named_for_checkpoint
from .trained import Trained


def checkpoint_folder(root: str | os.PathLike[str], index: int = 0) -> Path:
    """Returns where the checkpoint of a model is in a trainer's folder: ``shardstack``, of further ones with a number
    after it."""
    return Path(root) / (f"shardstack_{index}" if index else "shardstack")


def saved_tensors(trained: Trained) -> dict[str, Tensor]:
    """Returns the tensors of a model that its checkpoint holds: of one with adapters (`peft`) not the frozen ones."""
    model, tensors = unwrap_model(trained.wrapper), trained.model_tensors()
    if not hasattr(model, "peft_config"):
        return tensors
    frozen_names = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in tensors.items() if name not in frozen_names}


def save_trained(
    folder: Path,
    trained: Trained,
    model: Mapping[str, Tensor],
    *,
    with_optimizer: bool = True,
    with_streams: bool = False,
    others: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint atomically, in place of one of that name. Collective.

    Args:
        model: the tensors of the model to save, by name.
        with_streams: save each rank's random streams too.
        others: further tensors, and `metadata` further values.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    tensors = named_for_checkpoint(model, {})
    contents = {"model_tensors": sorted(tensors), **(metadata or {})}
    if with_optimizer and trained.updates is not None and trained.optimizer is not None:
        tensors = named_for_checkpoint(model, trained.updates.state_tensors())
        contents |= {"optimizer": trained.updates.state_scalars()}
    if with_streams:
        tensors |= (streams := _own_streams())
        contents["ranks"], contents["rng_bytes"] = _kind_of(streams)
    save(tensors | dict(others or {}), folder, metadata=contents)


def load_trained(
    folder: Path,
    trained: Trained,
    model: Mapping[str, Tensor],
    *,
    with_optimizer: bool = True,
    with_streams: bool = False,
    strict: bool = True,
    others: Mapping[str, Tensor] | None = None,
) -> None:
    """Continues from `save_trained`'s, which any sharding and number of ranks has written. Collective.

    Args:
        model: the tensors of the model to fill, by name.
        with_streams: continue random streams that were saved, on an equal number of ranks.
        strict: the checkpoint has to hold all of these, and no others of a model.
        others: further tensors to fill.

    Raises:
        CheckpointError: on all ranks: another model or optimizer, before anything is changed; or damaged.
    """
    index = Ranks().from_first(lambda: read_index(existing_folder(folder)))
    tensors_there, metadata = index.tensors, index.metadata
    updates = trained.updates if with_optimizer else None
    own_tensors = named_for_checkpoint(model, {} if updates is None else updates.state_tensors())
    compared = (*([MODEL] if strict else ()), *([OPTIMIZER] if updates is not None else ()))
    if differing := sorted(name for name in own_tensors.keys() ^ tensors_there.keys() if name.startswith(compared)):
        text = ", ".join(differing[:5])
        raise CheckpointError(
            f"{folder} is a checkpoint of another model or optimizer; only one side has {text}; build what was saved"
        )
    if updates is not None:
        updates.check_state_scalars(metadata["optimizer"])
    present = {name: tensor for name, tensor in own_tensors.items() if name in tensors_there}
    streams = _own_streams() if with_streams else {}
    if streams and (metadata.get("ranks"), metadata.get("rng_bytes")) != _kind_of(streams):
        streams = {}
    load(present | streams | dict(others or {}), folder, strict=False, cast=True)
    if updates is not None:
        updates.load_state_scalars(metadata["optimizer"])
    for state in streams.values():
        set_packed_rng_state(state)
    trained.updated()


def _own_streams() -> dict[str, Tensor]:
    return {f"rng.rank{dist.get_rank()}": packed_rng_state()}


def _kind_of(streams: Mapping[str, Tensor]) -> tuple[int, int]:
    """Returns what has to be equal for streams to continue: the number of ranks, and of a rank's bytes."""
    return dist.get_world_size(), sum(map(len, streams.values()))


def whole_state_dict(model: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """Returns the whole model's tensors on the CPU, gathered a bucket at a time. Every rank calls it.

    Of several names of one tensor (tied weights) it has the first.

    Args:
        model: a wrapper, or a plain model.
        keep: whether this rank needs them; else it gets an empty dict.
    """
    settle_parameters(model)
    receivers = [rank for rank, keeps in enumerate(Ranks().all_gather(keep)) if keeps]
    stream = TensorStream(model_state_dict(unwrap_model(model)), receivers=receivers)
    return {name: tensor.to("cpu", copy=True) for name, tensor in stream if keep}


def load_whole_state_dict(trained: Trained, state_dict: Mapping[str, Tensor]) -> None:
    """Copies what a plain model of this kind has saved into the trained one. Every rank gives the whole tensors.

    Raises:
        CheckpointError: names that only one of them has, but for tied ones; before anything is changed.
    """
    settle_parameters(trained.wrapper)
    load_model_state_dict(unwrap_model(trained.wrapper), state_dict)
    trained.updated()
