"""One folder for a trainer's checkpoint, in this library's format: whole tensors with hashes, the rest as JSON.

Tensors are ``model.<name>`` and ``optimizer.<kind>.<name>``, as in the checkpoints of a pretraining run, so that any
sharding and number of ranks continues from them, and `core.training.checkpointing.load_weights` reads the weights.
Tensors of callbacks are ``values...``; each rank's random streams are ``rng.rank<i>``.

Other values are a tree as JSON: loops, callbacks, schedulers and hyper-parameters. JSON has neither tuples, keys that
are no text, nor numbers that are not finite. Each is an object with one key, the name of its kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...dist_checkpointing import load, load_metadata, model_state_dict, save
from ...dist_checkpointing.agreement import Ranks
from ...dist_checkpointing.format.reader import read_index
from ...distributed import _BaseDataParallel
from ...distributed.data_parallel_base import unwrap_model
from ...errors import CheckpointError
from ...tensor_parallel.random import pack, rng_layout, rng_state, set_rng_state, unpack
from .optimizers import TorchOptimizer, Updates

_MODEL, _OPTIMIZER, _VALUES, _RNG = "model.", "optimizer.", "values", "rng."


@dataclass
class Trained:
    """A wrapped model, and the optimizer that updates it."""

    wrapper: _BaseDataParallel
    optimizer: Optimizer | None = None
    """The user's, as ``configure_optimizers`` gave it; None before it was asked for one, and outside of ``fit``."""
    updates: Updates | None = None
    """What updates in its place; set with `optimizer`."""

    def model_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the model's state by name, as tensors of the whole model that share this rank's storage."""
        self.wrapper.settle_parameters()
        return model_state_dict(unwrap_model(self.wrapper))

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """Returns the optimizer's, likewise."""
        return {} if self.updates is None else self.updates.state_tensors()


def save_folder(
    folder: Path, trained: Trained, model: Mapping[str, torch.Tensor], values: Any, *, with_optimizer: bool
) -> None:
    """Writes a checkpoint, atomically; replaces one of that name. Collective.

    Args:
        model: the tensors of the model to save, by name.
        values: a tree of what else there is.
        with_optimizer: save the state of the optimizer, and of the random streams, too.

    Raises:
        CheckpointError: on all ranks, if it failed on one.
    """
    others: dict[str, torch.Tensor] = {}
    metadata: dict[str, Any] = {"lightning": Ranks().on_all(lambda: encode(values, _VALUES, others))}
    tensors = {f"{_MODEL}{name}": tensor for name, tensor in model.items()}
    metadata["model_tensors"] = sorted(tensors)
    if with_optimizer:
        metadata |= _optimizer_metadata(trained, tensors)
        streams = rng_state()
        tensors[f"{_RNG}rank{dist.get_rank()}"] = pack(streams)
        metadata |= {"rng_layout": rng_layout(streams), "ranks": dist.get_world_size()}
    save(tensors | others, folder, metadata=metadata)


def _optimizer_metadata(trained: Trained, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Adds the optimizer's tensors to `tensors`, masters in the place of parameters in low precision; returns the
    rest."""
    if trained.updates is None or trained.optimizer is None:
        return {}
    for name, tensor in trained.optimizer_tensors().items():
        kind, _, of = name.partition(".")
        if kind != "master":
            tensors[f"{_OPTIMIZER}{name}"] = tensor
        elif f"{_MODEL}{of}" in tensors:
            tensors[f"{_MODEL}{of}"] = tensor
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trained.optimizer.param_groups]
    inside: dict[str, torch.Tensor] = {}
    encoded = encode(groups, _VALUES, inside)
    if inside:
        raise CheckpointError(f"groups of the optimizer hold tensors ({', '.join(inside)}); give numbers, as for lr")
    return {"optimizer": trained.updates.state_scalars(), "param_groups": encoded}


def load_folder(folder: Path, trained: Trained, *, strict: bool, with_optimizer: bool) -> Any:
    """Fills the model, and the optimizer if asked, from a checkpoint; returns the tree of other values. Collective.

    Args:
        strict: the checkpoint has to hold all of the model's tensors and no others.
        with_optimizer: continue the optimizer, and the random streams on an equal number of ranks.

    Raises:
        CheckpointError: on all ranks: another kind of file, another model or optimizer, before anything is changed;
            or damaged.
    """
    ranks = Ranks()
    metadata = ranks.from_first(lambda: _checked_metadata(folder, with_optimizer))
    index = ranks.from_first(lambda: read_index(folder))
    wanted = {f"{_MODEL}{name}": tensor for name, tensor in trained.model_tensors().items()}
    stored = set(metadata["model_tensors"])
    if strict and wanted.keys() != stored:
        differing = ", ".join(sorted(wanted.keys() ^ stored)[:5])
        raise CheckpointError(f"{folder} is a checkpoint of another model; only one side has {differing}")
    wanted = {name: tensor for name, tensor in wanted.items() if name in stored}
    others = {
        name: torch.empty(entry.shape, dtype=entry.dtype)
        for name, entry in index.tensors.items()
        if name.startswith(_VALUES)
    }
    streams = _streams(metadata) if with_optimizer else None
    groups: list[dict[str, Any]] = []
    if with_optimizer:
        groups = _saved_groups(trained, metadata, folder)
        wanted |= _optimizer_tensors(trained, [name for name in index.tensors if name.startswith(_OPTIMIZER)], wanted)
    missing = [name for name in wanted if name not in index.tensors]
    if missing:
        raise CheckpointError(f"{folder} lacks state that this optimizer has: {', '.join(missing[:5])}")
    own = {} if streams is None else {f"{_RNG}rank{dist.get_rank()}": streams}
    load(wanted | others | own, folder, strict=False, cast=True)
    if with_optimizer and trained.updates is not None and trained.optimizer is not None:
        trained.updates.load_state_scalars(metadata["optimizer"])
        for group, saved in zip(trained.optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name in group})
    if streams is not None:
        set_rng_state(unpack(streams, metadata["rng_layout"]))
    return decode(metadata["lightning"], others.__getitem__)


def _optimizer_tensors(trained: Trained, stored: list[str], model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the optimizer's tensors to fill, and the masters in the place of the model's."""
    if isinstance(trained.updates, TorchOptimizer):
        trained.updates.create(dict.fromkeys(name.split(".")[1] for name in stored))
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in trained.optimizer_tensors().items():
        kind, _, of = name.partition(".")
        wanted[f"{_MODEL}{of}" if kind == "master" else f"{_OPTIMIZER}{name}"] = tensor
    return {name: tensor for name, tensor in wanted.items() if not name.startswith(_MODEL) or name in model}


def _checked_metadata(folder: Path, with_optimizer: bool) -> dict[str, Any]:
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is one file, and this strategy's checkpoints are folders; load its weights into the module "
            "before fit (LightningModule.load_from_checkpoint), which starts a new run from them"
        )
    metadata = load_metadata(folder)
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
    return metadata


def _streams(metadata: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns memory for this rank's random streams; None unless the checkpoint has them for as many ranks."""
    if metadata.get("ranks") != dist.get_world_size() or metadata.get("rng_layout") != rng_layout(rng_state()):
        return None
    return torch.empty(sum(size for _, size in metadata["rng_layout"]), dtype=torch.uint8)


def _saved_groups(trained: Trained, metadata: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Returns the settings of the optimizer's groups, which hold no tensors."""
    if trained.optimizer is None:
        return []
    groups: list[dict[str, Any]] = decode(metadata["param_groups"], dict[str, torch.Tensor]().__getitem__)
    if len(groups) != len(trained.optimizer.param_groups):
        raise CheckpointError(
            f"{folder} was saved with {len(groups)} groups of parameters, and the optimizer has "
            f"{len(trained.optimizer.param_groups)}; build it as it was then"
        )
    return groups


_TENSOR, _TUPLE, _SET, _ITEMS, _FLOAT = "__tensor__", "__tuple__", "__set__", "__items__", "__float__"
_KINDS = (_TENSOR, _TUPLE, _SET, _ITEMS, _FLOAT)


def encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns `value` as JSON; its tensors are added to `tensors`, by names that begin with `where`.

    Mappings become dicts, and paths text. Subclasses of numbers and text lose their class.

    Raises:
        CheckpointError: names what no checkpoint holds, and where it is.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (str, PurePath)):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor):
        tensors[where] = value.detach()
        return {_TENSOR: where}
    if isinstance(value, list):
        return [encode(item, f"{where}.{number}", tensors) for number, item in enumerate(value)]
    if isinstance(value, (tuple, set, frozenset)):
        items = list(value) if isinstance(value, tuple) else sorted(value, key=repr)
        kind = _TUPLE if isinstance(value, tuple) else _SET
        return {kind: [encode(item, f"{where}.{number}", tensors) for number, item in enumerate(items)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not any(key in _KINDS for key in value):
            return {str(key): encode(item, f"{where}.{key}", tensors) for key, item in value.items()}
        pairs = [
            [encode(key, f"{where}.key{number}", tensors), encode(item, f"{where}.{number}", tensors)]
            for number, (key, item) in enumerate(value.items())
        ]
        return {_ITEMS: pairs}
    raise CheckpointError(
        f"{where} is a {type(value).__name__}, and a checkpoint holds numbers, text, lists, dicts and tensors; leave "
        "it out (self.save_hyperparameters(ignore=...), on_save_checkpoint), or convert it"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Returns what `encode` was given; `tensor` returns a tensor by its name.

    Raises:
        CheckpointError: JSON that `encode` does not write.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next((name for name in _KINDS if name in value), None)
    if kind is None:
        return {key: decode(item, tensor) for key, item in value.items()}
    held = value[kind]
    try:
        if kind == _TENSOR:
            return tensor(held)
        if kind == _FLOAT:
            return float(held)
        if kind == _ITEMS:
            return {decode(key, tensor): decode(item, tensor) for key, item in held}
        return (tuple if kind == _TUPLE else set)(decode(item, tensor) for item in held)
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"the checkpoint's values hold an invalid {kind} ({error})") from None
