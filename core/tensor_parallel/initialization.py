"""Lets layers say how their parameters are filled, and when: each at its end, or a model's all together.

A layer registers functions that fill its parameters (:class:`ParameterOwner`), constructs them empty, and ends its
constructor with :func:`initialize_unless_deferred`. A model of layers defers them and initialises all at its end, with
one seed that it keeps in case it was built on meta:

    with deferred_initialization():
        ...                                                   # build the layers
    self.init_seed = draw_init_seed()
    initialize_parameters(self, self.init_seed)               # or later: after to_empty(), sharded or not

`shardstack.base.initialization` fills them by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from ..base.initialization import Initializer, draw_init_seed, initialize_parameters
from ..model_parallel_config import ModelParallelConfig
from .groups import Group, resolve_group

_is_deferred: ContextVar[bool] = ContextVar("deferred", default=False)
"""Whether this context (thread or task) is inside `deferred_initialization`, which sets and resets it."""


class ParameterOwner(nn.Module):
    """A module with parameters: stores how each is filled, and the attributes that it must keep.

    Megatron's attributes of a parameter (`tensor_model_parallel`, `partition_dim`, `partition_stride`,
    `sequence_parallel`) say how it is split and how its gradient is finished. torch drops them when it replaces the
    parameter object (`to_empty`, `deepcopy`, `load_state_dict(assign=True)`): they are stored here and set again.

    Args:
        tp_group: the ranks that share the parameters, for the module's lifetime; default is the tensor-parallel group
            of `shardstack.parallel_state`, or None if that is not initialised.
    """

    is_one_layer = True

    def __init__(self, tp_group: Group = None) -> None:
        super().__init__()
        self.tp_group = resolve_group(tp_group)
        self.ep_group: Group = None  # layers of experts replace it
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
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=config.params_dtype)))
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
            if (parameter := self._parameters.get(name)) is not None:
                vars(parameter).update(marks)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParameterOwner:
        super()._apply(fn, recurse)
        self.restore_parameter_marks()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.restore_parameter_marks()

    def __deepcopy__(self, memo: dict[int, Any]) -> ParameterOwner:
        memo |= {id(group): group for group in (self.tp_group, self.ep_group)}  # shared, not copied
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        vars(clone).update(copy.deepcopy(vars(self), memo))
        clone.restore_parameter_marks()
        return clone


def mark_parameter(module: nn.Module, name: str = "weight", **marks: Any) -> None:
    """Sets attributes of a module's parameter, if it has one, to stay when torch replaces the parameter."""
    if (parameter := module._parameters.get(name)) is None:
        return
    if isinstance(module, ParameterOwner) and name in module.parameter_marks:
        module.parameter_marks[name].update(marks)
    vars(parameter).update(marks)


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
