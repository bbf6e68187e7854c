"""The plan of a model: decides everything that a wrapper will do to it, before the model is changed.

values           the plan itself: the fields of every plan, its bytes and its traffic
parts            its units, their pieces and parameters
make_flat_plan   plans a model on flat buffers, whole or sharded
make_fsdp2_plan  plans a model on FSDP2
settings         what settings mean for any plan, and which exclude each other
units            which modules are gathered together, and the names of parameters
transforms       which units are recomputed, and which compiled
layout           where parameters are in flat buffers, and where ranks cut them

Settings are read here and nowhere else. Nothing here talks to another rank, or changes a module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..distributed_data_parallel_config import DistributedDataParallelConfig
from ..groups import DataParallelGroups
from ..torch_fully_sharded_data_parallel_config import Engine, engine_of
from .make_flat_plan import plan_fully_sharded, plan_whole
from .make_fsdp2_plan import plan_fsdp2
from .parts import BufferPlan, ParamPlan, PiecePlan, UnitPlan
from .units import UnitChoice
from .values import GradientReduction, Plan

__all__ = [
    "BufferPlan",
    "GradientReduction",
    "ParamPlan",
    "PiecePlan",
    "Plan",
    "UnitPlan",
    "plan_model",
]


def plan_model(
    module: nn.Module,
    config: Any,
    ddp_config: DistributedDataParallelConfig,
    groups: DataParallelGroups,
    unit_classes: Iterable[UnitChoice] = (),
    *,
    engine: Engine | None = None,
    caller: str = "plan_model",
    **options: Any,
) -> Plan:
    """Plans what a wrapper does to a model; every wrapper is built from the result.

    Args:
        module: the model, on any device, the meta device too; it is only read.
        config: the model's config; ``bf16``, ``fp16``, ``calculate_per_token_loss`` and the like are read where
            present.
        unit_classes: classes whose outermost instances become units, or single modules, where parameters are sharded.
        engine: None means the engine that the settings choose (`engine_of`).
        caller: the function or class that messages name.
        options: of the engine's own planner, as ``disable_bucketing`` on flat buffers.

    Raises:
        ParallelConfigError: settings that the engine cannot honour, or that this model or these ranks cannot have.
        WrapError: an entry of `unit_classes` that is no module class, or a parameter that the engine cannot hold.
    """
    plan_for = _PLANNERS[engine if engine is not None else engine_of(ddp_config)]
    return plan_for(module, config, ddp_config, groups, unit_classes, caller=caller, **options)


_PLANNERS: dict[Engine, Callable[..., Plan]] = {
    Engine.FLAT_BUFFERS: plan_whole,
    Engine.FULLY_SHARDED: plan_fully_sharded,
    Engine.FSDP2: plan_fsdp2,
}
