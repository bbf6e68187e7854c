"""Collects facts about a wrapped model, unit by unit, from this rank's plan; no communication."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..plan import PiecePlan, Plan, UnitPlan
from ..plan.parts import Traffic

RANGE = " … "
"""Joins the names of the first and the last parameter of a bucket."""


@dataclass(frozen=True)
class Held:
    """Bytes and dtypes of one kind of memory."""

    nbytes: int
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class UnitFacts:
    """Parameters of one collective. Sizes are those of this rank, after the tensor-parallel split, with padding."""

    name: str
    """Names of its modules below the model, joined by " + "; empty for the root unit."""
    kind: str
    """Classes of its modules; for a bucket, its contents."""
    place: int
    """Index of its first parameter among those of the model, which are roughly in the order of execution."""
    num_parameters: int
    num_trainable: int
    kept: Held
    """Parameters that this rank always keeps."""
    gathered: Held | None
    """Parameters while they are gathered; None if they are always whole."""
    gradient: Held
    """This rank's part of the reduced gradient."""
    after_forward: str
    """What happens to gathered parameters between forward and backward."""
    traffic: tuple[Traffic, ...]
    is_offloaded: bool = False

    @property
    def is_replicated(self) -> bool:
        """Whether its parameters are always whole on every rank."""
        return self.gathered is None

    def like(self, other: UnitFacts) -> bool:
        """Returns whether two units are equal except for name and place."""
        return replace(self, name=other.name, place=other.place) == other


@dataclass(frozen=True)
class Tie:
    """A weight with several names."""

    names: tuple[str, ...]
    places: tuple[int, ...]
    """Place of each name, see `UnitFacts.place`."""
    unit: int
    """Index of its unit."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a wrapped model."""

    plan: Plan
    num_microbatches: int
    units: tuple[UnitFacts, ...]
    """In the order of `UnitFacts.place`."""
    ties: tuple[Tie, ...]
    replicated: tuple[str, ...]
    """Names of single parameters that are whole on every rank."""
    num_buffers: int
    buffer_bytes: int


def model_facts(plan: Plan, model: nn.Module, num_microbatches: int) -> ModelFacts:
    """Collects the facts about a plan and its model.

    Args:
        model: only its buffers are read.
        num_microbatches: micro-batches of a step.
    """
    planned = sorted((unit for unit in plan.units if unit.params), key=_place)
    buffers = list(model.buffers())
    return ModelFacts(
        plan=plan,
        num_microbatches=num_microbatches,
        units=tuple(_unit_facts(plan, unit, num_microbatches) for unit in planned),
        ties=tuple(
            Tie(param.names, param.places, index)
            for index, unit in enumerate(planned)
            for param in unit.params
            if len(param.names) > 1
        ),
        replicated=tuple(
            param.name
            for param in sorted(plan.root.params, key=lambda param: param.places[0])
            if not (plan.root.is_gathered or param.is_trained)
        ),
        num_buffers=len(buffers),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
    )


def _unit_facts(plan: Plan, unit: UnitPlan, num_microbatches: int) -> UnitFacts:
    pieces, trained = unit.pieces, [param for param in unit.params if param.is_trained]
    name, kind = " + ".join(unit.names), " + ".join(dict.fromkeys(map(_class_name, unit.modules)))
    after_forward = "stays" if unit.stays_whole else f"1/{unit.kept_among}" if unit.kept_among else "freed"
    if not unit.is_gathered:  # a bucket, or what is frozen
        first, last = (pick(unit.params, key=lambda param: param.places[0]).name for pick in (min, max))
        name = "frozen" if unit.modules else first if first == last else f"{first}{RANGE}{last}"
        kind, after_forward = f"{len(unit.params)} parameter{'s' if len(unit.params) != 1 else ''}", ""
    return UnitFacts(
        name=name,
        kind=kind,
        place=_place(unit),
        num_parameters=sum(param.numel for param in unit.params),
        num_trainable=sum(param.numel for param in trained),
        kept=_held(pieces, sum(piece.kept_bytes for piece in pieces), "param_dtype"),
        gathered=_held(pieces, sum(p.gathered_bytes for p in pieces), "gathered_dtype") if unit.is_gathered else None,
        gradient=Held(
            sum(piece.gradient_bytes for piece in pieces),
            _distinct(dtype for piece in pieces for dtype in piece.gradient_dtypes),
        ),
        after_forward=after_forward,
        traffic=plan.traffic(num_microbatches, unit),
        is_offloaded=plan.offloads,
    )


def _place(unit: UnitPlan) -> int:
    return min(piece.place for piece in unit.pieces)


def _held(pieces: Iterable[PiecePlan], nbytes: int, dtype: str) -> Held:
    return Held(nbytes, _distinct(getattr(piece, dtype) for piece in pieces))


def _distinct(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(dtypes), key=str))


def _class_name(module: nn.Module) -> str:
    # fully_shard replaces a module's class by a subclass named FSDP...
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))
