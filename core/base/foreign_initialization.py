"""Initializes modules of other projects by their `reset_parameters`, one module's whole tensors at a time.

Such a module draws from torch's global generator in its own order. Here each module draws under a seed from its name,
on the CPU and on whole tensors, and every rank keeps its part. The values depend neither on the number of ranks nor on
how parameters are split; they differ from those that the constructors would have drawn one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .errors import ConfigError
from .module_protocol import ModuleToFill
from .parameters import copy_partition, copy_shard, keep_range, kept_range, whole_shape

RESET_METHODS = ("reset_parameters", "_reset_parameters")
"""torch's names. `nn.MultiheadAttention` and `nn.Transformer` have the second."""

_OVERWRITING = {"uniform_", "normal_", "fill_", "zero_", "copy_", "random_", "exponential_", "log_normal_"}


def reset(foreign: ModuleToFill, seed: int) -> None:
    """Runs a module's own initialisation and copies this rank's parts of the tensors that it filled.

    Leaves other tensors to the enclosing module. Tensors of submodules that it writes are written too: each is made
    whole for a moment, with the same values on all ranks.

    Raises:
        ConfigError: the module writes into a slice of a sharded parameter of another module.
    """
    resets = _resets(foreign)
    attempts = [resets[-1:], resets] if len(resets) > 1 else [resets]  # most hooks need no reset before them
    values: dict[str, torch.Tensor] = {}
    for attempt in attempts:
        if attempt and (len(values) < len(foreign.targets) or not foreign.targets):
            values = _filled_by(foreign, attempt, seed)
    for name, value in values.items():
        target = foreign.targets[name]
        copy_partition(value.detach(), target, foreign.tp_group, foreign.ep_group)


def _resets(foreign: ModuleToFill) -> list[Callable[[], Any]]:
    """Returns the functions that fill the module's tensors, in the order of construction."""
    methods = [getattr(foreign.module, name, None) for name in RESET_METHODS]
    resets: list[Callable[[], Any]] = [method for method in methods if callable(method)][:1]
    if foreign.hook is not None:
        resets.append(functools.partial(foreign.hook, foreign.module))
    if callable(adapters := getattr(foreign.module, "reset_lora_parameters", None)):  # of PEFT, around its factors
        resets += [functools.partial(adapters, name, True) for name in foreign.module.r]  # type: ignore[union-attr]
    return resets


def _filled_by(foreign: ModuleToFill, resets: list[Callable[[], Any]], seed: int) -> dict[str, torch.Tensor]:
    with _whole_tensors(foreign) as blank, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach into the GPU's stream too
        marks = {name: (tensor, tensor._version, _bytes_of(tensor).clone()) for name, tensor in blank.items()}
        with _WritesWhole(foreign):
            for run in resets:
                run()
        now = {**foreign.module._parameters, **foreign.module._buffers}
        return {
            name: value
            for name, (tensor, version, before) in marks.items()
            if (value := now.get(name)) is not None
            and (value is not tensor or value._version > version or not torch.equal(_bytes_of(value), before))
        }


@contextmanager
def _whole_tensors(foreign: ModuleToFill) -> Iterator[Mapping[str, torch.Tensor]]:
    """Gives the module whole, blank tensors on the CPU inside the block, and yields the tensors to fill."""
    module = foreign.module
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    blank: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if parameter is not None:
            dtype = parameter.dtype
            if parameter.is_floating_point():  # draw the same values in every precision, and round
                dtype = torch.promote_types(dtype, torch.float32)
            whole = nn.Parameter(
                _blank(whole_shape(parameter, foreign.tp_group, foreign.ep_group), dtype), requires_grad=False
            )
            vars(whole).update(vars(parameter))
            keep_range(whole, None)
            module._parameters[name] = whole
            if name in foreign.targets:
                blank[name] = whole
    for name, buffer in buffers.items():
        if name in foreign.targets and buffer is not None:
            module._buffers[name] = blank[name] = _blank(list(buffer.shape), buffer.dtype)
        elif buffer is not None:
            module._buffers[name] = buffer.detach().clone()
    try:
        yield blank
    finally:
        for registry, originals in ((module._parameters, parameters), (module._buffers, buffers)):
            registry.clear()
            registry.update(originals)  # type: ignore[arg-type]


def _blank(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor with values that no initialisation leaves, so that unfilled ones are found."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, torch.nan, dtype=dtype, device="cpu")
    return torch.full(shape, dtype is torch.bool or torch.iinfo(dtype).max, dtype=dtype, device="cpu")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns bytes of both ends of a tensor: an initialisation that fills it changes these."""
    flat = tensor.detach().reshape(-1)
    return torch.cat([flat[:64], flat[-64:]]).contiguous().view(torch.uint8)


class _WritesWhole(TorchDispatchMode):
    """Lets an initialisation write sharded parameters of submodules: makes each whole, and shards it again.

    DTensor itself would draw the wrong values for a rank's part.
    """

    def __init__(self, foreign: ModuleToFill) -> None:
        super().__init__()
        self._name = foreign.name or "the model"
        # Parameters of submodules that are kept as a range, by the address of their memory: one element until they are
        # filled, by which an alias (``.data``) is known too. Fixed while this mode is entered.
        ranges = [p for p in foreign.module.parameters() if kept_range(p) is not None and p.numel()]
        self._ranges = {parameter.untyped_storage().data_ptr(): parameter for parameter in ranges}

    def _range(self, leaf: Any) -> torch.Tensor | None:
        """Returns the parameter, kept as a range, whose memory a tensor has, or None."""
        return self._ranges.get(leaf.untyped_storage().data_ptr()) if type(leaf) in _PLAIN else None

    def _is_sharded(self, leaf: Any) -> bool:
        return isinstance(leaf, DTensor) or self._range(leaf) is not None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_shards = any(map(self._is_sharded, tree_leaves((args, kwargs))))
        if not has_shards or func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return func(*args, **kwargs)
        returns_view = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if returns_view:
            raise ConfigError(
                f"the initialisation of {self._name.rstrip('.')} looks at a part of a sharded parameter of another "
                f"module ({func}), and values written there would be lost; fill that parameter in the "
                "reset_parameters() of the module that owns it"
            )
        target: Any = args[0] if func._schema.is_mutable and args and self._is_sharded(args[0]) else None
        if any(leaf is not target for leaf in _written_tensors(func, args, kwargs) if self._is_sharded(leaf)):
            raise ConfigError(
                f"the initialisation of {self._name.rstrip('.')} writes sharded parameters of others by {func}, "
                "which would be lost; fill them one at a time, in place, or in the reset_parameters() of their owners"
            )
        overwrites = func._overloadpacket.__name__ in _OVERWRITING

        def to_whole(leaf: Any) -> Any:
            if not self._is_sharded(leaf):
                return leaf
            if leaf is target and overwrites:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
            if isinstance(leaf, DTensor):
                return leaf.full_tensor().cpu()
            raise ConfigError(
                f"the initialisation of {self._name.rstrip('.')} reads a sharded parameter of another module "
                f"({func}), and each rank has only a range of it; fill it in the reset_parameters() of its own module"
            )

        args, kwargs = tree_map(to_whole, (args, kwargs))
        result = func(*args, **kwargs)
        if target is None:
            return result
        parameter = self._range(target)
        copy_shard(args[0], target if parameter is None else parameter)
        return target


_PLAIN = (torch.Tensor, nn.Parameter)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns the arguments that an operation writes into."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return tree_leaves([values.get(name) for name in names])
