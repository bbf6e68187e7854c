"""Faults of `core.optimizer`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import OUTSIDE_THE_LOOP, REPRODUCIBLE, SHARDED_STATE

_OPTIMIZER = "tests/unit/optimizer/test_optimizer.py"
_NORM = "tests/unit/optimizer/test_clip_grads.py"
_RULES = "tests/unit/optimizer/test_update_rules.py"
_ONE_PASS = "tests/unit/optimizer/test_adamw_in_one_pass.py"
_SCALER = "tests/unit/optimizer/test_grad_scaler.py"
_MUON = "tests/unit/optimizer/muon/test_rule.py"
_MUON_OVER_RANKS = "tests/unit/optimizer/muon/test_matrix_owners.py"
_AVERAGED = "tests/unit/optimizer/test_averaged_weights.py"
_IN_8_BITS = "tests/unit/optimizer/low_precision"
_ANY_CUT = f"{_IN_8_BITS}/test_states.py::test_bits_are_those_of_one_process_on_any_cut"
_OWN = "tests/unit/optimizer/test_shard_optimizer.py"
_OWN_RULE = "tests/unit/optimizer/test_torch_rule.py"

MUTATIONS = (
    Mutation(
        "ranks round the squares of a global batch's gradient to units of their own",
        "core.optimizer.exact_sums.ExactStatistics._measure",
        r"all_reduce_by_backend\(of_part, .*\)",
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
        "core.optimizer.clip_grads.GradientStatistics._add_up",
        r"for group in part\.groups:",
        "for group in part.groups[1:]:",
        (_NORM, _OPTIMIZER),
    ),
    Mutation(
        "the norm counts replicated gradients on each tensor-parallel rank",
        "core.optimizer.clip_grads.GradientStatistics.__init__",
        r"\(is_cut or rank == 0\)",
        "True",
        (_NORM,),
    ),
    Mutation(
        "experts: the norm is that of one rank's experts",
        "core.optimizer.clip_grads.GradientStatistics.__init__",
        r"\(expert_group, expert_tp_rank\)",
        "(model_group, expert_tp_rank)",
        ("tests/unit/distributed/model/test_expert_parameters.py",),
    ),
    Mutation(
        "experts: the norm leaves out those of other tensor-parallel ranks",
        "core.optimizer.clip_grads.GradientStatistics.__init__",
        r"\(expert_group, expert_tp_rank\)",
        "(expert_group, tp_rank)",
        ("tests/functional/test_expert_parallelism.py::test_experts_over_other_ranks_equal_one_process",),
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
        "core.optimizer.clip_grads.gradient_factor",
        r"(factor = clip_coefficient\(.*?\)) / torch\.full_like\(norm, scale\)",
        r"\1",
        (_OPTIMIZER,),
    ),
    Mutation(
        "the first master is not written back",
        "core.optimizer.update_rules._update",
        r"list\(weights\), list\(mains\)",
        "list(weights[1:]), list(mains[1:])",
        (_OPTIMIZER,),
    ),
    Mutation(
        "gradients that need no conversion are not clipped",
        "core.optimizer.update_rules.SkippableRule.as_read",
        r"if self\.factor is None or not grads",
        "if True",
        (_OPTIMIZER,),
    ),
    Mutation(
        "the compiled update has no root of a bias correction",
        "core.optimizer.adamw_in_one_pass.update_in_one_pass",
        r"math\.sqrt\(1\.0 - beta2 \*\* count\)",
        "1.0 - beta2 ** count",
        (_ONE_PASS,),
    ),
    Mutation(
        "an overflow does not skip the step",
        "core.optimizer.update_rules.SkippableRule.update",
        r"is_finite\.logical_not\(\)",
        "is_finite.new_zeros(())",
        (_OPTIMIZER,),
    ),
    Mutation(
        "a step that the device has skipped is counted",
        "core.optimizer.update_rules.SkippableRule.take_back",
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
        "momentum is dampened", "core.optimizer.update_rules._sgd", r"'dampening': 0\.0", "'dampening': 0.1", (_RULES,)
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
        "core.optimizer.main_ranges.MainRange.whole",
        r"self\.start",
        "max(self.start - 1, 0)",
        SHARDED_STATE,
    ),
    Mutation(
        "an optimizer that is not elementwise is taken",
        "core.optimizer.torch_rule.probe",
        r"not all\(map\(torch\.equal, expected, found\)\)",
        "False",
        (f"{_OWN_RULE}::test_what_is_not_elementwise_is_refused_in_one_line",),
    ),
    Mutation(
        "a foreign optimizer's numbers are zero in a resumed run",
        "core.optimizer.torch_rule.TorchRule.set_numbers",
        r"numbers\.get\(kind, 0\)",
        "0",
        (f"{_OWN}::test_any_wrapper_and_size_goes_on_to_the_bit", _OWN_RULE),
    ),
    Mutation(
        "a rank keeps the first part of the state that an optimizer has made",
        "core.optimizer.main_ranges.MainRange.part_of",
        r"\[self\.start:self\.end\]",
        "[:self.end - self.start]",
        (f"{_OWN}::test_an_optimizer_from_before_wrapping_goes_on", "tests/unit/optimizer/test_main_ranges.py"),
    ),
    Mutation(
        "the state of another class of optimizer is loaded",
        "core.optimizer.optimizer_state.OptimizerState.check_state_scalars",
        r"\) != kind",
        ") is None",
        (f"{_OWN}::test_a_checkpoint_of_another_class_is_refused",),
    ),
    Mutation(
        "Muon updates queries, keys and values as one matrix",
        "core.optimizer.muon.matrices.matrices_of",
        "fused is not None and is_split",
        "False",
        ("tests/unit/optimizer/muon/test_matrices.py",),
    ),
    Mutation(
        "Muon leaves a matrix of one row to AdamW",
        "core.optimizer.muon.builder._reason_against",
        r"p\.param\.ndim < 2",
        "min(p.param.shape) < 2",
        (f"{_MUON_OVER_RANKS}::test_a_matrix_of_one_row_on_four_ranks_is_updated",),
    ),
    Mutation(
        "a rank orthogonalizes the rows that it holds",
        "core.optimizer.muon.matrix_owners.MatrixOwners.take",
        r"if part\.matrix not in matrices",
        "if True",
        (f"{_MUON_OVER_RANKS}::test_every_wrapper_equals_one_process",),
    ),
    Mutation(
        "Muon's update is made twice in a step",
        "core.optimizer.muon.rule._descend",
        "alpha=-step",
        "alpha=-2 * step",
        (_MUON,),
    ),
    Mutation(
        "a resumed run begins with owners' momentum of zero",
        "core.optimizer.muon.rule.Muon._take_momenta",
        r"if not self\._is_shared",
        "if True",
        (f"{_MUON_OVER_RANKS}::test_checkpoint_continues_under_any_wrapper",),
    ),
    Mutation(
        "a step that the device skips moves the momentum",
        "core.optimizer.muon.rule.Muon._run",
        "if self._may_skip else",
        "if False else",
        (f"{_MUON}::test_device_skips_the_step_without_the_host",),
    ),
    Mutation(
        "a skipped step is averaged",
        "core.optimizer.optimizer.MegatronOptimizer.conclude",
        r"elif self\.average",
        "if self.average",
        (_AVERAGED,),
    ),
    Mutation(
        "an average takes new weights by the weight of the old",
        "core.optimizer.averaged_weights.AveragedWeights.note_update",
        r"1 - self\.decay",
        "self.decay",
        (_AVERAGED,),
    ),
    Mutation(
        "an evaluation reads the low-precision weights from before the average",
        "core.optimizer.optimizer.MegatronOptimizer.exchange_main_tensors",
        r"self\._publish_parameters\(\)",
        "pass",
        (_AVERAGED,),
    ),
    Mutation(
        "pipelines: the norm is of one stage",
        "core.optimizer.clip_grads.GradientStatistics.__init__",
        r"groups\.mp or groups\.tp",
        "groups.tp",
        ("tests/functional/test_equality_of_pipelines.py::test_pipeline_stages_equal_one_process",),
    ),
    Mutation(
        "groups keep their rates when a run continues",
        "core.optimizer.param_groups.load_groups",
        r"group\[key\] = value",
        "pass",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_a_run_goes_on_to_the_bit",),
    ),
    Mutation(
        "parameters of several groups get the settings of one",
        "core.optimizer.param_groups.saved_settings",
        r"values != there\[0\]",
        "False",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_half_of_a_state_is_refused_before_anything_changes",),
    ),
    Mutation(
        "the parameters of one pipeline stage are checked as those of the model",
        "core.optimizer.distrib_optimizer.get_megatron_optimizer",
        r"stages\.all_gather\((\{.*?\})\)",
        r"[\1]",
        ("tests/unit/optimizer/muon/test_matrix_owners.py::test_checks_are_of_all_stages",),
    ),
    Mutation(
        "a layer's norm is that of one rank's shard",
        "core.optimizer.layer_norms.LayerNorms._norms_of",
        r"self\._statistics\.norms\((.*)\)",
        r"torch.stack([sum(t.double().square().sum() for t in row if t is not None).sqrt() for row in \1])",
        ("tests/unit/optimizer/test_layer_norms.py::test_every_wrapper_has_the_norms_of_one_process",),
    ),
    Mutation(
        "a layer's gradient has the loss scale",
        "core.optimizer.layer_norms.LayerNorms._before_step",
        r" / scale",
        "",
        ("tests/unit/optimizer/test_layer_norms.py::test_norms_are_without_loss_scale_and_before_clipping",),
    ),
    Mutation(
        "a layer's weight is the one before the step",
        "core.optimizer.layer_norms.LayerNorms._after_step",
        r"update, self\._norms_of\(weights\)",
        "update, self._norms_of([copy.add_(weight) for copy, weight in zip(copies, weights)])",
        ("tests/unit/optimizer/test_layer_norms.py::test_norms_are_those_of_the_tensors",),
    ),
    Mutation(
        "fp32 masters are not released with an optimizer's state",
        "core.optimizer.optimizer_state.OptimizerState.held",
        r"p\.is_copied",
        "False",
        ("tests/unit/distributed/test_released_memory.py::test_bits_come_back_and_bytes_go",),
    ),
    Mutation(
        "blocks of 8-bit state begin where a rank's part does",
        "core.optimizer.low_precision.places.Places.__init__",
        r"self\._lead = self\._origin % BLOCK if",
        "self._lead = 0 if",
        (
            f"{_ANY_CUT}[dynamic8-linear8-2_zero2-2_fsdp2]",
            f"{_IN_8_BITS}/test_places.py::test_places_and_blocks_are_those_of_the_whole_tensor",
        ),
    ),
    Mutation(
        "a cut block of 8-bit state has the scale of one rank",
        "core.optimizer.low_precision.stored.SharedScales.agree",
        r"if not self\.num_shared:",
        "if True:",
        (f"{_ANY_CUT}[dynamic8-linear8-2_zero2-2_fsdp2]",),
    ),
    Mutation(
        "rounding has the same random bits in every step",
        "core.optimizer.low_precision.formats.key_of",
        r"\{name\} \{step\}",
        "{name}",
        (f"{_IN_8_BITS}/test_formats.py::test_random_bits_depend_on_place_name_and_step",),
    ),
    Mutation(
        "random bits of rounding are numbered on each rank",
        "core.optimizer.low_precision.stored.Stored._bits",
        r"self\.places\.places\(start, end\)",
        "torch.arange(start, end)",
        (f"{_ANY_CUT}[bf16-no_average-2_ddp-2_zero1_tp2]",),
    ),
    Mutation(
        "what is loaded into copies of 8-bit state is dropped",
        "core.optimizer.optimizer_state.OptimizerState.load_state_scalars",
        r"self\.rule\.stored\.take_copies\(\)",
        "pass",
        (f"{_ANY_CUT}[bf16-no_average-2_ddp-2_zero1_tp2]",),
    ),
)
