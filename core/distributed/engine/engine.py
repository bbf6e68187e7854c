"""The interface of an engine: what holds the parameters and gradients of a wrapped model on a rank.

There are two engines: `FlatEngine`, on contiguous buffers, and `Fsdp2Engine`, on torch's ``fully_shard``. Wrappers,
optimizers, checkpoints, guards and reports know an engine by the classes of this file alone, and are written once.
"""

from __future__ import annotations

import itertools
import types
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...base.errors import ParallelConfigError
from ...base.memory_categories import Held
from ...base.parameters import kept_range, local_part
from ..distributed_data_parallel_config import EngineKind
from ..groups import is_summed_later, managed_parameters
from ..model.initial_values import broadcast_buffers
from ..plan import Plan
from ..step import Step
from ..step_marks import MARK, StepMark, mark_of, set_mark
from .gradient_tree import GradientTree
from .gradients import local_gradient


class Parameters(ABC):
    """The parameters of a wrapped model on a rank: whole ones, shards that units are gathered from, or DTensors.

    What an engine has no need of does nothing, as gathering where parameters are whole.
    """

    @abstractmethod
    def settle(self) -> None:
        """Frees gathered parameters: the module then holds those that an optimizer updates.

        Call it outside of forward and backward.

        Raises:
            UnitError: a parameter was written while it was gathered.
        """

    def invalidate(self) -> None:
        """Frees gathered parameters, which are stale: this rank's shards were written."""
        self.settle()

    def abandon(self) -> None:
        """Ends forwards that an exception has interrupted, and frees what they have gathered."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Makes parameters readable and writable as plain tensors. Keeps what is written to them.

        Every rank enters it, outside of forward and backward, and writes the same values. Changes nothing where
        parameters are always whole, or are DTensors.
        """
        self.settle()
        yield

    def check_may_write(self) -> None:
        """Raises where the model shows copies of this rank's shards, which writes to these would not reach.

        Raises:
            UnitError: inside of `whole`, where ranks have no whole parameters otherwise.
        """

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """Returns this rank's part of a parameter: a run of its elements, flat, or the local part of a DTensor.

        It is the parameter itself where ranks keep whole ones.
        """
        own_range = kept_range(parameter)
        return local_part(parameter.detach()) if own_range is None else own_range[0]

    @abstractmethod
    def receivers(self) -> Sequence[nn.Parameter]:
        """Returns the parameters whose ``grad`` a backward would add to at this moment."""

    @abstractmethod
    def held(self) -> dict[Held, list[Tensor]]:
        """Returns this rank's tensors at this moment: ``parameters`` and ``gathered parameters``."""


class Gradients(ABC):
    """The gradients of a wrapped model on a rank, from a backward to the step that reads them.

    Hooks of autograd call it during a backward, on the thread that runs the backward. The main thread calls it
    between backwards and in forward.

    Args:
        plan: what is done to the model.
        module: the wrapper's module: the model, or a module around it that casts.
        model: the model inside, whose names of parameters messages and checkpoints use.
        state: the phase of the gradients. The engine reports backwards to it, and the wrapper the rest of a step.
    """

    def __init__(self, plan: Plan, module: nn.Module, model: nn.Module, state: Step) -> None:
        self.plan, self.module, self.model, self.state = plan, module, model, state
        # False inside `no_sync`, which sets and restores it with `set_sync`. Each backward reads it.
        self.syncs = True
        # The step's position in its tree, with ``reproducible_across_ranks``; else None. `expect_micro_batches` sets
        # the number of backwards, each backward advances it, `zero_grad_buffer` restarts it.
        self.tree: GradientTree | None = None
        if plan.tree is not None:
            self.tree = GradientTree(plan.tree, 1 if plan.sums_gradients else plan.groups.whole.size())
        # What checks gradients, with their names, before they are reduced or just after. The wrapper sets them once.
        self.inspections: tuple[Callable[[Iterable[tuple[str, Tensor]], bool], None], ...] = ()

    def inspect(self, gradients: Iterable[tuple[str, Tensor]], *, are_reduced: bool = False) -> None:
        """Lets the wrapper's guards check gradients, by name.

        Args:
            are_reduced: they are reduced over ranks already, so that another rank may be at fault.

        Raises:
            ShardstackError: one is invalid.
        """
        each = itertools.tee(gradients, len(self.inspections))  # a guard need not read them
        for inspect, own in zip(self.inspections, each, strict=True):
            inspect(own, are_reduced)

    def set_sync(self, enabled: bool) -> None:
        """Says whether the backwards that follow communicate."""
        self.syncs = enabled
        if self.tree is not None:
            self.tree.is_synced = enabled

    def expect_micro_batches(self, count: int, divides_by_ranks: bool) -> None:
        """Sets the number of backwards in each step that follows. Does nothing without a tree."""
        if self.tree is not None:
            self.tree.expect(count, divides_by_ranks)

    @abstractmethod
    def reopen(self) -> bool:
        """Lets a backward add to reduced gradients, as in a plain module.

        Gradients that the user has set to None since start from zero.

        Returns:
            False if that is impossible: new gradients are then dropped, and the next use of gradients raises.
        """

    def adds_exactly(self, parameter: nn.Parameter) -> bool:
        """Returns whether a backward may add to the reduced gradient of a parameter.

        The next reduction reduces the sum: a mean over as many ranks as are divided by leaves it unchanged, a sum not.
        FSDP2 reduces what is added alone.
        """
        groups, stages = self.plan.groups.of(parameter), self.plan.groups.model.embd
        is_mean = self.plan.engine is EngineKind.FSDP2 or groups.divisor == groups.whole.size()
        is_sum = self.plan.sums_gradients or self.tree is not None
        return is_mean and not (is_sum or is_summed_later(parameter, stages))

    def start(self) -> None:
        """Starts the reduction that `finish` completes. Does nothing where nothing overlaps with it."""

    @abstractmethod
    def finish(self) -> None:
        """Completes the reduction of all gradients: afterwards this rank's part of each is global."""

    def gather(self, *, again: bool = False) -> None:
        """Gathers whole gradients from the reduced shards. Every rank calls it.

        Args:
            again: only those that were gathered in this step, after their shards have changed.

        Raises:
            ParallelConfigError: whole gradients are released.
        """
        if not again and any(piece.releases_grads for unit in self.plan.units for piece in unit.pieces):
            raise ParallelConfigError(
                f"force_all_reduce asks for whole gradients, which {self.plan.caller} releases with the strategy "
                f"{self.plan.strategy!r}; drop it"
            )

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads. It may be empty."""
        return local_gradient(parameter)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors of this rank's reduced gradients."""
        return [g for _, p in managed_parameters(self.module) if (g := self.of(p)) is not None]

    @abstractmethod
    def zero(self) -> None:
        """Makes every gradient zero or None, after a step that was abandoned too."""

    def note_step(self) -> None:
        """Records that an optimizer has read the gradients."""

    def free_unused(self) -> None:
        """Frees memory that is kept for the gradients of later steps."""

    def recover(self) -> None:
        """Ends a backward that raised, if the engine detects one, and marks gradients broken."""

    @abstractmethod
    def held(self) -> dict[Held, list[Tensor]]:
        """Returns this rank's tensors at this moment: ``gradients``.

        ``gradients not reduced yet`` are whole gradients that a reduction will free.
        """


class Engine(ABC):
    """Holds the parameters and gradients of a model as its plan says.

    Attributes:
        plan: what is done to the model.
        parameters, gradients: what both engines do, and every caller may ask for.
        places: address and dtype of each parameter that the engine keeps in memory of its own: a move
            elsewhere is an error.
    """

    places: Mapping[nn.Parameter, tuple[int, torch.dtype]] = {}

    def __init__(self, plan: Plan, parameters: Parameters, gradients: Gradients) -> None:
        self.plan, self.parameters, self.gradients = plan, parameters, gradients
        # Set once, by the wrapper, where the engine keeps it alive (`_BaseDataParallel._set_engine`); never read.
        self.wrapper: nn.Module | None = None

    def updated(self) -> None:
        """Takes note that an optimizer has written this rank's shards: gathered parameters are stale, and freed."""
        self.gradients.note_step()
        self.parameters.invalidate()

    def share_buffers(self) -> None:
        """Makes buffers equal on all ranks. Here and not before a forward, as torch's DDP: an evaluation, on all ranks
        or one, and a checkpoint then see the same, and a forward between others' backwards writes nothing they saved.
        """
        if self.plan.settings.broadcast_buffers:
            broadcast_buffers(self.gradients.module, self.plan.groups.whole)

    # ---- memory that is released for a while

    @abstractmethod
    def free_gathered(self) -> None:
        """Frees gathered parameters and the memory that they are gathered into, until `allocate_gathered`."""

    def allocate_gathered(self) -> None:
        """Allocates what `free_gathered` has freed, once the memory of all parameters is back, elsewhere."""

    @abstractmethod
    def shards(self) -> list[Tensor]:
        """Returns the tensors of this rank's parameters that hooks of forward and backward gather from."""

    # ---- what guards look at before a step

    @abstractmethod
    def names_of_parameters(self) -> Mapping[nn.Parameter, str]:
        """Returns the name of each parameter that is trained or sharded, by all forms that modules may hold of it."""

    def find_assigned_gradient(self) -> str:
        """Returns the name of a parameter whose ``grad`` was assigned where the optimizer reads a shard, or ""."""
        return ""

    @abstractmethod
    def prepare_direct_step(self, optimizer: str) -> None:
        """Prepares for the step of an optimizer of torch, which reads ``param.grad`` and writes the parameters.

        Raises:
            ShardstackError: ``param.grad`` is not the gradient that an optimizer has to read.
        """

    def held(self) -> dict[Held, list[Tensor]]:
        """Returns this rank's tensors at this moment, by category.

        Tensors may share memory, also between categories; it counts in the first.
        """
        return self.parameters.held() | self.gradients.held()


class WrappedModel(nn.Module):
    """A module whose parameters an engine holds: the base of all wrappers."""

    plan: Plan
    engine: Engine

    def check_step(self, optimizer: str, *, is_torchs: bool = False) -> None:
        """Raises unless an optimizer may step the model: see `_BaseDataParallel`."""


# ---- the wrapper of a parameter: optimizers, torch's too, find it there, check with it before a step and notify it

WRAPPER_ATTRIBUTES = frozenset(
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

    shows_gradients = True

    def __init__(self, wrapper: WrappedModel) -> None:
        self.wrapper = weakref.ref(wrapper)  # a parameter may outlive its wrapper

    def check_gradients(self, optimizer: str) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.check_step(optimizer, is_torchs=True)

    def note_step(self) -> None:
        if (wrapper := self.wrapper()) is not None:
            wrapper.engine.updated()


def own_parameters(params: Iterable[nn.Parameter], wrapper: WrappedModel) -> None:
    """Registers the wrapper of these parameters. They hold only a weak reference to it."""
    owner = _Owner(wrapper)
    for param in params:
        set_mark(param, owner)
        # Pickle calls it. It is bound to the parameter without a weak reference, because torch cannot swap the tensor
        # of a parameter (`Module.to`) that has weak references.
        param.__getstate__ = types.MethodType(_state_without_wrapper, param)  # type: ignore[method-assign]


def owner_of(param: Any) -> WrappedModel | None:
    """Returns the wrapper that trains the parameter, while it exists."""
    mark = mark_of(param)
    return mark.wrapper() if isinstance(mark, _Owner) else None


def _state_without_wrapper(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter to pickle."""
    return {name: value for name, value in vars(param).items() if name not in WRAPPER_ATTRIBUTES}
