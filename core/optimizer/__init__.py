"""Optimizers that do not know, or show, how the model is sharded."""

from ..base.megatron_names import absent_names
from .averaged_weights import AveragedWeights
from .distrib_optimizer import DistributedOptimizer, get_megatron_optimizer
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig
from .param_groups import (
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_standard_config_overrides,
)
from .run_state import RunState

__all__ = [
    "AveragedWeights",
    "DistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "RunState",
    "get_megatron_optimizer",
    "get_standard_config_overrides",
]

__getattr__ = absent_names(__name__)
