"""The optimizer in Megatron-LM's ``--save`` and ``--load``, under the wrappers of this adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, param_group_identifier_keys
from torch import Tensor, nn

from ... import optimizer
from ...base.errors import CheckpointError, ParallelConfigError
from ...base.parameters import local_part
from ...distributed import TorchFullyShardedDataParallel, _BaseDataParallel
from ...distributed.groups import is_expert_parameter
from ...optimizer.main_params import MainParam
from ...optimizer.main_ranges import MainRange
from ...optimizer.update_rules import MASTER
from ..bridge.trained import mix_in
from .pieces import Entry, fill, held_pieces, own_elements, whole_model_state
from .settings import print_first


class HeldState(NamedTuple):
    """What this rank has of an optimizer's state of one parameter."""

    param: nn.Parameter
    start: int
    """Place of this rank's first element in the flattened parameter."""

    tensors: dict[str, Tensor]
    """By kind, `[n]`, sharing the optimizer's memory: moments, and the fp32 master as ``fp32_param``."""

    step: int
    """Number of updates."""

    set_step: Callable[[int], None]


Groups = list[tuple[dict[str, Any], list[HeldState]]]
"""Groups of an optimizer, and their members."""

_NOT_LOADED = ("params", "foreach", "fused", "capturable", "differentiable", "step")
"""What groups of a checkpoint do not set."""


class StateInPieces:
    """An optimizer in Megatron-LM's loop whose state is saved and loaded by what this rank has of it.

    The state has the layout that Megatron-LM gives to optimizers of replicas: one for dense parameters, and one for
    experts where there are any.
    """

    wrappers: Sequence[_BaseDataParallel]
    """The model's chunks. Set once."""

    config: Any
    grad_scaler: Any

    def held_groups(self, is_loading: bool) -> Groups:
        """Returns what this rank has. What is to be loaded is created."""
        raise NotImplementedError

    def _parts(self, is_loading: bool) -> list[tuple[bool, Groups]]:
        """Returns the groups of dense parameters, and of experts, without empty ones."""
        held = self.held_groups(is_loading)
        parts = list[tuple[bool, Groups]]()
        for kind in (False, True):
            of_kind = [
                (group, [one for one in ones if is_expert_parameter(one.param) == kind]) for group, ones in held
            ]
            parts.append((kind, [(group, ones) for group, ones in of_kind if ones]))
        return [part for part in parts if part[1]]

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, *, metadata: Any = None, **unused: Any
    ) -> dict[Any, Any]:
        """Returns the state for Megatron-LM's `save` and `load`.

        Args:
            model_sharded_state_dict: not read: the model gives its own in pieces too.
            metadata: Megatron-LM's, of the checkpoint.

        Raises:
            CheckpointError: a checkpoint of Megatron-LM's `DistributedOptimizer` that is bound to its buckets.
        """
        metadata = metadata or {}
        layout = metadata.get("distrib_optim_sharding_type", "fully_reshardable")
        if is_loading and layout != "fully_reshardable":
            raise CheckpointError(
                f"the checkpoint has the state of Megatron-LM's distributed optimizer as {layout}, which other "
                "optimizers cannot read; save it with --dist-ckpt-optim-fully-reshardable, or give --no-load-optim"
            )
        entries = {
            id(entry.data): (wrapper, entry)
            for wrapper in self.wrappers
            for entry in nested_values(whole_model_state(wrapper, metadata=metadata))
            if isinstance(entry, Entry)
        }
        states = list[dict[str, Any]]()
        for is_expert, groups in self._parts(is_loading):
            members = [held for _, of_group in groups for held in of_group]
            step = members[0].step
            inner = {
                "param_groups": [_settings(group, is_expert) | {"step": step} for group, _ in groups],
                "state": {"common_step": torch.tensor(float(step))} if step else {},
            }
            states.append({"optimizer": inner} if self.config.bf16 or self.config.fp16 else inner)
            if scales := self.grad_scaler.state_dict() if self.grad_scaler else {}:
                states[-1]["grad_scaler"] = scales | {"scale": torch.as_tensor(scales["scale"]).view(1)}
            pieces = {
                f"{index}.{kind}": held_pieces(
                    *entries[id(held.param)], values, held.start, f"optimizer.state.{kind}."
                )
                for index, held in enumerate(members)
                for kind, values in held.tensors.items()
            }
            states[-1]["pieces"] = {name: boxes for name, boxes in pieces.items() if boxes}
        if len(states) == 1:
            return states[0]
        if not metadata.get("chained_optim_avoid_prefix"):
            for index, state in enumerate(states):
                add_prefix_for_sharding(state, f"chained_{index}.")
        return dict(enumerate(states))

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Continues from what Megatron-LM has loaded: in pieces, or whole as from its format ``torch``.

        Raises:
            CheckpointError: the state of another optimizer, or a part of it.
        """
        is_one = isinstance(state_dict, dict) and bool({"optimizer", "param_groups"} & state_dict.keys())
        states = [state_dict] if is_one else [*getattr(state_dict, "values", lambda: state_dict)()]
        for (is_expert, groups), saved in zip(self._parts(True), states, strict=True):
            self._load(is_expert, groups, saved)

    def _load(self, is_expert: bool, groups: Groups, saved: Any) -> None:
        inner, places = saved.get("optimizer", saved), count()
        state, pieces = inner.get("state", {}), saved.get("pieces", {})
        for group, members in groups:
            settings = _settings(group, is_expert)
            identity = {name: settings.get(name) for name in param_group_identifier_keys}
            fits = [all(other.get(k, v) == v for k, v in identity.items()) for other in inner["param_groups"]]
            if True not in fits:
                raise CheckpointError(
                    f"the checkpoint has no group of parameters with {identity}; give the flags that it was saved with"
                )
            found, number = inner["param_groups"][fits.index(True)], fits.index(True)
            group.update({name: value for name, value in found.items() if name in group and name not in _NOT_LOADED})
            masters = iter(saved["fp32_from_fp16_params"][number] if "fp32_from_fp16_params" in saved else ())
            for position, held in enumerate(members):
                index, whole = next(places), dict[str, Any]()
                if state.keys() - {"common_step"}:  # of the format torch
                    whole = dict(state[found["params"][position]])
                    whole |= {"fp32_param": next(masters)} if "fp32_param" in held.tensors else {}
                for kind, values in held.tensors.items():
                    if kind in whole:
                        values.copy_(whole[kind].detach().reshape(-1)[held.start : held.start + len(values)])
                    elif f"{index}.{kind}" in pieces:
                        fill(values, pieces[f"{index}.{kind}"])
                    elif len(values):
                        raise CheckpointError(
                            f"the checkpoint has no {kind} of the optimizer, as ZeRO-1's of the format torch; save as "
                            "torch_dist, or give --no-load-optim"
                        )
                held.set_step(int(state.get("common_step", whole.get("step", found.get("step", 0)))))
        if self.grad_scaler and "grad_scaler" in saved:
            self.grad_scaler.load_state_dict(saved["grad_scaler"])


def _settings(group: Mapping[str, Any], is_expert: bool) -> dict[str, Any]:
    """Returns what Megatron-LM's checkpoints have of a group, with what its readers ask for in addition."""
    settings = {"is_expert_parallel": is_expert, "is_decoupled_lr": False, "bias_correction": True}
    return settings | {name: value for name, value in group.items() if name not in _NOT_LOADED}


# The order of bases below lets an object of the first one's class become one of them.


class OwnStateInPieces(optimizer.MegatronOptimizer, StateInPieces):
    """An optimizer of this library in Megatron-LM's loop."""

    sharded_state_dict = StateInPieces.sharded_state_dict  # type: ignore[assignment]

    def held_groups(self, is_loading: bool) -> Groups:
        self.finish_step()
        self._written_params.refresh_masters()
        self.rule.share_state()
        params = {p.main: p for p in self._params}
        return [(group, [self._held(params[main]) for main in group["params"]]) for group in self.param_groups]

    def _held(self, p: MainParam) -> HeldState:
        tensors = dict(self.rule.state_of(p.main))
        if p.is_low_precision:
            tensors["fp32_param"] = self.rule.stored.for_checkpoint(p.main, MASTER, p.main)
        flat = {kind: tensor.view(-1) for kind, tensor in tensors.items()}
        step = int((self.rule.numbers_of(p.main) or {}).get("step", 0))
        start = p.start if isinstance(p, MainRange) else 0
        return HeldState(p.param, start, flat, step, lambda step: self.rule.set_numbers(p.main, {"step": step}))

    def load_state_dict(self, state_dict: Any) -> None:
        StateInPieces.load_state_dict(self, state_dict)
        with torch.no_grad():
            self.rule.stored.take_copies()
            self._publish_parameters()


class ChainInPieces(ChainedOptimizer, StateInPieces):
    """Megatron-LM's optimizer of a model under FSDP2."""

    sharded_state_dict = StateInPieces.sharded_state_dict

    @property
    def grad_scaler(self) -> Any:
        return getattr(self.chained_optimizers[0], "grad_scaler", None)

    def held_groups(self, is_loading: bool) -> Groups:
        (chained,) = self.chained_optimizers  # there are no experts under FSDP2
        if is_loading:
            chained.init_state_fn(chained.optimizer, chained.config)
        lists = [getattr(chained, name, ()) for name in ("float16_groups", "fp32_from_float16_groups")]
        params = {main: p for ps, mains in zip(*lists, strict=True) for p, main in zip(ps, mains, strict=True)}
        return [
            (group, [self._held(group, params.get(main, main), main) for main in group["params"]])
            for group in chained.optimizer.param_groups
        ]

    def _held(self, group: dict[str, Any], param: Any, main: Tensor) -> HeldState:
        update = self.chained_optimizers[0].optimizer
        # Transformer Engine's counts the steps of a group.
        counts: dict[str, Any] = update.state[main] if isinstance(update, torch.optim.Adam) else group
        tensors = {kind: state for kind, state in update.state[main].items() if kind != "step"}
        tensors |= {} if main is param else {"fp32_param": main}
        flat = {kind: local_part(tensor.detach()).view(-1) for kind, tensor in tensors.items()}

        def set_step(step: int) -> None:
            counts["step"] = step if counts is group else torch.tensor(float(step))

        return HeldState(param, own_elements(param)[1], flat, int(counts.get("step", 0)), set_step)

    def state_dict(self, is_loading: bool = False) -> Any:
        for _, members in self.held_groups(True) if is_loading else ():  # of the format torch_dcp, loaded in place
            for held in members:
                held.set_step(held.step)
        return super().state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        is_whole = state_dict.get("optimizer", state_dict).get("state", {}).keys() - {"common_step"}
        (ChainedOptimizer if is_whole else StateInPieces).load_state_dict(self, state_dict)


class ResumableDistributedOptimizer(DistributedOptimizer):
    """Megatron-LM's, which with torch's Adam cannot load before the first step, and with any loses numbers.

    Without this class a load in fp32 raises, and the counts of steps are those of before the load, or one tensor that
    every parameter's update increments.
    """

    def sharded_state_dict(self, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any) -> Any:
        if is_loading and isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            for param in (param for group in self.optimizer.param_groups for param in group["params"]):
                moments = {kind: torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[param] = {"step": torch.tensor(0.0), **moments}
        return super().sharded_state_dict(model_state, is_loading, *args, **kwargs)

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor):
                state["step"] = step.clone()

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
        steps = {k: v for k, v in self._get_main_param_and_optimizer_states(model_param).items() if k == "step"}
        super()._set_main_param_and_optimizer_states(model_param, {**tensors, **steps})

    def load_parameter_state(self, filename: str, **kwargs: Any) -> None:
        """Refuses another iteration's state, which Megatron-LM reads where ``--ckpt-step`` is not the last one."""
        step = getattr(_arguments(), "ckpt_step", None)
        if step is not None and f"iter_{step:07d}" not in filename:
            raise CheckpointError(
                f"--ckpt-step {step} was given, and Megatron-LM reads the optimizer's state from {filename}; write "
                f"{step} into latest_checkpointed_iteration.txt, or use --ckpt-format torch_dist"
            )
        super().load_parameter_state(filename, **kwargs)


def make_resumable(found: Any, wrappers: Sequence[nn.Module]) -> None:
    """Makes an optimizer save and load under wrappers of this adapter, and sets Megatron-LM's arguments for it.

    Raises:
        ParallelConfigError: a format of checkpoints that a sharded model does not have.
    """
    arguments = _arguments()
    found.wrappers = wrappers
    if isinstance(wrappers[0], TorchFullyShardedDataParallel):
        mix_in(found, ChainInPieces)
        if arguments is not None:  # else the loop would not give the optimizer what is loaded
            arguments.use_torch_fsdp2 = False
    elif isinstance(found, StateInPieces) and arguments is not None:
        arguments.use_distributed_optimizer = False  # its checkpoints have another layout
        if arguments.ckpt_format == "fsdp_dtensor":
            arguments.ckpt_format = "torch_dist"
            print_first("checkpoints have the format torch_dist, not Megatron-FSDP's fsdp_dtensor")
        if arguments.save and arguments.ckpt_format != "torch_dist":
            raise ParallelConfigError(
                f"--ckpt-format is {arguments.ckpt_format}, which has whole tensors, and with "
                "--data-parallel-sharding-strategy a rank has its part; give --ckpt-format torch_dist"
            )
    for part in getattr(found, "chained_optimizers", ()):
        if type(part) is DistributedOptimizer and isinstance(wrappers[0], _BaseDataParallel):
            mix_in(part, ResumableDistributedOptimizer)


def _arguments() -> Any:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
