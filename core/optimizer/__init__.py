"""Optimizers that do not know, or show, how the model is sharded.

What a training may add to its optimizer is imported from its own module: `averaged_weights.AveragedWeights`.
`shardstack.dist_checkpointing` saves and loads a training whole.
"""

from ..base.megatron_names import absent_names
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
from .shard_optimizer import shard_optimizer

__all__ = [
    "DistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "get_megatron_optimizer",
    "get_standard_config_overrides",
    "shard_optimizer",
]

__getattr__ = absent_names(__name__)
