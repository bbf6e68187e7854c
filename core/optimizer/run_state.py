"""The state of a training as one thing: model, optimizer with its averages, and scheduler, saved and loaded whole."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..base.errors import CheckpointError
from ..base.module_protocol import unwrap_model
from ..dist_checkpointing import AsyncSaver, load, load_metadata, model_state_dict, save
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.format.folders import Retention
from ..dist_checkpointing.format.json_values import decode, encode
from ..dist_checkpointing.model_state import named_for_checkpoint
from ..distributed import _BaseDataParallel
from .optimizer import MegatronOptimizer


class Scheduler(Protocol):
    """A schedule of learning rates: one of torch, or `core.optimizer_param_scheduler.OptimizerParamScheduler`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class RunState:
    """All that a training needs to go on, but for its data and random streams, on any number of ranks.

    ::

        state = RunState(model, optimizer, scheduler)
        state.save(folder / "iter_0000100", metadata={"step": 100})
        step = state.load(folder / "iter_0000100")["step"]          # under any wrapper and number of ranks

    Tensors are ``model.<name>`` and ``optimizer.<kind>.<name>``, with fp32 masters in the place of parameters in low
    precision, as in the checkpoints of a pretraining run. Step counts, settings of groups (learning rates, betas,
    weight decay), the loss scale and the scheduler are in the metadata.

    Args:
        model: a wrapper or plain module, or the chunks of a pipeline stage.
        optimizer: what `get_megatron_optimizer` returns. The average of its `AveragedWeights` belongs to it.
        scheduler: sets the groups' learning rates; None without one.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], optimizer: MegatronOptimizer, scheduler: Scheduler | None = None
    ) -> None:
        self.chunks = [model] if isinstance(model, nn.Module) else list(model)
        self.optimizer, self.scheduler = optimizer, scheduler

    def tensors(self) -> dict[str, Tensor]:
        """Returns every tensor of the whole model and its optimizer by name. They share this rank's storage."""
        for chunk in self.chunks:
            if isinstance(chunk, _BaseDataParallel):
                chunk.engine.parameters.settle()
        model = {name: t for chunk in self.chunks for name, t in model_state_dict(unwrap_model(chunk)).items()}
        return named_for_checkpoint(model, self.optimizer.state_tensors())

    def metadata(self) -> dict[str, Any]:
        """Returns the rest of the state as JSON. All ranks of a pipeline call it.

        Raises:
            CheckpointError: the scheduler keeps tensors, or what JSON does not hold.
        """
        scheduler, tensors = None, dict[str, Tensor]()
        if self.scheduler is not None:
            scheduler = {"kind": self._kind(), **encode(self.scheduler.state_dict(), "the scheduler", tensors)}
        if tensors:
            raise CheckpointError(f"the scheduler keeps tensors ({', '.join(tensors)}); save it by itself")
        return {"optimizer": self.optimizer.state_scalars(), "scheduler": scheduler}

    def _kind(self) -> str:
        """Returns the names of the scheduler's class, and of the schedulers inside, as `SequentialLR` has them."""
        inner = getattr(self.scheduler, "_schedulers", ())
        return " ".join(type(scheduler).__name__ for scheduler in (self.scheduler, *inner))

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        keep: Retention | None = None,
        saver: AsyncSaver | None = None,
    ) -> None:
        """Writes a checkpoint atomically. Collective over all ranks.

        Args:
            metadata: further values as JSON, such as the step.
            keep: as in `core.dist_checkpointing.save`.
            saver: writes it in the background.

        Raises:
            CheckpointError: on all ranks, if it failed on one.
        """
        write, own = save if saver is None else saver.save, self.metadata()
        if taken := own.keys() & (metadata or {}).keys():
            raise CheckpointError(f"metadata has {', '.join(sorted(taken))}, names of the state's own; rename them")
        write(self.tensors(), folder, metadata={**(metadata or {}), **own}, keep=keep)

    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Continues from a checkpoint of any wrapper and number of ranks. Collective over all ranks.

        Returns:
            Its metadata.

        Raises:
            CheckpointError: on all ranks: it is of another model, optimizer or scheduler, before anything is changed;
                or damaged.
        """
        ranks = Ranks()
        metadata = ranks.from_first(lambda: load_metadata(folder))
        ranks.on_all(lambda: self._check(metadata))
        load(self.tensors(), folder, cast=True)
        self.continue_from(metadata)
        return metadata

    def continue_from(self, metadata: Mapping[str, Any]) -> None:
        """Continues from `metadata`, once other code has filled `tensors`.

        Raises:
            CheckpointError: the metadata has no optimizer, or not the scheduler that there is here.
        """
        self._check(metadata)
        self.optimizer.load_state_scalars(metadata["optimizer"])
        if self.scheduler is not None:
            state = {name: value for name, value in metadata["scheduler"].items() if name != "kind"}
            self.scheduler.load_state_dict(decode(state, dict[str, Tensor]().__getitem__))

    def _check(self, metadata: Mapping[str, Any]) -> None:
        for name, own in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if (metadata.get(name) is None) != (own is None):
                has, needs = ("none", "one") if own is not None else ("one", "none")
                raise CheckpointError(
                    f"the checkpoint has {has} of the {name}'s states, and this run needs {needs}; build what the run "
                    "had that saved it, or load the model alone, by core.dist_checkpointing.load"
                )
        if self.scheduler is not None and metadata["scheduler"].get("kind") != self._kind():
            raise CheckpointError(
                f"the checkpoint has the state of a {metadata['scheduler'].get('kind')}, and the scheduler here is a "
                f"{self._kind()}; build the one that was saved"
            )
        self.optimizer.check_state_scalars(metadata["optimizer"])
