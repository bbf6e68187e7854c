"""The plan of a model: decides everything that a wrapper will do to it, before the model is changed.

values     the plan itself: the fields of every plan, and its traffic
parts      units, their pieces and parameters, and bytes of these
make_plan  plans a model, on flat buffers or on FSDP2: what each unit keeps, gathers and sends
settings   the settings as resolved, `plan.settings`, which engines read, and what is refused
pieces     dtypes, which parameters of a unit travel together, and their places in flat buffers
units      which modules are gathered together, and which are recomputed or compiled
layout     where parameters are in a bucket, and where ranks cut it

Settings are read here and nowhere else. Nothing here talks to another rank, or changes a module.
"""

from __future__ import annotations

from .make_plan import plan_model
from .parts import ParamPlan, PieceKind, PiecePlan, UnitPlan
from .values import Plan

__all__ = ["ParamPlan", "PieceKind", "PiecePlan", "Plan", "UnitPlan", "plan_model"]
