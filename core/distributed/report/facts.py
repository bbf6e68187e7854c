"""Collects facts about a wrapped model, unit by unit, from this rank's plan. Communicates nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..plan import Plan, UnitPlan
from ..plan.parts import Traffic

RANGE = " … "
"""Joins the names of the first and the last parameter of a bucket."""


@dataclass(frozen=True)
class Held:
    """Bytes and dtypes of one kind of memory."""

    nbytes: int
    dtypes: tuple[torch.dtype, ...] = ()


@dataclass(frozen=True)
class UnitFacts:
    """Parameters of one collective. Sizes are those of this rank, after the tensor-parallel split, with padding."""

    name: str
    """Names of its modules below the model, joined by " + ". Empty for the root unit."""
    kind: str
    """Classes of its modules, or what a bucket contains."""
    num_parameters: int
    num_trainable: int
    kept: Held
    """Parameters that this rank always keeps."""
    gathered: Held | None
    """Parameters while they are gathered. None if they are always whole."""
    gradient: Held
    """This rank's part of the reduced gradient."""
    after_forward: str
    """What happens to gathered parameters between forward and backward."""
    traffic: tuple[Traffic, ...]
    is_offloaded: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(entry.sent_bytes for entry in self.traffic)

    def like(self, other: UnitFacts) -> bool:
        """Returns whether two units are equal except for their names."""
        return replace(self, name=other.name) == other


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a wrapped model."""

    plan: Plan
    num_microbatches: int
    units: tuple[UnitFacts, ...]
    """In the order of their first parameters in the model, which is roughly that of execution."""
    ties: tuple[tuple[str, ...], ...] = ()
    """All names of each weight that has several."""
    replicated: tuple[str, ...] = ()
    """Names of single parameters that are whole on every rank."""
    num_buffers: int = 0
    buffer_bytes: int = 0


def model_facts(plan: Plan, model: nn.Module, num_microbatches: int) -> ModelFacts:
    """Collects the facts about a plan and its model.

    Args:
        model: only its buffers are read.
        num_microbatches: micro-batches of a step.
    """
    units = sorted((unit for unit in plan.units if unit.params), key=lambda unit: min(p.place for p in unit.pieces))
    buffers, root = list(model.buffers()), plan.root
    frozen = [] if root.is_gathered else [p for piece in root.pieces if not piece.is_trained for p in piece.params]
    return ModelFacts(
        plan=plan,
        num_microbatches=num_microbatches,
        units=tuple(_unit_facts(plan, unit, num_microbatches) for unit in units),
        ties=tuple(param.names for unit in units for param in unit.params if len(param.names) > 1),
        replicated=tuple(param.name for param in sorted(frozen, key=lambda param: param.places)),
        num_buffers=len(buffers),
        buffer_bytes=sum(buffer.nbytes for buffer in buffers),
    )


def _unit_facts(plan: Plan, unit: UnitPlan, num_microbatches: int) -> UnitFacts:
    pieces = unit.pieces
    name, kind = " + ".join(unit.names), " + ".join(dict.fromkeys(map(_class_name, unit.modules)))
    after_forward = "stays" if unit.stays_whole else f"1/{unit.kept_among}" if unit.kept_among else "freed"
    if not unit.is_gathered:  # a bucket, or what is frozen
        first, last = (pick(unit.params, key=lambda param: param.places[0]).name for pick in (min, max))
        name = "frozen" if unit.modules else first if first == last else f"{first}{RANGE}{last}"
        kind, after_forward = f"{len(unit.params)} parameter{'s' if len(unit.params) != 1 else ''}", "-"
    return UnitFacts(
        name=name,
        kind=kind,
        num_parameters=sum(piece.numel for piece in pieces),
        num_trainable=sum(piece.numel for piece in pieces if piece.is_trained),
        kept=Held(unit.kept_bytes, _distinct(p.param_dtype for p in pieces)),
        gathered=Held(unit.gathered_bytes, _distinct(p.gathered_dtype for p in pieces)) if unit.is_gathered else None,
        gradient=Held(unit.gradient_bytes, _distinct(dtype for p in pieces for dtype in p.gradient_dtypes)),
        after_forward=after_forward,
        traffic=plan.traffic(num_microbatches, unit),
        is_offloaded=plan.cpu_offload,
    )


def _distinct(dtypes: Iterable[torch.dtype]) -> tuple[torch.dtype, ...]:
    return tuple(sorted(set(dtypes), key=str))


def _class_name(module: nn.Module) -> str:
    # fully_shard replaces a module's class by a subclass named FSDP...
    return next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))
