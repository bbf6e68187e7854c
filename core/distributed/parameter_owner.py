"""Finds the wrapper of a parameter, and the gradient that an optimizer reads.

Optimizers, torch's included, check with the wrapper before a step and notify it afterwards. Attributes that wrappers
set on parameters are not pickled, so that ``torch.save(wrapper.module)`` saves a plain model.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..base.errors import ShardstackError
from ..base.parameters import local_part
from ..diagnostics.step_marks import MARK, StepMark, mark_of, set_mark
from .plan import Plan


class TrainsParameters(Protocol):
    """The part of a wrapper that optimizers use."""

    @property
    def plan(self) -> Plan:
        """The wrapper's plan, which lists the parameters."""

    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may read the parameters' gradients."""

    def note_step(self) -> None:
        """Records that an optimizer has written the parameters."""


_OF_WRAPPERS = frozenset(
    {
        MARK,  # the `_Owner`: `own_parameters` sets it; never cleared
        "__getstate__",  # `own_parameters` sets it; never cleared
        "main_grad",  # `GradSlot` sets it to memory of a bucket, and to None while there is no gradient
        "main_grad_copy_in_grad_buffer",  # `GradSlot` sets it where `main_grad` is fp32 memory of its own
        "has_buffer",  # True from the construction of a wrapper with buffers on
        "grad_added_to_main_grad",  # a layer's backward sets True; the wrapper's hook, and `zero_grad_buffer`, False
        "lend_gradient_memory",  # `Bucket.lend` of its bucket; never cleared
        "held_range",  # `keep_range` sets it when shards are made, and around `whole_parameters`
        "pending_view",  # `set_pending_view` sets it; never cleared
    }
)
"""Attributes that wrappers set on parameters. They are not pickled, and no wrapper deletes them."""


class _Owner(StepMark):
    """The mark of every parameter of a wrapper, while the wrapper exists."""

    def __init__(self, wrapper: TrainsParameters) -> None:
        self.wrapper = weakref.ref(wrapper)  # a parameter may outlive its wrapper

    def check_gradients(self, optimizer: str) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.check_may_step_directly(optimizer)

    def note_step(self) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.note_step()


def own_parameters(params: Iterable[nn.Parameter], wrapper: TrainsParameters) -> None:
    """Registers `wrapper` as the wrapper of these parameters. Parameters hold only a weak reference to it."""
    owner = _Owner(wrapper)
    for param in params:
        set_mark(param, owner)
        # Pickle calls it. It is bound to the parameter without a weak reference, because torch cannot swap the tensor
        # of a parameter (`Module.to`) that has weak references.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[attr-defined]


def owner_of(param: Any) -> TrainsParameters | None:
    """Returns the wrapper that trains the parameter, while it exists."""
    mark = mark_of(param)
    return mark.wrapper() if isinstance(mark, _Owner) else None


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of `read_gradient`."""
    gradient = read_gradient(parameter)
    return None if gradient is None else local_part(gradient)


def read_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient that the optimizer reads: ``main_grad`` where present, else ``grad``. None leaves it out.

    Under a wrapper ``grad`` counts: after `finish_grad_sync` it is the memory of ``main_grad``, or what the user has
    set it to since, also None. Where dtypes differ it is a tensor that cannot be read, in the place of ``main_grad``.
    """
    gradient: torch.Tensor | None = getattr(parameter, "main_grad", None)
    is_shown = isinstance(mark_of(parameter), _Owner) and not is_unreadable(parameter.grad)
    return parameter.grad if gradient is None or is_shown else gradient


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter to pickle."""
    return {name: value for name, value in vars(param).items() if name not in _OF_WRAPPERS}


# ---- ``param.grad`` of gradients that are sharded, or in another dtype: a tensor that raises when it is read. With
# None, `torch.nn.utils.clip_grad_norm_` and loops over gradients would silently skip the parameter.

UNREADABLE = (
    "a gradient was read from param.grad, but this model's wrapper keeps a shard of it on each rank, or keeps it in "
    "another dtype; clip by OptimizerConfig(clip_grad=...) and step by get_megatron_optimizer, read this rank's part "
    "with wrapper.local_gradient(param), or use the sharding strategy 'no_shard', and no setting that keeps gradients "
    "in fp32"
)


def make_unreadable_gradient(param: nn.Parameter) -> Tensor:
    """Returns a tensor without memory that can be assigned to ``param.grad`` and that raises whenever it is used."""
    return _UnreadableGradient(param)


def is_unreadable(gradient: Any) -> bool:
    """Returns whether `make_unreadable_gradient` made it."""
    return type(gradient) is _UnreadableGradient


def take_added(gradient: Tensor) -> Tensor:
    """Returns what autograd has just added to an unreadable gradient, which does not hold it any longer."""
    added: Tensor = vars(gradient).pop("added")
    return added


class _UnreadableGradient(Tensor):
    added: Tensor
    """The gradient of a backward. Autograd's accumulation sets it, on its thread. The wrapper's hook, which autograd
    calls next, takes it away (`take_added`). It exists only between the two."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> _UnreadableGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardstackError(UNREADABLE)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Autograd adds a new gradient to `param.grad` in C++. Keep it for the wrapper's hook, which comes next.
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor) and is_unreadable(args[0]):
            vars(args[0])["added"] = args[1]
            return args[0]
        raise ShardstackError(UNREADABLE)
