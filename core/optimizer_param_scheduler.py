"""The schedule of learning rate and weight decay, at Megatron-LM's path; it is in `core.optimizer`."""

from .optimizer.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

__all__ = ["OptimizerParamScheduler", "get_canonical_lr_for_logging"]
