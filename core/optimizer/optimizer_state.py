"""The state of an optimizer, as checkpoints store it and a resumed run loads it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ..base.errors import CheckpointError, OptimizerError
from ..base.megatron_names import absent_method
from ..dist_checkpointing.agreement import Ranks, pipeline_ranks
from ..dist_checkpointing.global_view import held_boxes, local_tensor
from ..dist_checkpointing.loading import when_loaded
from ..process_groups_config import ProcessGroupCollection
from .grad_scaler import GradScaler
from .main_params import MainParam, WrittenParams, refresh_masters
from .optimizer_config import OptimizerConfig
from .param_groups import groups_to_json, load_groups, saved_settings
from .update_rules import MASTER, Numbers

if TYPE_CHECKING:
    from .torch_rule import UpdateRule


def scalars_of(
    numbers: Mapping[str, Numbers | None], grad_scaler: dict[str, Any], groups: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the scalars of an optimizer's state as checkpoints hold them.

    Args:
        numbers: of each parameter by name; most are equal. None is a parameter without state.
        grad_scaler: state of the loss scale, empty if there is none.
        groups: `groups_to_json` of the groups.
    """
    kept = {name: of_param for name, of_param in numbers.items() if of_param is not None}
    kinds = sorted({kind for of_param in kept.values() for kind in of_param})
    others = {kind: _by_most({n: of[kind] for n, of in kept.items() if kind in of}) for kind in kinds}
    step, step_of = others.pop("step", (0, {}))
    scalars = {"step": step, "step_of": step_of}
    if len(kept) < len(numbers):
        scalars["without_state"] = sorted(numbers.keys() - kept)
    if others:
        scalars["numbers"] = {kind: {"most": most, "of": of} for kind, (most, of) in others.items()}
    names_of: dict[str, set[str]] = {}  # by settings, in an order that no cut of the model changes
    for group in groups:
        settings = json.dumps({key: value for key, value in group.items() if key != "params"}, sort_keys=True)
        names_of.setdefault(settings, set()).update(group["params"])
    merged = [{**json.loads(key), "params": sorted(names)} for key, names in sorted(names_of.items()) if names]
    return scalars | {"grad_scaler": grad_scaler, "groups": merged}


def _by_most(values: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    """Returns the value that most parameters have, and those of the others."""
    ((most, _),) = Counter(values.values()).most_common(1)
    return most, {name: value for name, value in values.items() if value != most}


def numbers_in(scalars: Mapping[str, Any], name: str) -> Numbers | None:
    """Returns the numbers of a parameter in `scalars_of`."""
    if name in scalars.get("without_state", ()):
        return None
    others = {kind: of["of"].get(name, of["most"]) for kind, of in scalars.get("numbers", {}).items()}
    return {"step": scalars["step_of"].get(name, scalars["step"]), **others}


class Average(Protocol):
    """An average of the weights, as the optimizer knows it:
    `shardstack.optimizer.averaged_weights.AveragedWeights`."""

    num_averaged: int

    def note_update(self, is_made: Tensor) -> None: ...
    def check_may_step(self) -> None: ...
    def held(self, params: Sequence[MainParam]) -> Sequence[Tensor]: ...
    def state_tensors(self) -> dict[str, Tensor]: ...


class OptimizerState(torch.optim.Optimizer, ABC):
    """The updated tensors, moments, masters and loss scale, under the names that checkpoints use.

    Torch's schedulers take it. The state and the groups are those of the update rule inside, so that torch's own
    constructor is not called.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        params: Sequence[MainParam],
        rule: UpdateRule,
        grad_scaler: GradScaler | None,
        groups: ProcessGroupCollection,
    ) -> None:
        self.config = config
        self.rule, self.optimizer = rule, rule.optimizer
        self.grad_scaler = grad_scaler
        self._params = params
        self.model_groups = groups
        """The groups of the model."""
        # Detects writes to parameters in low precision by other code. Updates, loads and `reload_model_params` report
        # to it that masters and parameters agree.
        self._written_params = WrittenParams(params)
        # Takes each update of the weights; saved with the state. `AveragedWeights` sets it once; None without one.
        self.average: Average | None = None
        # Whether a checkpoint has filled tensors of the state, and the rest of it is still of another moment. A load
        # sets it, `load_state_scalars` clears it.
        self._is_half_loaded = False
        for moment in ("step", "state_dict", "load_state_dict"):  # where torch's methods register hooks
            vars(self).update({f"_optimizer_{moment}_{when}_hooks": OrderedDict() for when in ("pre", "post")})

    @abstractmethod
    def finish_step(self) -> None:
        """Waits until the host knows the outcome of the last step."""

    @abstractmethod
    def _publish_parameters(self, weights: Mapping[Tensor, Tensor] | None = None) -> None:
        """Copies updated or loaded values into the model's parameters."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The moments of each updated tensor."""
        return self.optimizer.state

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # `torch.amp.GradScaler.step` asks for it, which finds no gradients to unscale and would say so alone.
        raise OptimizerError(
            "torch.amp.GradScaler cannot unscale gradients in a wrapper's memory; set OptimizerConfig(fp16=True), and "
            "call optimizer.scale_loss(loss).backward() and optimizer.step()"
        )

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The settings that groups have if they are given none."""
        return self.optimizer.defaults

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)  # of any object, where torch's has groups and state alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)  # torch's would replace `step` of the class

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The update's groups, which :func:`~shardstack.optimizer.param_groups.build_param_groups` describes."""
        return self.optimizer.param_groups

    @property
    def main_params(self) -> Sequence[MainParam]:
        """The trainable parameters, each with the tensor that this rank updates, in one order on all ranks."""
        return self._params

    def held(self, of: Container[nn.Parameter]) -> Iterator[Tensor]:
        """Yields what this rank keeps of some parameters besides `state`: masters, averages, what writes are found
        by."""
        params = [p for p in self._params if p.param in of]
        yield from (p.main for p in params if p.is_copied)
        yield from self._written_params.held(params)
        yield from self.rule.stored.tensors(params)
        yield from self.average.held(params) if self.average is not None else ()

    def note_moved(self, parameters: Container[nn.Parameter]) -> None:
        """Takes note that a wrapper has brought the memory of its parameters back, at other addresses."""
        for p in self._params:
            if p.param in parameters:
                p.note_storage()

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
        ``average``. Each is a tensor of the whole model (`shardstack.dist_checkpointing`'s `global_view` or
        `flat_range_view`) and shares this rank's storage: load into it, then call :meth:`load_state_scalars`. What is
        kept in fewer bits is copied to fp32 on the host, exactly, so that any precision can continue from it; these
        copies are valid until the next step. Masters include values that other code has written to parameters in low
        precision since the last step, because a checkpoint stores the master in place of the parameter.
        """
        self.finish_step()
        self._written_params.refresh_masters()
        self.rule.share_state()
        tensors: dict[str, Tensor] = {}
        for p in self._params:
            tensors |= {f"{kind}.{p.name}": p.whole(state) for kind, state in self.rule.state_of(p.main).items()}
            if p.is_low_precision:
                tensors[f"{MASTER}.{p.name}"] = p.whole(self.rule.stored.for_checkpoint(p.main, MASTER, p.main))
        tensors |= self.average.state_tensors() if self.average is not None else {}
        when_loaded(tensors.values(), self._note_loaded)
        return tensors

    def _note_loaded(self) -> None:
        self._is_half_loaded = True
        self.rule.stored.note_loaded()

    def check_whole(self) -> None:
        """Raises if a checkpoint has filled tensors of the state alone.

        Raises:
            OptimizerError: names what is missing.
        """
        if self._is_half_loaded:
            raise OptimizerError(
                "tensors of the optimizer's state were loaded from a checkpoint, and its step counts, learning rates, "
                "decay and loss scale were not; call load_state_scalars() with what state_scalars() returned when it "
                "was saved, or by shardstack.dist_checkpointing.load_training, which does both"
            )

    sharded_state_dict = absent_method("sharded_state_dict", "state_tensors() and state_scalars() go into checkpoints")

    def state_scalars(self) -> dict[str, Any]:
        """Returns the rest of the state as plain JSON: step counts, settings of groups (learning rates), loss scale.

        All ranks of a pipeline call it, and it has the parameters of all stages.

        Raises:
            CheckpointError: a group has a setting that JSON does not hold.
        """
        self.finish_step()
        numbers = {p.name: self.rule.numbers_of(p.main) for p in self._params}
        groups = groups_to_json(self.param_groups, self._names_of_mains())
        of_stages = pipeline_ranks(self.model_groups).all_gather((numbers, groups))
        numbers = {name: of_param for of_stage, _ in of_stages for name, of_param in of_stage.items()}
        groups = [group for _, of_stage in of_stages for group in of_stage]
        scalars = scalars_of(numbers, self.grad_scaler.state_dict() if self.grad_scaler is not None else {}, groups)
        scalars["kind"] = type(self.optimizer).__name__
        return scalars | ({"num_averaged": self.average.num_averaged} if self.average is not None else {})

    def _names_of_mains(self) -> dict[Tensor, str]:
        return {p.main: p.name for p in self._params}

    def check_state_scalars(self, scalars: Mapping[str, Any], *, with_groups: bool = True) -> list[dict[str, Any]]:
        """Returns the settings that `load_state_scalars` would give to each group. Changes nothing.

        Raises:
            CheckpointError: the state of another class of optimizer, step counts for parameters that this model does
                not have, groups with other parameters, or no average where the optimizer keeps one.
        """
        kind = type(self.optimizer).__name__
        if (saved := scalars.get("kind", kind)) != kind:
            raise CheckpointError(
                f"the checkpoint has the state of {saved}, and the optimizer here is {kind}; build the saved one"
            )
        if self.average is not None and "num_averaged" not in scalars:
            raise CheckpointError("the checkpoint holds no averaged weights; build AveragedWeights after loading it")
        foreign_names = sorted(set(scalars["step_of"]) - {p.name for p in self._params})
        if foreign_names and pipeline_ranks(self.model_groups).size == 1:  # other stages have other parameters
            raise CheckpointError(
                f"the optimizer state names parameters that this model does not have: {', '.join(foreign_names[:5])}; "
                "load the checkpoint of this model"
            )
        if not with_groups:
            return [{}] * len(self.param_groups)
        return saved_settings(self.param_groups, self._names_of_mains(), scalars.get("groups", []))

    @torch.no_grad()
    def load_state_scalars(self, scalars: Mapping[str, Any], *, with_groups: bool = True) -> None:
        """Continues from :meth:`state_scalars`, once the tensors are loaded, and writes masters into the parameters.

        Args:
            with_groups: if False, groups keep their learning rates, decay and betas: those of another configuration.

        Raises:
            CheckpointError: as `check_state_scalars`.
        """
        self.finish_step()
        load_groups(self.param_groups, self.check_state_scalars(scalars, with_groups=with_groups))
        for p in self._params:
            self.rule.set_numbers(p.main, numbers_in(scalars, p.name))
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(scalars["grad_scaler"])
        if self.average is not None:
            self.average.num_averaged = scalars["num_averaged"]
        self.rule.stored.take_copies()
        self._is_half_loaded = False
        self._publish_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of each of `state_tensors`, which shares the optimizer's memory, and the scalars.

        Only the same rank and cut can load it. All ranks call it. Runs torch's hooks.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        tensors = {name: local_tensor(tensor) for name, tensor in self.state_tensors().items()}
        state = {"cut": self._cut(), "tensors": tensors, "scalars": self.state_scalars()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from :meth:`state_dict`, and writes masters into the model's parameters. Runs torch's hooks.

        Every rank that shares an update must call it.

        Raises:
            CheckpointError: the state of another rank, cut or model, or with fp32 masters of other parameters, on any
                of these ranks; or what `state_dict` has not returned.
        """
        self.finish_step()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._check_cut(state_dict)
        scalars = state_dict["scalars"]
        self.check_state_scalars(scalars)
        for name, tensor in self.state_tensors().items():
            local_tensor(tensor).copy_(state_dict["tensors"][name])
        self.load_state_scalars(scalars)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _cut(self) -> dict[str, Any]:
        """Returns by parameter name the kind of the updated tensor, and the offsets and shapes of this rank's part."""
        return {
            p.name: (
                "fp32 master" if p.is_low_precision else "parameter",
                [(offsets, tuple(box.shape)) for offsets, box in held_boxes(p.whole(p.main))],
            )
            for p in self._params
        }

    def _check_cut(self, state_dict: Mapping[str, Any]) -> None:
        own, theirs = self._cut(), state_dict.get("cut", {})
        differing = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        message = None
        if missing := {"cut", "tensors", "scalars"} - state_dict.keys():
            message = (
                f"the optimizer state has no {', '.join(sorted(missing))}; load what state_dict() of this version "
                "returned, or a checkpoint, by shardstack.dist_checkpointing.load_training"
            )
        elif name := next(iter(differing), None):
            message = (
                f"the optimizer state of another rank, cut, precision or model was to be loaded: of {name} it has "
                f"{theirs.get(name)}, by offsets and shapes, and this rank {own.get(name)}; load on each rank what it "
                "has saved, or use shardstack.dist_checkpointing, whose checkpoints fit any cut"
            )
        for group in dict.fromkeys(group for p in self._params for group in p.shard_groups()):
            # Without it the ranks whose state fits would wait for the others in their next collective.
            message = next(filter(None, Ranks(group).all_gather(message)), None)
        if message:
            raise CheckpointError(message)
