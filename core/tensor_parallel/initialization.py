"""Initial values by name: the same whatever the world size, the cut, the sharding, or a start on the meta device.

Every parameter is drawn as the whole model's tensor, by a generator of its own whose seed is a hash of one number
and the parameter's name; each rank keeps its part. One full tensor exists at a time. Nothing else makes sharded
starts equal: torch's CPU generator knows no offsets into a sharded tensor.

A layer says how its parameters are filled (:class:`ParameterOwner`), constructs them empty, and ends its constructor
with :func:`initialize_unless_deferred`. A model that contains layers defers them and initialises once, at its end,
with one seed that it keeps for the case that it was built on meta:

    with deferred_initialization():
        ...                                                   # build the layers
    self.init_seed = draw_init_seed()
    initialize_parameters(self, self.init_seed)               # or later: after to_empty(), sharded or not
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ConfigError
from ..model_parallel_config import ModelParallelConfig
from .mappings import Group, group_rank, group_size, resolve_group

Initializer = Callable[[torch.Tensor, torch.Generator], None]
"""Fills a tensor of the whole model's shape, fp32 on the CPU, in place, drawing from the generator only."""

_deferred: ContextVar[bool] = ContextVar("deferred", default=False)

# Wrappers that add a module, and so a part to every name below it, without changing what the parameters are.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


class ParameterOwner(nn.Module):
    """A module that owns parameters: how each is filled, and the marks that must stay on it.

    Megatron's marks on a parameter (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
    `sequence_parallel`) say how it was cut and how its gradient is finished. torch drops them wherever it replaces
    the parameter object (`to_empty`, `deepcopy`, `load_state_dict(assign=True)`): they are kept here and set again.

    Args:
        tp_group: the ranks that hold the other parts, now and for good; default is the tensor-parallel group of
            `core.parallel_state`, or none where that is not initialised.
    """

    def __init__(self, tp_group: Group = None) -> None:
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        self.initializers: dict[str, Initializer] = {}
        self.parameter_marks: dict[str, dict[str, Any]] = {}

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: Initializer,
        *,
        dtype: torch.dtype,
        partition_dim: int | None = None,
        sequence_parallel: bool = False,
    ) -> nn.Parameter:
        """Registers an empty parameter, on torch's default device.

        Args:
            shape: of this rank's part.
            initializer: fills the whole of it.
            partition_dim: the dim along which tensor-parallel ranks hold consecutive parts; None where each holds
                the whole.
            sequence_parallel: every rank holds the whole but sees a part of the sequence, so that its gradients
                are partial sums over the tensor-parallel group.
        """
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
        self.register_parameter(name, parameter)
        self.initializers[name] = initializer
        self.parameter_marks[name] = {
            "tensor_model_parallel": partition_dim is not None,
            "partition_dim": -1 if partition_dim is None else partition_dim,
            "partition_stride": 1,
            "sequence_parallel": sequence_parallel,
        }
        self.restore_parameter_marks()
        return parameter

    def restore_parameter_marks(self) -> None:
        """Sets the marks on the parameters that are registered now."""
        for name, marks in self.parameter_marks.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                vars(parameter).update(marks)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParameterOwner:
        super()._apply(fn, recurse)
        self.restore_parameter_marks()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.restore_parameter_marks()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterOwner:
        memo[id(self.tp_group)] = self.tp_group  # a copy talks to the same ranks
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        clone.restore_parameter_marks()
        return clone


def draw_init_seed() -> int:
    """One draw from torch's default CPU generator, so that `torch.manual_seed` decides every initial value.

    Ranks of one model must have been seeded alike.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@contextmanager
def deferred_initialization() -> Iterator[None]:
    """Layers constructed inside leave their parameters as allocated: their owner initialises all of them at once."""
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def initialize_unless_deferred(module: nn.Module, config: ModelParallelConfig) -> None:
    """The last line of a layer's constructor: initialises it, unless its owner will, or there is nothing to fill.

    Nothing is filled, and no seed drawn, inside :func:`deferred_initialization`, where `perform_initialization` is
    False, and on the meta device.
    """
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    if not _deferred.get() and config.perform_initialization and not on_meta:
        initialize_parameters(module, draw_init_seed())


@torch.no_grad()
def initialize_parameters(module: nn.Module, seed: int, *, prefix: str = "") -> None:
    """Fills every parameter of `module` and of what it contains, by name.

    A parameter that is registered under two names is filled once, under the first. DTensors (FSDP2) are filled as
    they are sharded, uneven shards included. A module of another library, without `initializers` but with torch's
    `reset_parameters`, is reset on full CPU copies of its parameters, under a seed of its name.

    Args:
        seed: from :func:`draw_init_seed`; the same on every rank.
        prefix: what precedes the names of `module` in the model that owns the seed, with its dot.

    Raises:
        ConfigError: a parameter is on the meta device, or nothing says how to fill it.
    """
    filled: set[int] = set()
    for path, submodule in module.named_modules():
        own = {name: p for name, p in submodule._parameters.items() if p is not None and id(p) not in filled}
        if not own:
            continue
        filled.update(map(id, own.values()))
        where = _name_in_model(prefix, path)
        for name, parameter in own.items():
            if parameter.is_meta:
                raise ConfigError(
                    f"parameter {where}{name} is on the meta device and has no storage to fill; "
                    "call to_empty(device=...) on the model before initialize_parameters()"
                )
        initializers = getattr(submodule, "initializers", None)
        if initializers is None and hasattr(submodule, "reset_parameters"):
            _reset_foreign(submodule, own, _seed_of(seed, where))
            continue
        if isinstance(submodule, ParameterOwner):
            submodule.restore_parameter_marks()
        for name, parameter in own.items():
            if initializers is None or name not in initializers:
                raise ConfigError(
                    f"nothing says how to initialise parameter {where}{name} of {type(submodule).__name__}; put a "
                    f"function that fills it into its `initializers[{name!r}]`, or give the module reset_parameters()"
                )
            group = submodule.tp_group if isinstance(submodule, ParameterOwner) else resolve_group(None)
            _fill(parameter, initializers[name], _seed_of(seed, where + name), group)


def _name_in_model(prefix: str, path: str) -> str:
    """`path` with its dot, as it is in the unwrapped model."""
    parts = [part for part in path.split(".") if part and part not in _WRAPPER_PARTS]
    return prefix + "".join(f"{part}." for part in parts)


def _seed_of(seed: int, name: str) -> int:
    """64 bits that Python's salted `hash` would not give twice. (torch's CPU generator uses the lower 32.)"""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _fill(parameter: torch.Tensor, initializer: Initializer, seed: int, group: Group) -> None:
    shape = list(parameter.shape)  # a DTensor's own shape is already that before its sharding
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= group_size(group)  # type: ignore[attr-defined]
    full = torch.empty(shape, dtype=torch.float32, device="cpu")
    initializer(full, torch.Generator(device="cpu").manual_seed(seed))
    _copy_own_part(full, parameter, group)


def _copy_own_part(full: torch.Tensor, parameter: torch.Tensor, group: Group) -> None:
    if getattr(parameter, "tensor_model_parallel", False):
        full = full.chunk(group_size(group), parameter.partition_dim)[group_rank(group)]  # type: ignore[attr-defined]
    if isinstance(parameter, DTensor):
        # Without a source rank every rank cuts its own copy: nothing is communicated.
        own = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(own.to_local())
    else:
        parameter.copy_(full)


def _reset_foreign(module: nn.Module, own: dict[str, nn.Parameter], seed: int) -> None:
    kept = dict(module._parameters)
    full = {
        name: nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device="cpu"))
        for name, p in kept.items()
        if p is not None
    }
    module._parameters.update(full)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach into the GPU's stream too
            module.reset_parameters()  # type: ignore[operator]
    finally:
        module._parameters.update(kept)
    for name, parameter in own.items():
        _copy_own_part(full[name].detach(), parameter, None)
