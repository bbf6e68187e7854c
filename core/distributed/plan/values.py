"""The plan of a wrapped model, as data: made once, before the model changes, and never changed.

A `Plan` has a `UnitPlan` for everything that is gathered or reduced together, a `UnitPlan` has a `PiecePlan` for each
dtype and place of its parameters, and a `PiecePlan` has a `ParamPlan` for each parameter, whatever the engine. Engines
are built from a plan, and keep it. Reports, checks and error messages read it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from ...base.errors import WrapError
from ...base.micro_batch_tree import MicroBatchTree
from ..distributed_data_parallel_config import EngineKind, shards_parameters
from ..groups import DataParallelGroups, ParameterKind
from .parts import ParamPlan, PiecePlan, Traffic, UnitPlan, UnitTransform
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a wrapper does to a model, and in a step. `plan_model` makes it."""

    caller: str
    """The wrapper class or function that the user called, for messages."""
    engine: EngineKind
    strategy: str
    """``no_shard``, ``optim``, ``optim_grads`` or ``optim_grads_params``."""
    groups: DataParallelGroups
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1

    settings: Settings
    compared_settings: tuple[tuple[str, str], ...] = ()
    """Names and values, as text, of all settings that must be equal on all ranks."""
    changed_settings: str = ""
    """The wrapper's settings that differ from their defaults, as text for reports."""
    model_settings: str = ""
    """What was read of the model's config, as text for reports."""
    sums_gradients: bool
    """Gradients of replicas are summed, not averaged: `finalize_model_grads` divides by the number of tokens."""

    units: tuple[UnitPlan, ...]
    """Children before parents. The last one is the model, with the parameters that are in no other unit."""
    transforms: tuple[UnitTransform, ...] = ()
    """Recomputation and compilation of units, applied before parameters are sharded."""

    @property
    def root(self) -> UnitPlan:
        """The model, as a unit."""
        return self.units[-1]

    @property
    def trained_params(self) -> dict[str, ParamPlan]:
        """The parameters with gradients, by name."""
        return {param.name: param for piece in self._pieces() if piece.is_trained for param in piece.params}

    @property
    def buffers(self) -> tuple[tuple[PiecePlan, ...], ...]:
        """The pieces of each flat buffer, in the order of their places. They are the buffer's buckets."""
        buffers: dict[int, list[PiecePlan]] = defaultdict(list)
        for piece in self._pieces():
            if piece.bucket is not None:
                buffers[piece.bucket[0]].append(piece)
        return tuple(tuple(buffers[index]) for index in sorted(buffers))

    @property
    def reduction_order(self) -> tuple[tuple[int, int], ...]:
        """Buffer and bucket, in the order in which backward should finish buckets, which is equal on all ranks.

        The bucket whose first parameter comes last in the model is the first."""
        trained = [piece for piece in self._pieces() if piece.is_trained]
        return tuple(p.bucket for p in sorted(trained, key=lambda p: -p.place) if p.bucket is not None)

    def over_ranks_of(self, kind: ParameterKind) -> Plan:
        """Returns the plan with the ranks of a kind of parameters in `groups`."""
        groups = self.groups.of_kind(kind)
        if groups is self.groups:
            return self
        # FSDP2's replicated ones are reduced when those of all micro-batches are there.
        each = self.settings.reduce_every_micro_batch and not (
            kind == "replicated" and self.engine is EngineKind.FSDP2
        )
        return replace(self, groups=groups, settings=replace(self.settings, reduce_every_micro_batch=each))

    @property
    def shards_parameters(self) -> bool:
        """Whether parameters are sharded too, and gathered before use."""
        return shards_parameters(self.strategy)

    @property
    def shards_buffers(self) -> bool:
        """Whether flat buffers are cut, and each rank updates its part of them."""
        return self.engine is not EngineKind.FSDP2 and not self.is_replicated

    @property
    def is_replicated(self) -> bool:
        """Whether nothing is sharded: every rank updates whole parameters."""
        return self.strategy == "no_shard"

    @property
    def tree(self) -> MicroBatchTree | None:
        """Order in which a rank adds up its micro-batches' gradients. None without ``reproducible_across_ranks``."""
        if not self.settings.reproducible_across_ranks:
            return None
        return MicroBatchTree(
            self.groups.whole.size() // self.context_parallel_size, self.settings.reduce_every_micro_batch
        )

    @property
    def sum_order(self) -> tuple[tuple[int, ...], ...] | None:
        """The ranks of a shard group, in groups that are added first. None if any order will do.

        Parts of a sequence, which are neighbours, are added before micro-batches, or after them: so that ranks join
        the tree where micro-batches of one rank would.
        """
        if not self.settings.reproducible_across_ranks:
            return None
        parts = self.context_parallel_size
        size = (self.groups.whole if self.is_replicated else self.groups.shard).size()
        if self.settings.reduce_every_micro_batch:
            return tuple(tuple(range(first, first + parts)) for first in range(0, size, parts))
        return tuple(tuple(range(part, size, parts)) for part in range(parts))

    @property
    def num_shards(self) -> int:
        """Number of ranks that shard a parameter, or its optimizer state. It is 1 if nothing is sharded."""
        return 1 if self.is_replicated else self.groups.shard.size()

    @property
    def shard_index(self) -> int:
        """Index `i` of this rank among the ranks that shard a parameter, or its optimizer state: it has elements
        ``[bounds[i], bounds[i + 1])`` of each `ParamPlan`."""
        return 0 if self.is_replicated else self.groups.shard.rank()

    @property
    def request_to_free(self) -> str:
        """The settings by which gathered parameters are freed after a forward, for advice in messages."""
        more = ", keep_gathered_between_micro_batches='none'" if self.engine is EngineKind.FSDP2 else ""
        return f"reshard_after_forward=True{more}"

    def traffic(self, num_microbatches: int = 1, unit: UnitPlan | None = None) -> tuple[Traffic, ...]:
        """Returns the collectives of a step, of one unit or of all of them.

        Counts the wrapper's over the data-parallel group, on this rank. A unit that one forward uses several times is
        gathered each time, but counts once here.
        """
        if unit is None:
            return tuple(entry for unit in self.units for entry in self.traffic(num_microbatches, unit))
        for kind in sorted({piece.kind for piece in unit.pieces}):
            if (over_ranks := self.over_ranks_of(kind)) is not self:
                others = replace(unit, pieces=tuple(piece for piece in unit.pieces if piece.kind != kind))
                again = over_ranks.num_shards if unit.gathered_again_over else 0
                own = tuple(piece for piece in unit.pieces if piece.kind == kind)
                of_kind = replace(unit, pieces=own, gathered_again_over=again)
                return self.traffic(num_microbatches, others) + over_ranks.traffic(num_microbatches, of_kind)
        num_replicas = self.groups.whole.size() // self.num_shards  # ranks with the same shard, or all
        trained = [piece for piece in unit.pieces if piece.is_trained]
        reduced_bytes, sent_bytes = sum(p.reduced_bytes for p in trained), sum(p.sent_grad_bytes for p in trained)
        reductions = num_microbatches if self.settings.reduce_every_micro_batch else 1
        if unit.is_gathered:
            # From one micro-batch to the next a unit is gathered if it never was freed, or since backward gathered it.
            stays = unit.is_kept and (unit.stays_whole or unit.gathered_again_over)
            gathers, again = 1 if stays else num_microbatches, num_microbatches if unit.gathered_again_over else 0
            if unit.gathered_again_over == self.num_shards:
                gathers, again = gathers + again, 0
        else:  # whole parameters are gathered once, after an update that ranks share
            gathers, again = 1, 0
        sent_params = sum(piece.sent_param_bytes for piece in unit.pieces)
        gathered_bytes = sent_params if unit.is_gathered else sum(piece.kept_bytes for piece in trained)
        reduced = [Traffic("all-reduce", reductions, reduced_bytes // self.num_shards, num_replicas)]
        if self.is_replicated and any(
            piece.grad_format for piece in trained
        ):  # each rank adds its part, and gathers the sums
            reduced = [
                Traffic("reduce-scatter", reductions, sent_bytes, num_replicas),
                Traffic("all-gather", reductions, reduced_bytes, num_replicas),
            ]
        entries = (
            Traffic("all-gather", gathers, gathered_bytes, self.num_shards),
            Traffic("all-gather", again, gathered_bytes, unit.gathered_again_over),
            Traffic("reduce-scatter", reductions, sent_bytes, self.num_shards),
            *reduced,
        )
        return tuple(entry for entry in entries if entry.calls and entry.nbytes and entry.ranks > 1)

    def find_forward_methods(self) -> dict[nn.Module, list[str]]:
        """Returns which of `forward_methods` the model and each module of the units have.

        Raises:
            WrapError: a name that neither the model nor a unit has as a method.
        """
        modules = [module for unit in reversed(self.units) for module in unit.modules]
        owners: dict[nn.Module, list[str]] = defaultdict(list)
        for name in self.settings.forward_methods:
            holders = [module for module in modules if callable(getattr(module, name, None))]
            if not holders:
                kinds = sorted({type(module).__name__.removeprefix("FSDP") for module in modules})
                raise WrapError(
                    f"forward_methods names {name!r}, which is a method of neither the model nor its units "
                    f"({', '.join(kinds)}); name methods of these, and classes that have it in sub_modules_to_wrap"
                )
            for module in holders:
                owners[module].append(name)
        return owners

    def _pieces(self) -> Iterable[PiecePlan]:
        return (piece for unit in self.units for piece in unit.pieces)
