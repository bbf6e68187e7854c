"""Re-exports the schedule of learning rate and weight decay under Megatron-LM's path."""

from .optimizer.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging

__all__ = ["OptimizerParamScheduler", "get_canonical_lr_for_logging"]
