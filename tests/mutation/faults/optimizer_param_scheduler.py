"""Faults of `core.optimizer_param_scheduler`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "warm-up is one step ahead",
        "core.optimizer_param_scheduler.OptimizerParamScheduler.get_lr",
        r"\* self\.num_steps / self\.lr_warmup_steps",
        "* (self.num_steps + 1) / self.lr_warmup_steps",
        ("tests/unit/test_optimizer_param_scheduler.py",),
    ),
)
