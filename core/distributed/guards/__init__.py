"""What a wrapper guarantees, one small object for each guarantee.

guard               the moments at which a wrapper asks its guards
unfit_models        models that no wrapper, or that FSDP2, cannot train as the plain module would, and wrapped ones
different_models    ranks of a group that wrap different models, or one model with different settings
changed_models      parameters that were moved, replaced, added or resized after wrapping, plain state dicts for shards
gradients           the order of calls, gradients that are not finite, and those that an optimizer would not see

A new guarantee is a class in one of these files, or a file of its own, and a line in `GUARDS`.
"""

from __future__ import annotations

from .changed_models import ParametersStay, PlainStateDicts, SizesStay
from .different_models import SameModelEverywhere
from .gradients import FiniteGradients, OrderOfCalls, ReadableGradients, UnassignedGradients
from .guard import Guard, PlainModel
from .unfit_models import (
    DenseOnOneDevice,
    ExpertsHaveRanks,
    FitForFsdp2,
    MemoryIsNotShared,
    ReproducibleModel,
    reject_wrapped,
)

__all__ = ["GUARDS", "Guard", "PlainModel", "reject_wrapped"]

GUARDS: tuple[type[Guard], ...] = (
    # Before a model is changed.
    ExpertsHaveRanks,
    ReproducibleModel,
    DenseOnOneDevice,
    MemoryIsNotShared,
    FitForFsdp2,
    SameModelEverywhere,
    # While it is wrapped: what may be done to it.
    SizesStay,
    PlainStateDicts,
    # In a step: what may be done with gradients, the order of calls first.
    FiniteGradients,
    OrderOfCalls,
    ParametersStay,
    UnassignedGradients,
    ReadableGradients,
)
"""All guarantees, in the order in which a wrapper asks for them."""
