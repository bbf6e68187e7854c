"""The interface of an engine: what holds the parameters and gradients of a wrapped model on a rank.

There are two engines: `FlatEngine`, on contiguous buffers, and `Fsdp2Engine`, on torch's ``fully_shard``. Wrappers,
optimizers, checkpoints, guards and reports know an engine by this interface alone, and are written once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...base.errors import ParallelConfigError
from ...base.memory_categories import Held
from ...base.parameters import kept_range, local_part
from ..distributed_data_parallel_config import EngineKind
from ..groups import is_summed_later, managed_parameters
from ..model.initial_values import broadcast_buffers
from ..plan import GradientReduction, Plan
from ..step import Step
from .gradient_tree import GradientTree
from .gradients import local_gradient


class Engine(ABC):
    """Holds the parameters and gradients of a model as its plan says.

    Hooks of autograd call it during a backward, on the thread that runs the backward. The main thread calls it
    between backwards and in forward.

    Args:
        plan: what is done to the model.
        module: the wrapper's module: the model, or a module around it that casts.
        model: the model inside, whose names of parameters messages and checkpoints use.
        state: the phase of the gradients. The engine reports backwards to it, and the wrapper the rest of a step.
    """

    places: Mapping[nn.Parameter, tuple[int, torch.dtype]] = {}
    """Address and dtype of each parameter that the engine keeps in memory of its own, and nobody else may move."""

    def __init__(self, plan: Plan, module: nn.Module, model: nn.Module, state: Step) -> None:
        self.plan, self.module, self.model, self.gradient_state = plan, module, model, state
        # False inside `no_sync`, which sets and restores it with `set_sync`. Each backward reads it.
        self.syncs = True
        # The step's position in its tree, with ``reproducible_across_ranks``; else None. `expect_micro_batches` sets
        # the number of backwards, each backward advances it, `zero_gradients` restarts it.
        self.tree: GradientTree | None = None
        if plan.tree is not None:
            self.tree = GradientTree(plan.tree, 1 if self.sums_gradients else plan.groups.whole.size())
        # What checks gradients, with their names, before they are reduced or just after. The wrapper sets them once.
        self.inspections: tuple[Callable[[Iterable[tuple[str, Tensor]], bool], None], ...] = ()
        # Set once, by the wrapper, where the engine keeps it alive (`_BaseDataParallel._set_engine`); never read.
        self.wrapper: nn.Module | None = None

    @property
    def sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks, for `finalize_model_grads` to divide by the token count."""
        return self.plan.reduction is GradientReduction.SUM

    # ---- parameters

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Makes parameters readable and writable as plain tensors. Keeps what is written to them.

        Every rank enters it, outside of forward and backward, and writes the same values. Does nothing where
        parameters are always whole, or are DTensors.
        """
        self.settle()
        yield

    @abstractmethod
    def settle(self) -> None:
        """Frees gathered parameters: the module then holds those that an optimizer updates.

        Call it outside of forward and backward.
        """

    @abstractmethod
    def updated(self) -> None:
        """Frees gathered parameters, which are stale: an optimizer has written this rank's shards."""

    def publish(self) -> None:
        """Sends the shards that this rank has updated to the ranks that read them. Every rank calls it."""

    def invalidate(self) -> None:
        """Marks gathered parameters stale, after something else than an optimizer has written the shards."""

    def check_may_write_shards(self) -> None:
        """Raises where the model shows copies of this rank's shards, which writes to these would not reach.

        Raises:
            UnitError: inside of `whole_parameters`, where ranks have no whole parameters otherwise.
        """

    def shard(self, parameter: nn.Parameter) -> Tensor:
        """Returns this rank's part of a parameter: a run of its elements, flat, or the local part of a DTensor.

        It is the parameter itself where ranks keep whole ones.
        """
        own_range = kept_range(parameter)
        return local_part(parameter.detach()) if own_range is None else own_range[0]

    # ---- gradients

    def set_sync(self, enabled: bool) -> None:
        """Says whether the backwards that follow communicate."""
        self.syncs = enabled

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
        return is_mean and not (self.sums_gradients or self.tree is not None or is_summed_later(parameter, stages))

    def expect_micro_batches(self, count: int, divides_by_ranks: bool) -> None:
        """Sets the number of backwards in each step that follows. Does nothing without a tree."""
        if self.tree is not None:
            self.tree.expect(count, divides_by_ranks)

    def start_reduction(self) -> None:
        """Starts the reduction that `finish_reduction` completes. Does nothing where nothing overlaps with it."""

    @abstractmethod
    def finish_reduction(self) -> None:
        """Completes the reduction of all gradients: afterwards this rank's part of each is global."""

    def gather_gradients(self, *, again: bool = False) -> None:
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

    def share_buffers(self) -> None:
        """Makes buffers equal on all ranks. Here and not before a forward, as torch's DDP: an evaluation, on all ranks
        or one, and a checkpoint then see the same, and a forward between others' backwards writes nothing they saved.
        """
        if self.plan.settings.broadcast_buffers:
            broadcast_buffers(self.module, self.plan.groups.whole)

    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Returns this rank's part of the gradient that the optimizer reads. It may be empty."""
        return local_gradient(parameter)

    def gradients(self) -> list[Tensor]:
        """Returns the tensors of this rank's reduced gradients."""
        return [g for _, p in managed_parameters(self.module) if (g := self.gradient(p)) is not None]

    @abstractmethod
    def zero_gradients(self) -> None:
        """Makes every gradient zero or None, after a step that was abandoned too."""

    def recover(self) -> None:
        """Ends a backward that raised, if the engine detects one, and marks gradients broken."""

    def inspect(self, gradients: Iterable[tuple[str, Tensor]], *, are_reduced: bool = False) -> None:
        """Lets the wrapper's guards check gradients, by name.

        Args:
            are_reduced: they are reduced over ranks already, so that another rank may be at fault.

        Raises:
            ShardstackError: one is invalid.
        """
        for inspect in self.inspections:
            inspect(gradients, are_reduced)

    # ---- before a step

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

    # ---- memory

    @abstractmethod
    def held(self) -> dict[Held, list[Tensor]]:
        """Returns this rank's tensors at this moment: ``parameters``, ``gathered parameters`` and ``gradients``.

        ``gradients not reduced yet`` are whole gradients that a reduction will free. Tensors may share memory, also
        between categories; it counts in the first.
        """

    def gradient_receivers(self) -> list[nn.Parameter]:
        """Returns the parameters whose ``grad`` a backward would add to at this moment."""
        return list(self.module.parameters())
