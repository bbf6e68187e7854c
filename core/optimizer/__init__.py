"""Optimizers that do not know, or show, how the model is sharded."""

from ..absent_names import absent_names
from ..optimizer_param_scheduler import OptimizerParamScheduler
from .build import get_megatron_optimizer
from .distrib_optimizer import DistributedOptimizer
from .optimizer import MegatronOptimizer
from .optimizer_config import OptimizerConfig
from .param_groups import (
    ParamGroupOverride,
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
    get_standard_config_overrides,
)

__all__ = [
    "DistributedOptimizer",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamWithNamePredicate",
    "get_megatron_optimizer",
    "get_standard_config_overrides",
]

__getattr__ = absent_names(
    __name__,
    {
        "get_canonical_lr_for_logging": "the first of param_groups without overrides has default_config, and its lr",
        "ChainedOptimizer": "one optimizer updates all chunks of a model, with one norm; get_megatron_optimizer",
        "FP32Optimizer": "use get_megatron_optimizer, which updates fp32 parameters in place",
        "Float16OptimizerWithFloat16Params": "use get_megatron_optimizer, which keeps fp32 masters where needed",
        "AdamOptimizerConfig": "use OptimizerConfig(optimizer='adam')",
        "SGDOptimizerConfig": "use OptimizerConfig(optimizer='sgd')",
    },
)
