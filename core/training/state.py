"""What moves on with every iteration of a run, and is all that a checkpoint has to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..distributed import _BaseDataParallel
from ..optimizer import MegatronOptimizer, OptimizerParamScheduler
from .config import PretrainConfig


@dataclass(kw_only=True)
class TrainingState:
    """A run at one of its iterations."""

    model: _BaseDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    vocab_size: int
    """Rows of the model's embedding, padding included."""
    iteration: int = 0
    """Steps made, skipped ones included."""
    consumed_samples: int = 0
    """Samples of the training split that these steps took, over all ranks."""
    skipped_steps: int = 0
    """Steps in a row, up to this one, that were skipped because a gradient was infinite or NaN, where no loss scale
    adapts to that; a run that goes on from a checkpoint counts anew."""
    sample_order: Mapping[str, Any] = field(default_factory=dict)
    """What decides which sample comes when, as JSON values; a checkpoint keeps it, to compare on loading."""


def build_scheduler(config: PretrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The schedule of a run, counted in iterations.

    Raises:
        ConfigError: lengths that do not fit into each other.
    """
    settings, weight_decay = config.scheduler, config.optimizer.weight_decay
    decay_iters = settings.lr_decay_iters or config.run.train_iters
    warmup_iters = settings.lr_warmup_iters
    if settings.lr_warmup_fraction is not None:
        warmup_iters = int(settings.lr_warmup_fraction * decay_iters)
    is_constant = settings.start_weight_decay is None or settings.end_weight_decay is None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=config.optimizer.lr or 0.0,  # no optimizer is built without
        min_lr=config.optimizer.min_lr or 0.0,
        lr_warmup_steps=warmup_iters,
        lr_decay_steps=decay_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=weight_decay if is_constant else settings.start_weight_decay or 0.0,
        end_wd=weight_decay if is_constant else settings.end_weight_decay or 0.0,
        wd_incr_steps=config.run.train_iters,
        wd_incr_style=settings.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=settings.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=settings.override_opt_param_scheduler,
        wsd_decay_steps=settings.lr_wsd_decay_iters,
        lr_wsd_decay_style=settings.lr_wsd_decay_style,
    )
