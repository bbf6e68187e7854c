"""Initializes parameters by name: to the same values for any world size, layout, sharding, or start on meta.

Every parameter is drawn as the whole model's tensor, by its own generator, whose seed is a hash of one number and the
parameter's name; each rank copies its part. One full tensor exists at a time. Drawing shards directly would not give
equal values: torch's CPU generator has no offsets into a sharded tensor.

A layer registers functions that fill its parameters (:class:`ParameterOwner`), constructs them empty, and ends its
constructor with :func:`initialize_unless_deferred`. A model of layers defers them and initialises all at its end, with
one seed that it keeps in case it was built on meta:

    with deferred_initialization():
        ...                                                   # build the layers
    self.init_seed = draw_init_seed()
    initialize_parameters(self, self.init_seed)               # or later: after to_empty(), sharded or not
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.errors import ConfigError
from ..base.parameters import local_part
from ..model_parallel_config import ModelParallelConfig
from .foreign_initialization import ModuleToFill, init_weights_hook, reset
from .groups import Group, copy_partition, resolve_group, whole_shape

Initializer = Callable[..., Any]
"""Fills a tensor of the whole model's shape, fp32 on the CPU, in place: ``init_method(tensor)``, as in Megatron-LM and
`torch.nn.init`. It draws from torch's default generator, which is seeded for the call and restored after it. If it has
an argument ``generator``, it draws from the generator passed as that."""


@dataclass(frozen=True)
class FusedRows:
    """The rows of a weight that several matrices share: blocks of rows that repeat."""

    blocks: tuple[tuple[str, int], ...]
    """Name and number of consecutive rows of each block."""
    head_rows: int = 0
    """Rows of an attention head, of which each block has some, or 0 where blocks have no heads."""


_is_deferred: ContextVar[bool] = ContextVar("deferred", default=False)
"""Whether this context (thread or task) is inside `deferred_initialization`, which sets and resets it."""

# Parts of names that come from wrappers and are not counted as part of a parameter's name.
_WRAPPER_PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


class ParameterOwner(nn.Module):
    """A module with parameters: stores how each is filled, and the attributes that it must keep.

    Megatron's attributes of a parameter (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
    `sequence_parallel`) say how it is split and how its gradient is finished. torch drops them when it replaces the
    parameter object (`to_empty`, `deepcopy`, `load_state_dict(assign=True)`): they are stored here and set again.

    Args:
        tp_group: the ranks that share the parameters, for the module's lifetime; default is the tensor-parallel group
            of `core.parallel_state`, or None if that is not initialised.
    """

    def __init__(self, tp_group: Group = None) -> None:
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        # By parameter name; `add_parameter` adds an entry to each, and nothing removes it, so that parameters can be
        # filled and marked again after torch has replaced them.
        self.initializers: dict[str, Initializer] = {}
        # Dtype that the initial values are rounded to, by parameter name.
        self.initial_dtypes: dict[str, torch.dtype] = {}
        # Megatron's attributes, by parameter name.
        self.parameter_marks: dict[str, dict[str, Any]] = {}

    def add_parameter(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        initializer: Initializer,
        *,
        config: ModelParallelConfig,
        partition_dim: int | None = None,
        sequence_parallel: bool = False,
        is_expert: bool = False,
    ) -> None:
        """Registers an empty parameter, on torch's default device.

        Its initial value will be one that `config.compute_dtype` has, in fp32 too: shards in fp32 then start where the
        fp32 masters of a model start that was cast to bf16, and where Megatron-LM's do, which draws in bf16.

        Args:
            shape: shape of this rank's part. None registers the name without a parameter.
            initializer: fills the whole model's tensor.
            config: config whose `params_dtype` is the parameter's dtype.
            partition_dim: the dim that is split over tensor-parallel ranks; None if it is replicated.
            sequence_parallel: the parameter is replicated but used on a part of the sequence, so that its gradients
                are partial sums over the tensor-parallel group.
            is_expert: dim 0 counts experts, which expert-parallel ranks share. Marks the parameter by Megatron-LM's
                ``allreduce=False``, its gradient belongs to the experts' data-parallel group; and by
                ``expert_model_parallel``.
        """
        if shape is None:
            self.register_parameter(name, None)
            return
        parameter = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
        self.register_parameter(name, parameter)
        self.initializers[name] = initializer
        self.initial_dtypes[name] = config.compute_dtype
        self.parameter_marks[name] = {
            "tensor_model_parallel": partition_dim is not None,
            "partition_dim": -1 if partition_dim is None else partition_dim,
            "partition_stride": 1,
            "sequence_parallel": sequence_parallel,
            **({"allreduce": False, "expert_model_parallel": True} if is_expert else {}),
        }
        self.restore_parameter_marks()

    def restore_parameter_marks(self) -> None:
        """Sets the stored attributes on the current parameters."""
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
        memo[id(self.tp_group)] = self.tp_group  # process groups are shared, not copied
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        clone.restore_parameter_marks()
        return clone


def mark_parameter(module: nn.Module, name: str = "weight", **marks: Any) -> None:
    """Sets attributes of a module's parameter, if it has one, to stay when torch replaces the parameter."""
    parameter = module._parameters.get(name)
    if parameter is None:
        return
    if isinstance(module, ParameterOwner) and name in module.parameter_marks:
        module.parameter_marks[name].update(marks)
    vars(parameter).update(marks)


def draw_init_seed() -> int:
    """Draws a seed from torch's default CPU generator, so that `torch.manual_seed` decides every initial value.

    Ranks of one model must have been seeded with the same seed.
    """
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@contextmanager
def deferred_initialization() -> Iterator[None]:
    """Makes layers constructed inside leave their parameters empty: their owner initialises all of them together."""
    token = _is_deferred.set(True)
    try:
        yield
    finally:
        _is_deferred.reset(token)


def initialize_unless_deferred(module: nn.Module, config: ModelParallelConfig) -> None:
    """Initialises a layer at the end of its constructor, unless its owner will or there is nothing to fill.

    Does nothing, and draws no seed, inside :func:`deferred_initialization`, with `perform_initialization` False, and
    on the meta device.
    """
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    if not _is_deferred.get() and config.perform_initialization and not on_meta:
        initialize_parameters(module, draw_init_seed())


@torch.no_grad()
def initialize_parameters(
    module: nn.Module, seed: int, *, prefix: str = "", only: Iterable[torch.Tensor] | None = None
) -> None:
    """Fills every parameter of `module` and its submodules, by name.

    A parameter with two names is filled once, under the first. Shards of DTensors (FSDP2), uneven ones included, are
    filled in place. A module with an `init_seed` is filled from that seed, by names relative to itself, as when it was
    built directly.

    A module of another library, without `initializers`, fills its tensors by its own `reset_parameters`, or by
    `_init_weights(module)` of the nearest enclosing module that has one (as in Hugging Face's models), under a seed
    from its name, inner modules first: see :mod:`.foreign_initialization`. Values are then equal at every world size,
    but differ from direct construction, which draws them one after the other.

    Args:
        seed: seed from :func:`draw_init_seed`, equal on every rank.
        prefix: prefix of `module`'s names in the model that owns the seed, with its dot.
        only: the parameters and buffers to fill; by default all parameters and no buffer.

    Raises:
        ConfigError: a parameter is on the meta device, or nothing says how to fill a tensor.
    """
    targets = {id(tensor) for tensor in (module.parameters() if only is None else only)}
    places = [*_places(module, seed, prefix, targets)]
    versions = [_version(tensor) for _, _, tensor in _tensors(places)]
    foreign: list[ModuleToFill] = []
    for place in places:
        initializers = getattr(place.module, "initializers", None)
        if initializers is None:
            if place.targets or place.fills_all_below:
                foreign.append(place)
            continue
        if isinstance(place.module, ParameterOwner):
            place.module.restore_parameter_marks()
        group = place.module.tp_group if isinstance(place.module, ParameterOwner) else resolve_group(None)
        dtypes = getattr(place.module, "initial_dtypes", {})
        for name, parameter in place.targets.items():
            if name in initializers:
                dtype = dtypes.get(name, torch.float32)
                _fill(parameter, initializers[name], _seed_of(place.seed, place.name + name), group, dtype)
    for place in reversed(foreign):  # inner modules first: enclosing ones may overwrite their values
        reset(place, _seed_of(place.seed, place.name))
    for (place, name, tensor), version in zip(_tensors(places), versions, strict=True):
        if _version(tensor) == version:
            raise ConfigError(_nothing_fills(place, name))


def _places(root: nn.Module, seed: int, prefix: str, targets: set[int]) -> Iterator[ModuleToFill]:
    """Yields every module before its submodules. A shared tensor belongs to the first module that holds it."""
    by_path: dict[str, ModuleToFill] = {}
    identities: set[int] = set()
    for path, module in root.named_modules():
        around = by_path.get(path.rpartition(".")[0])
        own_seed = getattr(module, "init_seed", None)
        if around is None:
            where, seed_here = prefix, seed
        elif isinstance(own_seed, int):
            where, seed_here = "", own_seed
        else:
            part = path.rpartition(".")[2]
            where, seed_here = around.name + ("" if part in _WRAPPER_PARTS else f"{part}."), around.seed
        tensors = {n: t for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}
        mine = {name: t for name, t in tensors.items() if id(t) in targets and id(t) not in identities}
        identities.update(map(id, mine.values()))
        for name, tensor in mine.items():
            if tensor.is_meta:
                raise ConfigError(
                    f"parameter {where}{name} is on the meta device and has no storage to fill; "
                    "call to_empty(device=...) on the model before initialize_parameters()"
                )
        below = [*module.parameters()]
        hook = init_weights_hook(module) or (around.hook if around else None)
        fills_all = bool(below) and all(id(parameter) in targets for parameter in below)
        by_path[path] = ModuleToFill(where, module, seed_here, hook, mine, fills_all)
        yield by_path[path]


def _tensors(places: list[ModuleToFill]) -> list[tuple[ModuleToFill, str, torch.Tensor]]:
    return [(place, name, tensor) for place in places for name, tensor in place.targets.items()]


def _version(tensor: torch.Tensor) -> int:
    """Returns a count that grows with every in-place write, to a sharded tensor or to this rank's part of it."""
    return tensor._version + local_part(tensor)._version


def _nothing_fills(place: ModuleToFill, name: str) -> str:
    kind = type(place.module).__name__
    if name in place.module._buffers:
        return (
            f"buffers on the meta device cannot be filled: nothing says how to fill {place.name}{name!r} of {kind}; "
            "build it on a device (register_buffer under torch.device('cpu')), or let the module's reset_parameters() "
            "fill it"
        )
    return (
        f"nothing says how to initialise parameter {place.name}{name} of {kind}; put a function that fills it into "
        f"its `initializers[{name!r}]`, or give the module reset_parameters()"
    )


def _seed_of(seed: int, name: str) -> int:
    """Returns a 64-bit hash, equal in every process unlike Python's `hash`. torch's CPU generator uses the lower
    32."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")


def _fill(parameter: torch.Tensor, initializer: Initializer, seed: int, group: Group, dtype: torch.dtype) -> None:
    whole = torch.empty(whole_shape(parameter, group), dtype=torch.float32, device="cpu")
    call_initializer(initializer, whole, seed)
    copy_partition(whole.to(dtype), parameter, group)


def call_initializer(initializer: Initializer, tensor: torch.Tensor, seed: int) -> None:
    """Fills a tensor on the CPU in place from a seed. Torch's default generator is restored."""
    try:
        takes_generator = "generator" in inspect.signature(initializer).parameters
    except (TypeError, ValueError):  # built-in, without a signature
        takes_generator = False
    if takes_generator:
        initializer(tensor, generator=torch.Generator(device="cpu").manual_seed(seed))
    else:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach into the GPU's stream too
            initializer(tensor)
