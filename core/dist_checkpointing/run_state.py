"""The state of a training as one thing: models, optimizers with their averages, and schedulers.

A loop calls `save_training` and `load_training`. `RunState` is what they are made of, for loops that keep a state
elsewhere, such as in another rank's memory.
"""

from __future__ import annotations

import json
import operator
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..base.module_protocol import settle_parameters, unwrap_model
from ..base.random_streams import packed_rng_state, set_packed_rng_state
from ..process_groups_config import groups_in_effect
from .agreement import Ranks, of_first_rank
from .format.content_hash import box_hash
from .format.folders import Retention, checkpoint_directory, existing_folder
from .format.json_values import decode, encode
from .format.reader import FINITE, read_index
from .good_checkpoints import advice, another_offered, find_checkpoint
from .loading import load
from .model_state import MODEL, model_state_dict, named_for_checkpoint
from .saving import AsyncSaver, all_finite, save


class TrainedOptimizer(Protocol):
    """An optimizer that names its state by parameter, as those of `shardstack.optimizer` do."""

    def main_tensors(self) -> dict[nn.Parameter, Tensor]: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def state_scalars(self) -> dict[str, Any]: ...
    def check_state_scalars(self, scalars: Mapping[str, Any]) -> Any: ...
    def load_state_scalars(self, scalars: Mapping[str, Any]) -> None: ...


class Scheduler(Protocol):
    """A schedule of learning rates: one of torch, or
    `shardstack.optimizer_param_scheduler.OptimizerParamScheduler`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class RunState:
    """All that a training needs to go on, but for its data and random streams, on any number of ranks.

    Tensors are ``model.<name>`` and ``optimizer.<kind>.<name>``, with fp32 masters in the place of parameters in low
    precision, as in the checkpoints of a pretraining run. Step counts, settings of groups (learning rates, betas,
    weight decay), the loss scale and the scheduler are in the metadata.

    Args:
        model: a wrapper or plain module, or the chunks of a pipeline stage.
        optimizer: what `get_megatron_optimizer` or `shard_optimizer` returns; several that update one model each have
            a part of its parameters. The average of its `AveragedWeights` belongs to it. None for a model that is not
            trained.
        scheduler: sets the groups' learning rates, one for each optimizer; None without one.

    Raises:
        CheckpointError: an optimizer of torch's own or of another model, or a scheduler of another optimizer.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: TrainedOptimizer | Sequence[TrainedOptimizer] | None,
        scheduler: Scheduler | Sequence[Scheduler | None] | None = None,
    ) -> None:
        self.chunks = [model] if isinstance(model, nn.Module) else list(model)
        self.optimizers: list[TrainedOptimizer] = _listed(optimizer)
        self.schedulers: list[Scheduler | None] = _listed(scheduler) or [None] * len(self.optimizers)
        self._check_parts()

    def _check_parts(self) -> None:
        settle_parameters(*self.chunks)  # else a module may hold what FSDP2 has gathered
        params = {param for chunk in self.chunks for param in chunk.parameters()}
        for optimizer in self.optimizers:
            kind = type(optimizer).__name__
            if not hasattr(optimizer, "state_scalars"):
                raise CheckpointError(
                    f"{kind} is not an optimizer that names its state by parameter; give what "
                    f"shardstack.optimizer.shard_optimizer({kind}(...), model) or get_megatron_optimizer returned"
                )
            if foreign := len(optimizer.main_tensors().keys() - params):
                raise CheckpointError(
                    f"{foreign} of the parameters that the optimizer updates are not the model's; give the model that "
                    "the optimizer was built for"
                )
        if len(self.schedulers) != len(self.optimizers):
            raise CheckpointError(
                f"there are {len(self.schedulers)} schedulers and {len(self.optimizers)} optimizers; give one for "
                "each, None for an optimizer without"
            )
        for optimizer, scheduler in zip(self.optimizers, self.schedulers, strict=True):
            scheduled = getattr(scheduler, "optimizer", None)
            if scheduled is not None and scheduled not in (optimizer, getattr(optimizer, "optimizer", None)):
                raise CheckpointError(
                    f"the {type(scheduler).__name__} sets the rates of another optimizer than the one it is saved or "
                    "loaded with; build it for this one"
                )

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor of the whole model and its optimizer by name. They share this rank's storage."""
        settle_parameters(*self.chunks)
        model = {name: t for chunk in self.chunks for name, t in model_state_dict(unwrap_model(chunk)).items()}
        state: dict[str, Tensor] = {}
        for optimizer in self.optimizers:
            of_one = optimizer.state_tensors()
            if twice := sorted(state.keys() & of_one.keys()):
                raise CheckpointError(f"two optimizers have a state {twice[0]}; each parameter belongs to one of them")
            state |= of_one
        return named_for_checkpoint(model, state)

    def metadata(self) -> dict[str, Any]:
        """Returns the rest of the state as JSON. All ranks of a pipeline call it.

        Raises:
            CheckpointError: the scheduler keeps tensors, or what JSON does not hold.
        """
        schedulers, tensors = [], dict[str, Tensor]()
        for one in self.schedulers:
            state = {} if one is None else encode(one.state_dict(), "the scheduler", tensors)
            schedulers.append(None if one is None else {"kind": _kind(one), **state})
        if tensors:
            raise CheckpointError(f"the scheduler keeps tensors ({', '.join(tensors)}); save it by itself")
        return {"optimizer": [one.state_scalars() for one in self.optimizers], "scheduler": schedulers}

    def continue_from(self, metadata: Mapping[str, Any]) -> None:
        """Continues from `metadata`, once other code has filled `tensors`.

        Raises:
            CheckpointError: as `check`.
        """
        self.check(metadata)
        for optimizer, scalars in zip(self.optimizers, metadata["optimizer"], strict=True):
            optimizer.load_state_scalars(scalars)
        for scheduler, saved in zip(self.schedulers, metadata["scheduler"], strict=True):
            if scheduler is not None:
                state = {name: value for name, value in saved.items() if name != "kind"}
                scheduler.load_state_dict(decode(state, dict[str, Tensor]().__getitem__))

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Checks that `metadata` is of a training like this one. Changes nothing.

        Raises:
            CheckpointError: the metadata has more or fewer optimizers or schedulers, or others.
        """
        for name, own in (("optimizer", self.optimizers), ("scheduler", self.schedulers)):
            saved, needed = (sum(part is not None for part in parts) for parts in (metadata.get(name, ()), own))
            if saved != needed:
                raise CheckpointError(
                    f"the checkpoint has {saved or 'none'} of the {name}'s states, and this run needs "
                    f"{needed or 'none'}; build what the run had that saved it, or load the model alone, by "
                    "shardstack.dist_checkpointing.load_weights"
                )
        for one, state in zip(self.schedulers, metadata["scheduler"], strict=True):
            has, needs = state and state.get("kind"), one and _kind(one)
            if has != needs:
                raise CheckpointError(
                    f"the checkpoint has the state of a {has}, and the scheduler here is a {needs}; build the one "
                    "that was saved"
                )
        for optimizer, scalars in zip(self.optimizers, metadata["optimizer"], strict=True):
            optimizer.check_state_scalars(scalars)


def save_training(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    step: int = 0,
    extra: Any = None,
    *,
    keep: Retention | None = None,
    saver: AsyncSaver | None = None,
) -> Path:
    """Writes all of a training into ``folder/iter_<step>``, and points ``folder/latest`` to it. Collective.

    ::

        save_training("run", model, optimizer, scheduler, step, extra={"epoch": epoch})
        step, extra = load_training("run", model, optimizer, scheduler)

    A checkpoint has the parameters and buffers of the model, the state and groups of the optimizer, the scheduler, and
    the random streams of each rank (torch's, numpy's and Python's). It is complete under its name or not there at all,
    and has a hash of each whole tensor. Any wrapper on any number of ranks continues from it.

    Args:
        folder: of the run.
        model: a wrapper, a plain module on one rank, or the chunks of a pipeline stage. Several models by name, as
            ``{"teacher": ..., "student": ...}``: then `optimizer` and `scheduler` are dicts too, with a part of the
            names.
        optimizer: what `shard_optimizer` or `get_megatron_optimizer` returned, or a list of those that share a model.
        scheduler: one of torch's or ours, for each optimizer.
        step: number of updates made.
        extra: what else the loop needs, the same on all ranks: numbers, text, lists, dicts and tensors.
        keep: which older checkpoints of the folder stay, as in `shardstack.dist_checkpointing.save`.
        saver: writes in the background. Call its `wait` at the end.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: on all ranks, if it failed on one; earlier checkpoints are unchanged. Also an optimizer of
            another model, or a scheduler of another optimizer.
    """
    ranks = Ranks()
    if not isinstance(step, SupportsIndex) or (step := operator.index(step)) < 0:
        raise CheckpointError(f"step is {step!r}; give the number of updates made, 0 or more")
    states = ranks.on_all(lambda: _states(model, optimizer, scheduler))
    kept: dict[str, Tensor] = {}
    values = ranks.on_all(lambda: encode(extra, _EXTRA, kept))
    hashes = {name: box_hash(tensor, [0] * tensor.dim(), tensor.shape) for name, tensor in kept.items()}
    texts = ranks.all_gather(json.dumps([str(folder), step, values, hashes], sort_keys=True))
    if differing := [rank for rank, text in enumerate(texts) if text != texts[0]]:
        raise CheckpointError(
            f"folder, step or extra differs on ranks 0 and {differing[0]}, and one value is saved; give all ranks the "
            "same, such as a list of what each has (torch.distributed.all_gather_object)"
        )
    metadata: dict[str, Any] = {"step": step, _EXTRA: values, "layout": rank_layout()}
    metadata["training"] = {prefix: state.metadata() for prefix, state in states.items()}
    tensors = {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.tensors().items()}
    metadata[FINITE] = all_finite(tensors, ranks)
    streams = own_streams()
    metadata["rng_bytes"] = sum(map(len, streams.values()))
    tensors |= {name: of_first_rank(tensor) for name, tensor in kept.items()} | streams
    path = checkpoint_directory(folder, step)
    (save if saver is None else saver.save)(tensors, path, metadata=metadata, keep=keep)
    return path


def load_training(
    folder: str | os.PathLike[str], model: Any, optimizer: Any, scheduler: Any = None
) -> tuple[int, Any]:
    """Continues from what `save_training` has written, in place. Collective.

    Values are compared with their hashes. Random streams go on where the number of ranks and the degrees of model
    parallelism are the saved ones; on others a warning says that they do not, and the caller seeds them by the step.

    Args:
        folder: of the run, whose latest checkpoint is loaded, or one checkpoint.
        model, optimizer, scheduler: built as in the run that saved it, under any wrapper.

    Returns:
        ``(step, extra)`` as they were saved.

    Raises:
        CheckpointError: on all ranks. There is no checkpoint, or it is of another model, optimizer or scheduler,
            before anything is changed. Or it is damaged, or its weights are not finite: then another one is named.
    """
    ranks = Ranks()
    found = ranks.from_first(lambda: find_checkpoint(Path(folder)))
    with another_offered(found, ranks):
        index = ranks.from_first(lambda: read_index(existing_folder(found)))
    saved = index.metadata
    if not isinstance(saved.get("training"), dict):
        raise CheckpointError(
            f"{found} was not written by save_training; continue it by what has, or load its weights by "
            "shardstack.dist_checkpointing.load"
        )
    if saved.get(FINITE) is False:
        raise CheckpointError(f"{found} holds weights that are infinite or NaN; {advice(found, ranks)}")

    def check() -> dict[str, RunState]:
        states = _states(model, optimizer, scheduler)
        if states.keys() != saved["training"].keys():
            has, given = (", ".join(sorted(keys)) or "one" for keys in (saved["training"], states))
            raise CheckpointError(f"{found} has the models {has}, and {given} was given; give the same")
        for prefix, state in states.items():
            state.check(saved["training"][prefix])
        return states

    states = ranks.on_all(check)
    kept = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in index.tensors.items() if n.startswith(f"{_EXTRA}.")}
    tensors = {prefix + name: tensor for prefix, state in states.items() for name, tensor in state.tensors().items()}
    streams = own_streams(saved)
    with another_offered(found, ranks):
        load(tensors | kept | streams, found, cast=True, optional=STREAMS)
    for prefix, state in states.items():
        state.continue_from(saved["training"][prefix])
    for state_of_all in streams.values():
        set_packed_rng_state(state_of_all)
    if not streams and ranks.is_first:
        warnings.warn(
            f"{found} was saved on {saved['layout']['ranks']} ranks, and here are {ranks.size}, or other degrees of "
            "model parallelism: random streams start anew; seed them by the step where dropout or data need them",
            stacklevel=2,
        )
    return saved["step"], decode(saved[_EXTRA], kept.__getitem__)


def load_weights(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    name: str = "",
    verify: bool = True,
    report: Callable[[str], None] | None = None,
) -> None:
    """Fills a model's parameters and buffers from the checkpoint of a training, and leaves the rest. Collective.

    Args:
        folder: of the run, whose latest checkpoint is loaded, or one checkpoint.
        model: plain in one process, or wrapped.
        name: of the model, where `save_training` was given several.
        verify, report: as in `shardstack.dist_checkpointing.load`.

    Raises:
        CheckpointError: on all ranks. There is none, it is of another model, or damaged; then another one is named.
    """
    ranks, prefix = Ranks(), f"{name}." if name else ""
    found = ranks.from_first(lambda: find_checkpoint(Path(folder)))
    settle_parameters(model)
    weights = named_for_checkpoint(model_state_dict(unwrap_model(model)), {})
    with another_offered(found, ranks):
        index = ranks.from_first(lambda: read_index(existing_folder(found)))
        others = tuple(other for other in index.tensors if not other.startswith(prefix + MODEL))
        tensors = {prefix + key: tensor for key, tensor in weights.items()}
        load(tensors, found, verify=verify, cast=True, report=report, optional=others)


_EXTRA = "extra"


def _states(model: Any, optimizer: Any, scheduler: Any) -> dict[str, RunState]:
    """Returns the state of each model, by what its names begin with in a checkpoint."""
    if not isinstance(model, Mapping):
        return {"": RunState(model, optimizer, scheduler)}
    of = {"optimizer": optimizer or {}, "scheduler": scheduler or {}}
    for name, parts in of.items():
        if not isinstance(parts, Mapping) or (unknown := parts.keys() - model.keys()):
            found = f"a {type(parts).__name__}" if not isinstance(parts, Mapping) else sorted(unknown)
            raise CheckpointError(f"models are {sorted(model)} and {name} has {found}; give a dict with these names")
    if taken := [name for name in model if "." in name or name in (_EXTRA, "rng")]:
        raise CheckpointError(f"a model has the name {taken[0]!r}; give one without a dot, and not 'extra' or 'rng'")
    return {f"{k}.": RunState(m, of["optimizer"].get(k), of["scheduler"].get(k)) for k, m in model.items()}


def rank_layout() -> dict[str, int]:
    """Returns the number of ranks and the degrees of model parallelism, to which random streams belong."""
    groups = groups_in_effect(names=("tp", "cp", "pp"))
    sizes = {"tensor": groups.tp, "context": groups.cp, "pipeline": groups.pp}
    degrees = {name: 1 if group is None else group.size() for name, group in sizes.items()}
    if degrees["pipeline"] == 1:
        del degrees["pipeline"]  # as runs of one stage have always written it
    return {"ranks": Ranks().size, **degrees}


STREAMS = "rng."
"""How names of the random streams of ranks begin in a checkpoint."""


def own_streams(saved: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Returns this rank's random streams by their name in a checkpoint.

    Args:
        saved: metadata of the checkpoint that they shall continue: there are none if it is of another layout of ranks.
    """
    streams = packed_rng_state()
    is_of_others = saved is not None and (saved["layout"], saved["rng_bytes"]) != (rank_layout(), streams.numel())
    return {} if is_of_others else {f"{STREAMS}rank{Ranks().rank}": streams}


def _kind(scheduler: Any) -> str:
    """Returns the names of a scheduler's class, and of the schedulers inside, as `SequentialLR` has them."""
    return " ".join(type(one).__name__ for one in (scheduler, *getattr(scheduler, "_schedulers", ())))


def _listed(parts: Any) -> list[Any]:
    """Returns None, one or several as a list."""
    return [] if parts is None else list(parts) if isinstance(parts, Sequence) else [parts]
