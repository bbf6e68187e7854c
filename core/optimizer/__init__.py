"""Optimizers that do not know, or show, how the model is sharded."""

from .optimizer import MegatronOptimizer, get_megatron_optimizer
from .optimizer_config import OptimizerConfig
from .optimizer_param_scheduler import OptimizerParamScheduler

__all__ = ["MegatronOptimizer", "OptimizerConfig", "OptimizerParamScheduler", "get_megatron_optimizer"]
