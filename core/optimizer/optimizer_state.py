"""The state of an optimizer, as checkpoints store it and a resumed run loads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .. import parallel_state
from ..base.errors import CheckpointError
from ..base.megatron_names import absent_method
from ..dist_checkpointing.agreement import Ranks
from ..dist_checkpointing.global_view import held_boxes
from .grad_scaler import GradScaler
from .main_params import MainParam, WrittenParams, refresh_masters
from .optimizer_config import OptimizerConfig
from .update_rules import SkippableRule, ensure_state, get_step_count, set_step_count, state_names


def scalars_of(counts: Mapping[str, int], grad_scaler: dict[str, Any]) -> dict[str, Any]:
    """Returns the scalars of an optimizer's state as checkpoints hold them.

    Args:
        counts: step counts by parameter name; most are equal.
        grad_scaler: state of the loss scale, empty if there is none.
    """
    step = Counter(counts.values()).most_common(1)[0][0]
    step_of = {name: count for name, count in counts.items() if count != step}
    return {"step": step, "step_of": step_of, "grad_scaler": grad_scaler}


def _has_stages() -> bool:
    return parallel_state.get_pipeline_model_parallel_world_size() > 1


class Average(Protocol):
    """An average of the weights, as the optimizer knows it: `core.optimizer.AveragedWeights`."""

    num_averaged: int

    def note_update(self, is_made: Tensor) -> None: ...
    def check_may_step(self) -> None: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def load_count(self, count: int | None) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class OptimizerState(ABC):
    """The updated tensors, moments, masters and loss scale, under the names that checkpoints use."""

    def __init__(
        self,
        config: OptimizerConfig,
        params: Sequence[MainParam],
        rule: torch.optim.Optimizer,
        grad_scaler: GradScaler | None,
    ) -> None:
        self.config = config
        self.optimizer = rule
        self.grad_scaler = grad_scaler
        self._params = params
        # Detects writes to parameters in low precision by other code. Updates, loads and `reload_model_params` report
        # to it that masters and parameters agree.
        self._written_params = WrittenParams(params)
        # Takes each update of the weights; saved with the state. `AveragedWeights` sets it once; None without one.
        self.average: Average | None = None

    @abstractmethod
    def finish_step(self) -> None:
        """Waits until the host knows the outcome of the last step."""

    @abstractmethod
    def _publish_parameters(self) -> None:
        """Copies updated or loaded values into the model's parameters."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The update's groups, which :func:`~core.optimizer.param_groups.build_param_groups` describes."""
        return self.optimizer.param_groups

    @property
    def main_params(self) -> Sequence[MainParam]:
        """The trainable parameters, each with the tensor that this rank updates, in one order on all ranks."""
        return self._params

    def main_tensors(self) -> dict[nn.Parameter, Tensor]:
        """Returns the tensor that is updated for each trainable parameter, as it is in `param_groups`."""
        return {p.param: p.main for p in self._params}

    @torch.no_grad()
    def reload_model_params(self) -> None:
        """Copies the model's parameters into the fp32 masters, after other code has written the parameters."""
        refresh_masters(self._params)
        self._written_params.note_agreement()

    def gradient_tensors(self) -> dict[str, Tensor]:
        """Returns the gradients that the next :meth:`step` reads, by parameter name, with zeros for missing ones.

        Each is a tensor of the whole model, like those of :meth:`state_tensors`, and shares this rank's storage.
        """
        gradients = {p: p.local_gradient() for p in self._params}
        return {p.name: p.whole(torch.zeros_like(p.main) if g is None else g) for p, g in gradients.items()}

    @torch.no_grad()
    def state_tensors(self) -> dict[str, Tensor]:
        """Returns every tensor of the state under ``<kind>.<parameter name>`` for a checkpoint, creating missing ones.

        All ranks call it. Kinds are ``exp_avg`` and ``exp_avg_sq``, or ``momentum_buffer``, ``master`` and
        ``average``. Each is a tensor of the whole model (`core.dist_checkpointing`'s `global_view` or
        `flat_range_view`) and shares this rank's storage: load into it, then call :meth:`load_state_scalars`. Masters
        include values that other code has written to parameters in low precision since the last step, because a
        checkpoint stores the master in place of the parameter.
        """
        self.finish_step()
        self._written_params.refresh_masters()
        self._share_state()
        tensors: dict[str, Tensor] = {}
        for p in self._params:
            kinds = state_names(self.optimizer, self.config, p.main)
            state = ensure_state(self.optimizer, p.main, kinds)
            tensors |= {f"{kind}.{p.name}": p.whole(state[kind]) for kind in kinds}
            if p.is_low_precision:
                tensors[f"master.{p.name}"] = p.whole(p.main)
        return tensors | (self.average.state_tensors() if self.average is not None else {})

    sharded_state_dict = absent_method("sharded_state_dict", "state_tensors() and state_scalars() go into checkpoints")

    def state_scalars(self) -> dict[str, Any]:
        """Returns the rest of the state as plain JSON: step count, parameters with another step count, loss scale.

        All ranks of a pipeline call it, and it has the parameters of all stages.
        """
        self.finish_step()
        counts = {p.name: get_step_count(self.optimizer, p.main) for p in self._params}
        if _has_stages():
            ranks = Ranks(parallel_state.get_pipeline_model_parallel_group())
            counts = {name: count for of_stage in ranks.all_gather(counts) for name, count in of_stage.items()}
        scalars = scalars_of(counts, self.grad_scaler.state_dict() if self.grad_scaler is not None else {})
        return scalars | ({"num_averaged": self.average.num_averaged} if self.average is not None else {})

    @torch.no_grad()
    def load_state_scalars(self, scalars: dict[str, Any]) -> None:
        """Continues from :meth:`state_scalars`, once the tensors are loaded, and writes masters into the parameters.

        Raises:
            CheckpointError: step counts for parameters that this model does not have.
        """
        self.finish_step()
        foreign_names = sorted(set(scalars["step_of"]) - {p.name for p in self._params})
        if foreign_names and not _has_stages():  # other stages have other parameters
            raise CheckpointError(
                f"the optimizer state names parameters that this model does not have: {', '.join(foreign_names[:5])}; "
                "load the checkpoint of this model"
            )
        for p in self._params:
            set_step_count(self.optimizer, p.main, int(scalars["step_of"].get(p.name, scalars["step"])))
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(scalars["grad_scaler"])
        if self.average is not None:
            self.average.load_count(scalars.get("num_averaged"))
        self._publish_parameters()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's state in torch's layout, with masters and loss scale. Only the same rank and cut can
        load it. All ranks call it."""
        self.finish_step()
        self._written_params.refresh_masters()
        self._share_state()
        return {
            "cut": self._cut(),
            "optimizer": self.optimizer.state_dict(),
            "masters": {p.name: p.main for p in self._params if p.is_low_precision},
            "grad_scaler": self.grad_scaler.state_dict() if self.grad_scaler is not None else {},
            "average": self.average.state_dict() if self.average is not None else {},
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`, and writes masters into the model's parameters.

        Every rank that shares an update must call it.

        Raises:
            CheckpointError: the state of another rank, cut or model, or with fp32 masters of other parameters, on any
                of these ranks.
        """
        self.finish_step()
        self._check_cut(state_dict.get("cut", {}))
        self._share_state()
        masters = {p.name: p.main for p in self._params if p.is_low_precision}
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for name, main in masters.items():
            main.copy_(state_dict["masters"][name])
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if self.average is not None:
            self.average.load_state_dict(state_dict.get("average", {}))
        self._publish_parameters()

    def _share_state(self) -> None:
        if isinstance(self.optimizer, SkippableRule):
            self.optimizer.share_state()

    def _cut(self) -> dict[str, Any]:
        """Returns by parameter name the kind of the updated tensor, and the offsets and shapes of this rank's part."""
        return {
            p.name: (
                "fp32 master" if p.is_low_precision else "parameter",
                [(offsets, tuple(box.shape)) for offsets, box in held_boxes(p.whole(p.main))],
            )
            for p in self._params
        }

    def _check_cut(self, theirs: Mapping[str, Any]) -> None:
        own = self._cut()
        differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        message = None
        if name := next(iter(differing), None):
            message = (
                f"the optimizer state of another rank, cut, precision or model was to be loaded: of {name} it has "
                f"{theirs.get(name)}, by offsets and shapes, and this rank {own.get(name)}; load on each rank what it "
                "has saved, or use core.dist_checkpointing, whose checkpoints fit any cut"
            )
        for group in dict.fromkeys(group for p in self._params for group in p.shard_groups()):
            # Without it the ranks whose state fits would wait for the others in their next collective.
            message = next(filter(None, Ranks(group).all_gather(message)), None)
        if message:
            raise CheckpointError(message)
