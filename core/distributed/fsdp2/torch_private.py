"""The one file that knows FSDP2's private state, for what torch has no public interface.

Nothing of torch is replaced here. What is written is what torch's own hooks write too: gradients, and the state of an
iteration that an exception or an evaluation has left unfinished. `tests/unit/distributed/fsdp2/test_torch_private.py`
pins every name, and lists the few places elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather as DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter as DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from ...base._torch_compat import fsdp_param_groups
from ...base.errors import UnitError, WrapError
from ..step_marks import mark_as_gathered, mark_of

ONE_WHOLE_GRADIENT = isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)
"""Whether torch keeps whole gradients in the gathered parameter alone (2.15), also in the dtype of their reduction."""

_ROUNDING = "round_to_computed"
"""The key of that method's hook, among torch's numbers, in the hooks of a parameter: it is there for good."""

_NAMES = {
    "FSDPState": "_pre_forward _post_forward _pre_backward _root_post_backward_final_callback _lazy_init _state_ctx "
    "_comm_ctx",
    "FSDPStateContext": "iter_forward_root post_backward_final_callback_queued all_states",
    "FSDPParamGroup": "fsdp_params comm_ctx is_unsharded post_backward finalize_backward _to_sharded "
    "_training_state _all_reduce_hook _all_gather_result _partial_reduce_output _post_forward_indices"
    + " _fsdp_params_with_wider_grad_dtype"
    * ONE_WHOLE_GRADIENT,
    "FSDPParam": "sharded_param mesh_info all_gather_outputs unsharded_accumulated_grad init_all_gather_outputs "
    "init_unsharded_param free_unsharded_param _sharded_param_data _unsharded_param _param_fqn _module_info",
}
"""Names that torch's objects have, or their classes declare, as soon as a module is sharded."""


def as_fsdp(module: nn.Module) -> FSDPModule:
    """Returns the same module, by the type that `fully_shard` has given it.

    Raises:
        WrapError: it is not sharded.
    """
    if not isinstance(module, FSDPModule):
        raise WrapError(f"{type(module).__name__} is not sharded; apply fully_shard to it first")
    return module


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Returns every module that torch's `fully_shard` has been applied to, the root first."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def gather_asynchronously(module: FSDPModule) -> None:
    """Lets a module's gathers on the CPU run while it computes. On other devices they do so by themselves."""
    # Without this name wrapping raises.
    module._set_unshard_async_op(True)


def groups_of(module: nn.Module) -> list[Any]:
    """Returns torch's `FSDPParamGroup` of a sharded module's own parameters, as a list of one, or of none."""
    # Without ``_get_fsdp_state`` wrapping raises.
    return fsdp_param_groups(module._get_fsdp_state())  # type: ignore[operator]


def has_all_reduce_hook(module: FSDPModule) -> bool:
    """Returns whether `set_all_reduce_hook` was called on a module."""
    # Under another name a sum with ``reproducible_across_ranks`` raises.
    return any(group._all_reduce_hook is not None for group in groups_of(module))  # type: ignore[arg-type]


def shards_of(groups: list[Any]) -> list[nn.Parameter]:
    """Returns the sharded parameters of the unit of `groups` (`groups_of`), in the order of its messages."""
    return [parameter.sharded_param for group in groups for parameter in group.fsdp_params]


def gathered_tensors_of(groups: list[Any]) -> list[Tensor]:
    """Returns the tensors that the unit of `groups` (`groups_of`) is gathered into. Empty before its first gather."""
    # Torch makes each once, and frees a unit by resizing storages: made anew, `SavedWeights` would not find them.
    return [output for group in groups for parameter in group.fsdp_params for output in parameter.all_gather_outputs]


def are_gathered(groups: list[Any]) -> bool:
    """Returns whether the unit of `groups` (`groups_of`) is gathered, with no gather of it running."""
    return all(group.is_unsharded and group._all_gather_result is None for group in groups)


def gather_for_forward(module: FSDPModule) -> None:
    """Gathers a unit, and what is gathered ahead with it, and frees it, as torch does around a forward."""
    # Under other names a forward raises, on a rank that skips a unit.
    state = module._get_fsdp_state()
    state._pre_forward(module, (), {})  # type: ignore[arg-type]
    state._post_forward(module, (), None)  # type: ignore[arg-type]


def begin_backward(module: FSDPModule) -> None:
    """Gathers a unit, and what is gathered ahead with it, as torch does when a backward reaches its output.

    Does nothing if the unit's gradients were reduced, as where a hook has returned its input in place of its output.
    """
    # Under another name a backward raises, on a rank that has dropped the output of a unit.
    if all(group._training_state != TrainingState.POST_BACKWARD for group in groups_of(module)):  # type: ignore[arg-type]
        module._get_fsdp_state()._pre_backward(None)  # type: ignore[arg-type]


def end_backward(module: FSDPModule) -> None:
    """Reduces the gradients of a unit whose backward has begun, zeros where it has none, as torch at its end."""
    for group in groups_of(module):  # type: ignore[arg-type]
        if group._training_state == TrainingState.PRE_BACKWARD:
            group.post_backward()


def name_of_parameter(parameter: Any) -> str:
    """Returns the name below the root, of torch's object for a sharded parameter."""
    # Without these names the messages that name a parameter raise an AttributeError in place of their own.
    return str(parameter._param_fqn or parameter._module_info.param_name)


class TorchTensors:
    """The tensors that FSDP2 holds for one sharded model.

    Torch has an `FSDPParam` for each parameter: its shard (``sharded_param``, and ``_sharded_param_data`` with the
    padding) and the gathered parameter (``_unsharded_param``), whose memory is ``all_gather_outputs``. Renamed, the
    first forward raises. The parameters of a unit are an `FSDPParamGroup`.

    Args:
        modules: those of the sharded model; what is sharded in it later is not found.

    Attributes:
        groups, parameters: torch's objects. All are fixed: `fully_shard` makes them, and nothing replaces them.
    """

    def __init__(self, modules: Iterable[FSDPModule]) -> None:
        of_modules = [module._get_fsdp_state() for module in modules]
        states = {id(state): state for state in of_modules}.values()  # modules of one unit share a state
        self.groups = [group for state in states for group in fsdp_param_groups(state)]
        self.parameters = [parameter for group in self.groups for parameter in group.fsdp_params]
        # Those whose gathered parameter has no mark yet; `mark_gathered` takes them out, after a first forward.
        self._unmarked = list(self.parameters)

    def names(self) -> dict[Any, str]:
        """Returns the name of each sharded parameter, by all that modules may hold of it."""
        names = dict[Any, str]()
        for parameter in self.parameters:
            name = parameter._param_fqn or name_of_parameter(parameter)
            names[parameter.sharded_param] = name
            if hasattr(parameter, "_unsharded_param"):
                names[parameter._unsharded_param] = name
        return names

    def mark_gathered(self) -> None:
        """Marks parameters gathered for the first time, so that the step of an optimizer built from them raises."""
        if self._unmarked:
            for parameter in self._unmarked:
                if hasattr(parameter, "_unsharded_param") and mark_of(parameter._unsharded_param) is None:
                    mark_as_gathered(parameter._unsharded_param, name_of_parameter(parameter))
            self._unmarked = [p for p in self._unmarked if not hasattr(p, "_unsharded_param")]

    def name_of(self, index: int) -> str:
        """Returns the name of a parameter, by its index in the lists of counts."""
        return name_of_parameter(self.parameters[index])

    # ---- writes

    def shard_versions(self) -> list[int]:
        """Returns for each parameter a number that grows when its shard, or the shard's local tensor, is written."""
        # If torch replaced the tensors, a write would be missed.
        return [p.sharded_param._version + p._sharded_param_data._version for p in self.parameters]

    @torch.no_grad()
    def gathered_versions(self) -> list[int]:
        """Returns for each parameter the count of writes to the gathered one that modules compute with.

        A gather does not count, so that it is 0 before the first one too. It is -1 for a parameter whose ``data`` was
        replaced: gathers no longer reach it.
        """
        versions = []
        for parameter in self.parameters:
            version = 0
            if hasattr(parameter, "_unsharded_param"):
                gathered = parameter._unsharded_param
                version = int(gathered._version)
                local = gathered.to_local() if isinstance(gathered, DTensor) else gathered
                storage = local.untyped_storage()._cdata
                for output in parameter.all_gather_outputs:
                    if output.untyped_storage()._cdata == storage:
                        break
                else:
                    version = -1
            versions.append(version)
        return versions

    # ---- memory: under other names a table of memory counts these as activations, or asking for it raises

    def gathered_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters that modules compute with, and autograd gives gradients to. None before the first
        all-gather."""
        return [p._unsharded_param for p in self.parameters if hasattr(p, "_unsharded_param")]

    def whole_gradients(self) -> Iterator[Tensor]:
        """Yields gradients that this rank holds whole, until they are reduced."""
        # Inside `no_sync` torch leaves them in ``_unsharded_param.grad`` and, before 2.15 where they are reduced in
        # another dtype, in ``unsharded_accumulated_grad``. Kept elsewhere, `drop_unsharded_gradients` would leave
        # them, and the next step would add to them.
        accumulated = [] if ONE_WHOLE_GRADIENT else [p.unsharded_accumulated_grad for p in self.parameters]
        of_gathered = [parameter.grad for parameter in self.gathered_parameters()]
        yield from (gradient for gradient in (*accumulated, *of_gathered) if gradient is not None)

    def gathered_tensors(self) -> Iterator[Tensor]:
        """Yields what holds gathered parameters now: whole ones, and running gathers."""
        for group in self.groups:
            for parameter in group.fsdp_params:
                yield from parameter.all_gather_outputs
            last = getattr(group.comm_ctx, "all_gather_state", None)  # the first forward makes it
            for result in (group._all_gather_result, None if last is None else last.all_gather_result):
                if result is not None:
                    yield result.all_gather_output

    def gradient_tensors(self) -> Iterator[Tensor]:
        """Yields what holds gradients now: sharded ones, whole ones that are not reduced yet, and running
        reductions."""
        for group in self.groups:
            for parameter in group.fsdp_params:
                if parameter.sharded_param.grad is not None:
                    yield parameter.sharded_param.grad
            yield from (state.reduce_scatter_input for state in _running_reductions(group.comm_ctx))
            if group._partial_reduce_output is not None:
                yield group._partial_reduce_output
        yield from self.whole_gradients()

    def shard_tensors(self) -> list[Tensor]:
        """Returns this rank's shards, with their padding."""
        return [parameter._sharded_param_data for parameter in self.parameters]


class TorchState:
    """The state of FSDP2 for one sharded model: an iteration, gradients that wait, what a program has changed.

    Args:
        root: the sharded model.

    Attributes:
        modules: every module that FSDP2 acts on, the root first.
        tensors: what torch holds for it.
    """

    def __init__(self, root: nn.Module) -> None:
        self.modules = fsdp_modules(root)
        self._state = root._get_fsdp_state()  # type: ignore[operator]
        groups = [group for module in self.modules for group in groups_of(module)]  # type: ignore[arg-type]
        _reject_unknown_torch(self._state, groups[:1])
        self.tensors = TorchTensors(self.modules)
        # ``requires_grad`` of each gathered parameter when `keep_changes` last looked; a parameter is here once it has
        # been gathered.
        self._trained: dict[Any, bool] = {}
        for parameter in self.tensors.parameters:
            if parameter.sharded_param._backward_hooks is None:
                parameter.sharded_param._backward_hooks = OrderedDict()

    # ---- whole gradients

    def reduce_unsharded_gradients(self) -> None:
        """Reduces whole gradients, those of a last micro-batch inside `no_sync` too. Every rank must call it."""
        if any(True for _ in self.tensors.whole_gradients()):
            # The callback of a backward's end, which reduces each unit once. Under another name this raises. Since
            # 2.15 it wants what a backward sets at its beginning: whether a program reduces gradients by itself.
            context = self._state._state_ctx
            if getattr(context, "manual_backward_finalization_active", False) is None:
                context.manual_backward_finalization_active = False
            self._state._root_post_backward_final_callback()

    def round_to_computed(self) -> None:
        """Gives each micro-batch's gradient of a weight the dtype of that weight, as under all other wrappers.

        Torch 2.15 keeps a gradient in the dtype of an operation, as fp32 of a norm whose weight is bf16, and where
        none is reduced it adds up those of a weight that is used twice in the dtype of the reduction.
        """
        for group in self.tensors.groups if ONE_WHOLE_GRADIENT else []:
            for parameter in group.fsdp_params:
                gathered = getattr(parameter, "_unsharded_param", None)
                if gathered is None or not gathered.requires_grad:
                    continue
                if parameter.unsharded_grad_dtype in (None, gathered.dtype):
                    continue
                gathered.grad_dtype = None  # any: torch sets it so too, and casts the sums after a backward
                hooks = _share_hooks(parameter)
                if _ROUNDING in hooks:
                    continue
                if parameter not in group._fsdp_params_with_wider_grad_dtype:  # fp16, reduced in bf16
                    group._fsdp_params_with_wider_grad_dtype.append(parameter)
                of_program = dict(hooks)
                hooks.clear()  # torch calls them in the order of a plain dict, and a program's come after
                hooks[_ROUNDING] = partial(_round, gathered.dtype, getattr(gathered, "device_mesh", None))
                hooks.update(of_program)

    def drop_unsharded_gradients(self) -> None:
        """Drops whole gradients, as after a step that was abandoned."""
        if not ONE_WHOLE_GRADIENT:
            for parameter in self.tensors.parameters:
                parameter.unsharded_accumulated_grad = None
        for gathered in self.tensors.gathered_parameters():
            gathered.grad = None

    def complete_accumulated_gradients(self) -> None:
        """Adds zero gradients for parameters that `no_sync` left without one, if others of their group have one.

        Accumulated gradients have the dtype of the reduction. A gradient that only the last backward computes has that
        of the computation, and FSDP2 before torch 2.15 reduces one dtype at a time.
        """
        for group in [] if ONE_WHOLE_GRADIENT else self.tensors.groups:
            gathered = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
            trained = [p for p in gathered if p._unsharded_param.requires_grad]
            accumulated = (p.unsharded_accumulated_grad for p in trained)
            if (example := next((gradient for gradient in accumulated if gradient is not None), None)) is None:
                continue
            for parameter in trained:
                if parameter.unsharded_accumulated_grad is None:
                    zeros = torch.zeros_like(parameter._unsharded_param, dtype=example.dtype)
                    parameter.unsharded_accumulated_grad = zeros

    # ---- the iteration

    def is_in_forward(self) -> bool:
        """Returns whether a forward of the model, or of a unit called on its own, is running."""
        # The root while its forward runs, else None. If it stayed set, no forward would look for changed shards.
        return self._state._state_ctx.iter_forward_root is not None

    def has_failed_in_backward(self) -> bool:
        """Returns whether the last backward raised before FSDP2's callback at its end. Ask outside of any backward."""
        # True from a backward's first hook to its end. If it were cleared, a failed backward would look complete.
        return bool(self._state._state_ctx.post_backward_final_callback_queued)

    def set_root(self) -> None:
        """Makes the model what FSDP2 calls the root, which is otherwise the first module to run."""
        # Without this name the first forward raises.
        self._state._lazy_init()

    def reset_iteration(self) -> None:
        """Brings units back to their shards and FSDP2 to the state between steps, after a forward or backward raised.

        Gradients stay, those that accumulate on this rank too.
        """
        if hasattr(self._state, "_reset_iter_state"):  # torch 2.13; below, what it does, for torch before
            shards = [parameter.sharded_param for parameter in self.tensors.parameters]
            kept = [(parameter, parameter.grad) for parameter in (*shards, *self.tensors.gathered_parameters())]
            self._state._reset_iter_state()
            for parameter, gradient in kept:  # torch 2.15 drops them
                if gradient is not None and parameter.grad is None:
                    parameter.grad = gradient.to(getattr(parameter, "grad_dtype", None) or gradient.dtype)
            return
        for each in self._state._state_ctx.all_states:
            each._training_state = TrainingState.IDLE
        for group in self.tensors.groups:
            group._training_state = TrainingState.IDLE
            group.finalize_backward()
            group._to_sharded()
        self._state._comm_ctx.post_forward_order.clear()
        self._state._state_ctx.iter_forward_root = None
        self._state._state_ctx.post_backward_final_callback_queued = False

    def end_evaluation(self) -> None:
        """Frees all units, and drops gathers that no unit has used and torch's list of forwards, as a backward's end.

        Otherwise a unit's next use would take a gather with parameters from before the optimizer's step.
        """
        for group in self.tensors.groups:
            # A running gather, else None. Under another name this raises.
            if group._all_gather_result is not None:
                group.finalize_backward()
            group._post_forward_indices.clear()
        # Grows with each forward; a backward clears it, and gathers a unit that is not in it when it reaches it.
        comm_ctx = self._state._comm_ctx
        if hasattr(comm_ctx, "post_forward_order"):  # else no forward has run
            comm_ctx.post_forward_order.clear()
        for module in self.modules:
            module.reshard()

    def drop_last_gather(self) -> None:
        """Drops what torch keeps of its last gather until the next one."""
        comm_ctx = self._state._comm_ctx
        # A forward on a GPU leaves it. Under another name this frees nothing, which a test counts.
        if getattr(comm_ctx, "all_gather_state", None) is not None:
            comm_ctx.all_gather_state = None

    def allocate_gathered_parameters(self) -> None:
        """Makes the parameters that units are gathered into, as the first gather would, without communication.

        Made inside `torch.inference_mode` they could never be trained. And where gradients are reduced in another
        dtype than they are computed in, `no_sync` asks for the gradient of a unit that no forward has reached
        (pytorch/pytorch#194058).
        """
        with torch.inference_mode(False), torch.no_grad():
            for group in self.tensors.groups:
                for parameter in group.fsdp_params:
                    if hasattr(parameter, "_unsharded_param"):
                        continue
                    # The three methods by which torch makes the tensors. Under other names this raises; with other
                    # sizes or dtypes the first gather does.
                    shard, ranks = parameter._sharded_param_data, parameter.mesh_info.shard_mesh_size
                    dtype = parameter.param_dtype or shard.dtype
                    parameter.init_all_gather_outputs([shard.numel()], [dtype], ranks, group.device)
                    parameter.init_unsharded_param()
                    parameter.free_unsharded_param()

    # ---- what a program does to parameters

    def keep_changes(self, groups: Iterable[Any] | None = None, *unused: Any) -> None:
        """Keeps what a program has set on gathered parameters, and raises where it has set another parameter.

        Torch would lose a change of ``requires_grad`` with the gathered parameter (pytorch/pytorch#105371), and never
        call the hooks of a shard, which no backward reaches: shard and gathered parameter share one dict of hooks.

        Args:
            groups: those of the unit to look at (`groups_of`); None means all units.
        """
        for group in self.tensors.groups if groups is None else groups:
            # Whether modules show the gathered parameters. Under another name this raises.
            if not group.is_unsharded:
                continue
            _reject_assigned(group.fsdp_params)
            for parameter in group.fsdp_params:
                gathered, shard = parameter._unsharded_param, parameter.sharded_param
                if gathered.requires_grad != self._trained.get(parameter, gathered.requires_grad):
                    shard.requires_grad_(gathered.requires_grad)
                self._trained[parameter] = gathered.requires_grad
                _share_hooks(parameter)

    def reject_assigned(self, *, takes_shards: bool = False) -> None:
        """Raises unless modules hold the parameters that FSDP2 has set on them.

        Args:
            takes_shards: permit other shards, which torch takes over before the first forward.

        Raises:
            UnitError: names the parameter.
        """
        _reject_assigned(self.tensors.parameters, takes_shards)


def _share_hooks(parameter: Any) -> dict[Any, Any]:
    hooks: dict[Any, Any] = parameter.sharded_param._backward_hooks
    if parameter._unsharded_param._backward_hooks is not hooks:
        parameter._unsharded_param._backward_hooks = hooks
    return hooks


def _round(dtype: torch.dtype, mesh: DeviceMesh | None, gradient: Tensor) -> Tensor:
    # The shard has the same hooks (`keep_changes`). What a program sends to it has another mesh, and was not rounded.
    return gradient.to(dtype).to(gradient.dtype) if getattr(gradient, "device_mesh", None) == mesh else gradient


def _reject_unknown_torch(state: Any, groups: list[Any]) -> None:
    for owner in (state, state._state_ctx, *groups, *(group.fsdp_params[0] for group in groups)):
        kind = type(owner).__name__
        if missing := set(_NAMES[kind].split()).difference(dir(owner), type(owner).__annotations__):
            raise WrapError(
                f"torch {torch.__version__} has no {kind}.{min(missing)}, which FSDP2 is controlled by "
                "here; use a version of torch that the documentation lists as tested, or DistributedDataParallel"
            )


def _reject_assigned(parameters: Iterable[Any], takes_shards: bool = False) -> None:
    # The modules and names that torch sets parameters on. Under another name this raises. Called around each forward
    # of a unit, so that it calls nothing for a parameter that is where torch has put it.
    for parameter in parameters:
        info, shard, gathered = parameter._module_info, parameter.sharded_param, None
        if hasattr(parameter, "_unsharded_param"):
            gathered = parameter._unsharded_param
        places = [(info.module, info.param_name)]
        if info.shared_modules:
            places += zip(info.shared_modules, info.shared_param_names, strict=True)
        for module, name in places:
            held = module._parameters.get(name)
            if held is None or not (held is shard or held is gathered or (takes_shards and isinstance(held, DTensor))):
                raise UnitError(
                    f"parameter {name_of_parameter(parameter)} was replaced after the model was wrapped (an "
                    "assignment, tied weights, a parametrization, torch.func.functional_call), and FSDP2 would "
                    "compute with the one from before; change the model before it is wrapped, or use "
                    "DistributedDataParallel"
                )


def _running_reductions(comm_ctx: Any) -> list[Any]:
    """Returns torch's running reductions. Torch before 2.13 keeps one and later versions a list."""
    states = getattr(comm_ctx, "reduce_scatter_states", None)
    if states is None:
        states = [getattr(comm_ctx, "reduce_scatter_state", None)]  # the first forward makes either
    return [state for state in states if state is not None]
