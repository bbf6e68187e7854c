"""Lightning's checkpoint as one folder: a trained model, the values of Lightning and random streams.

Tensors of callbacks are ``values...``; each rank's random streams are ``rng.rank<i>``. Other values are a tree as
JSON: loops, callbacks, schedulers and hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...base.errors import CheckpointError
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.format.folders import existing_folder
from ...dist_checkpointing.format.index import CheckpointIndex
from ...dist_checkpointing.format.reader import read_index
from ...tensor_parallel.random import packed_rng_state, set_packed_rng_state
from ..bridge.checkpoints import decode, encode, load_trained, save_trained
from ..bridge.trained import Trained

_VALUES = "values"


def save_folder(
    folder: Path, trained: Trained, model: Mapping[str, torch.Tensor], values: Any, *, with_optimizer: bool
) -> None:
    """Writes a checkpoint atomically, in place of one of that name. Collective.

    Args:
        model: the tensors of the model to save, by name.
        values: a tree of what else there is.
        with_optimizer: save the state of the optimizer, and of the random streams, too.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    others: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {"lightning": Ranks().on_all(lambda: encode(values, _VALUES, others))}
    if with_optimizer:
        streams = others[_own_streams()] = packed_rng_state()
        metadata |= {"rng_bytes": streams.numel(), "ranks": dist.get_world_size()}
    save_trained(folder, trained, model, with_optimizer=with_optimizer, others=others, metadata=metadata)


def load_folder(folder: Path, trained: Trained, *, strict: bool, with_optimizer: bool) -> Any:
    """Fills the model, and the optimizer if asked, from a checkpoint. Returns the tree of other values. Collective.

    Args:
        strict: the checkpoint has to hold all of the model's tensors and no others.
        with_optimizer: continue the optimizer, and the random streams on an equal number of ranks.

    Raises:
        CheckpointError: on all ranks: another kind of file, another model or optimizer, before anything is changed;
            or damaged.
    """
    index = Ranks().from_first(lambda: _checked_index(folder, with_optimizer))
    metadata = index.metadata
    values = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in index.tensors.items() if n.startswith(_VALUES)}
    others, streams = dict(values), packed_rng_state()
    same_ranks = (metadata.get("ranks"), metadata.get("rng_bytes")) == (dist.get_world_size(), streams.numel())
    if continues := with_optimizer and same_ranks:
        others[_own_streams()] = streams
    model = trained.model_tensors()
    load_trained(folder, trained, model, strict=strict, with_optimizer=with_optimizer, others=others)
    if continues:
        set_packed_rng_state(streams)
    return decode(metadata["lightning"], values.__getitem__)


def _own_streams() -> str:
    return f"rng.rank{dist.get_rank()}"


def _checked_index(folder: Path, with_optimizer: bool) -> CheckpointIndex:
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is one file, and this strategy's checkpoints are folders; load its weights into the module "
            "before fit (LightningModule.load_from_checkpoint), which starts a new run from them"
        )
    index = read_index(existing_folder(folder))
    metadata = index.metadata
    if "lightning" not in metadata or not isinstance(metadata.get("model_tensors"), list):
        raise CheckpointError(
            f"{folder} is no checkpoint of a Lightning strategy; load its weights with "
            "core.training.checkpointing.load_weights"
        )
    if with_optimizer and "optimizer" not in metadata:
        raise CheckpointError(
            f"{folder} holds weights alone (save_weights_only), so that no training continues from it; load its "
            "weights with core.training.checkpointing.load_weights, and fit without ckpt_path"
        )
    return index
