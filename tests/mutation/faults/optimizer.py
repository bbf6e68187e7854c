"""Faults of `core.optimizer`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import OUTSIDE_THE_LOOP, REPRODUCIBLE, SHARDED_STATE

_OPTIMIZER = "tests/unit/optimizer/test_optimizer.py"
_NORM = "tests/unit/optimizer/test_clip_grads.py"
_RULES = "tests/unit/optimizer/test_update_rules.py"
_SCALER = "tests/unit/optimizer/test_grad_scaler.py"

MUTATIONS = (
    Mutation(
        "ranks round the squares of a global batch's gradient to units of their own",
        "core.optimizer.clip_grads.GradientStatistics._measure_exactly",
        r"all_reduce_by_backend\(of_key, .*\)",
        "pass",
        (f"{REPRODUCIBLE}[8 micro-batches-fsdp2-2]",),
    ),
    Mutation(
        "masters keep what was loaded over",
        "core.optimizer.main_params.WrittenParams.refresh_masters",
        "if is_written:",
        "if is_written and p.main.ndim > 2:",
        (f"{OUTSIDE_THE_LOOP}[weights_are_loaded_under_low_precision-zero2_overlap]",),
    ),
    Mutation(
        "the norm is that of one shard",
        "core.optimizer.clip_grads.GradientStatistics.measure",
        "for group in groups:",
        "for group in groups[1:]:",
        (_NORM, _OPTIMIZER),
    ),
    Mutation(
        "the norm counts replicated gradients on each tensor-parallel rank",
        "core.optimizer.clip_grads.GradientStatistics.__init__",
        "is_cut or tp_rank == 0",
        "True",
        (_NORM,),
    ),
    Mutation(
        "the clip coefficient may raise a gradient",
        "core.optimizer.clip_grads.clip_coefficient",
        r"\.clamp\(max=1\.0\)",
        "",
        (_NORM, _OPTIMIZER),
    ),
    Mutation(
        "the loss scale is not taken out of gradients",
        "core.optimizer.optimizer.MegatronOptimizer.start_step",
        r"(factor = clip_coefficient\(.*?\)) / torch\.full_like\(norm, scale\)",
        r"\1",
        (_OPTIMIZER,),
    ),
    Mutation(
        "the first master is not written back",
        "core.optimizer.optimizer.MegatronOptimizer._publish_parameters",
        r"refresh_parameters\(self\._params",
        "refresh_parameters(self._params[1:]",
        (_OPTIMIZER,),
    ),
    Mutation(
        "an overflow does not skip the step",
        "core.optimizer.optimizer.MegatronOptimizer._update",
        r"is_finite\.logical_not\(\)",
        "is_finite.new_zeros(())",
        (_OPTIMIZER,),
    ),
    Mutation(
        "a step that the device has skipped is counted",
        "core.optimizer.update_rules.take_back_step",
        "-= 1",
        "-= 0",
        (_OPTIMIZER,),
    ),
    Mutation(
        "Adam's bias is corrected for one step more",
        "core.optimizer.update_rules.update_by_adamw",
        r"partial\(_adamw, group, count",
        "partial(_adamw, group, count + 1",
        (_RULES,),
    ),
    Mutation(
        "momentum is dampened",
        "core.optimizer.update_rules._sgd",
        r"dampening=0\.0",
        "dampening=0.1",
        (_RULES,),
    ),
    Mutation(
        "the loss scale grows one step late",
        "core.optimizer.grad_scaler.DynamicGradScaler.update",
        r"== self\.growth_interval",
        "== self.growth_interval + 1",
        (_SCALER,),
    ),
    Mutation(
        "a rank's range of optimizer state begins one element early",
        "core.optimizer.distrib_optimizer.MainRange.whole",
        r"self\.start",
        "max(self.start - 1, 0)",
        SHARDED_STATE,
    ),
)
