"""Optimizers that do not know, or show, how the model is sharded."""

from .build import get_megatron_optimizer
from .distrib_optimizer import DistributedOptimizer
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig
from .optimizer_param_scheduler import OptimizerParamScheduler

__all__ = [
    "DistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "get_megatron_optimizer",
]
