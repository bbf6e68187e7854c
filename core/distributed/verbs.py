"""What every engine does with the parameters and gradients of a model, in eight verbs, and what optimizers find there.

Everything above, the order of a step, guards, checkpoints, the optimizer and reports, calls the verbs and is written
once. Optimizers, torch's included, check with the wrapper of a parameter before a step and notify it afterwards.
"""

from __future__ import annotations

import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..base.errors import ShardstackError
from ..base.memory_categories import Held
from ..base.parameters import kept_range, local_part
from ..diagnostics.step_marks import MARK, StepMark, mark_of, set_mark
from .distributed_data_parallel_config import Engine
from .groups import managed_parameters
from .plan import Plan


class EngineVerbs(nn.Module, ABC):
    """The verbs of an engine, over all units of a model.

    ============  =====================================================================================
    gather        `whole_parameters`. In forward and backward engines gather units by themselves, ahead
    free          `settle_parameters`, and `note_step` after an update
    add           backward does it. `_set_gradient_sync` and `_open_reduced_gradients` say to what
    send          `start_grad_sync`, `_finish_grad_sync`, `gather_gradients`. Units leave during backward where planned
    shard         `shard`, of a parameter
    grad_shard    `local_gradient`, of a parameter
    held          `held_tensors`
    recover       `recover` from a backward that raised, and `_zero_gradients`
    ============  =====================================================================================

    To gather, add and send a single unit is left to each engine: backward does it, in hooks of autograd under buffers
    and inside torch under FSDP2, where nothing else may call it.
    """

    engine: ClassVar[Engine]
    """What holds the parameters and gradients. Fixed by each class, and read when a model is planned."""
    checks_placement = False
    """Whether `check_may_step` raises if a parameter was moved or replaced after wrapping. Fixed by each class."""

    module: nn.Module
    plan: Plan
    _syncs_gradients: bool

    # ---- gather, free

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Makes parameters readable and writable as plain tensors. Keeps what is written to them.

        Every rank enters it, outside of forward and backward, and writes the same values. Does nothing in wrappers
        whose parameters are always whole, or are DTensors.
        """
        self.settle_parameters()
        yield

    @abstractmethod
    def settle_parameters(self) -> None:
        """Makes `module` hold the parameters that an optimizer updates. Call it outside of a forward."""

    def check_may_write_shards(self) -> None:
        """Raises where the model shows copies of this rank's shards, which writes to these would not reach.

        Raises:
            UnitError: inside of `whole_parameters`, where ranks have no whole parameters otherwise.
        """

    @abstractmethod
    def note_step(self) -> None:
        """Drops gathered parameters. Called after an optimizer has written its parameters."""

    # ---- add, send

    def _set_gradient_sync(self, enabled: bool) -> None:
        self._syncs_gradients = enabled

    @abstractmethod
    def _open_reduced_gradients(self) -> bool:
        """Lets a backward add to reduced gradients, as in a plain module.

        Gradients that the user has set to None since start from zero.

        Returns:
            False if that is impossible: new gradients are then dropped, and the next use of gradients raises.
        """

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts the reduction that `finish_grad_sync` completes. Does nothing in a wrapper that does not overlap."""

    @abstractmethod
    def _finish_grad_sync(self) -> None:
        """Completes the reduction of all gradients (`finish_grad_sync`)."""

    # ---- shard, grad_shard

    def shard(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns this rank's part of a parameter: a run of its elements, flat, or the local part of a DTensor.

        It is the parameter itself where ranks keep whole ones.
        """
        own_range = kept_range(parameter)
        return local_part(parameter.detach()) if own_range is None else own_range[0]

    def local_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads. It may be empty."""
        return local_gradient(parameter)

    def _reduced_gradients(self) -> list[torch.Tensor]:
        """Returns the tensors of this rank's reduced gradients."""
        return [g for _, p in managed_parameters(self.module) if (g := self.local_gradient(p)) is not None]

    @abstractmethod
    def check_may_step_directly(self, optimizer: str) -> None:
        """Raises unless an optimizer of torch may read the parameters' gradients."""

    # ---- held

    @abstractmethod
    def held_tensors(self) -> dict[Held, list[torch.Tensor]]:
        """Returns this rank's tensors at this moment: ``parameters``, ``gathered parameters`` and ``gradients``.

        ``gradients not reduced yet`` are whole gradients that a reduction will free. Tensors may share memory, also
        between categories; it counts in the first.
        """

    def gradient_receivers(self) -> list[nn.Parameter]:
        """Returns the parameters whose ``grad`` a backward would add to at this moment."""
        return list(self.module.parameters())

    # ---- recover

    def recover(self) -> None:
        """Ends a backward that raised, if the engine detects one, and marks gradients broken."""

    @abstractmethod
    def _zero_gradients(self) -> None:
        """Makes every gradient zero or None, after a step that was abandoned too."""


# ---- the wrapper of a parameter, and the gradient that an optimizer reads


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
"""Attributes that wrappers set on parameters. They are not pickled, so that ``torch.save(wrapper.module)`` saves a
plain model, and no wrapper deletes them."""


class _Owner(StepMark):
    """The mark of every parameter of a wrapper, while the wrapper exists."""

    def __init__(self, wrapper: EngineVerbs) -> None:
        self.wrapper = weakref.ref(wrapper)  # a parameter may outlive its wrapper

    def check_gradients(self, optimizer: str) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.check_may_step_directly(optimizer)

    def note_step(self) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.note_step()


def own_parameters(params: Iterable[nn.Parameter], wrapper: EngineVerbs) -> None:
    """Registers `wrapper` as the wrapper of these parameters. Parameters hold only a weak reference to it."""
    owner = _Owner(wrapper)
    for param in params:
        set_mark(param, owner)
        # Pickle calls it. It is bound to the parameter without a weak reference, because torch cannot swap the tensor
        # of a parameter (`Module.to`) that has weak references.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[attr-defined]


def owner_of(param: Any) -> EngineVerbs | None:
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


def is_unreadable(gradient: Any) -> bool:
    """Returns whether a gradient is an `UnreadableGradient`."""
    return type(gradient) is UnreadableGradient


class UnreadableGradient(Tensor):
    """A tensor without memory, to be ``param.grad`` of `param`, that raises whenever it is used."""

    added: Tensor
    """The gradient of a backward. Autograd's accumulation sets it, on its thread. The wrapper's hook, which autograd
    calls next, takes it away. It exists only between the two."""

    @staticmethod
    def __new__(cls, param: nn.Parameter) -> UnreadableGradient:
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
