"""The state of a run: everything that changes with an iteration, and that a checkpoint has to store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..distributed import _BaseDataParallel
from ..optimizer import MegatronOptimizer, OptimizerParamScheduler
from .config import PretrainConfig


@dataclass(kw_only=True)
class TrainingState:
    """The state of a run after an iteration."""

    model: _BaseDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    vocab_size: int
    """Rows of the model's embedding, padding included."""
    iteration: int = 0
    """Number of steps so far, skipped ones included. `loop` counts; a checkpoint sets it when a run resumes."""
    consumed_samples: int = 0
    """Samples of the training split in these steps, over all ranks. Set as `iteration`."""
    skipped_steps: int = 0
    """Steps in a row, up to this one, that were skipped because a gradient was infinite or NaN, without a dynamic loss
    scale. `loop` sets it; a resumed run starts at 0."""
    sample_order: Mapping[str, Any] = field(default_factory=dict)
    """Inputs and fingerprint of the order of samples (`RunData.sample_order`); a checkpoint stores it to compare."""


def build_scheduler(config: PretrainConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Builds the schedule of a run, counted in iterations.

    Raises:
        ConfigError: its lengths contradict each other.
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
        max_lr=config.optimizer.lr or 0.0,  # the optimizer requires it
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
