"""Faults of `core.distributed`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import CONTRACT, FLAT, OUTSIDE_THE_LOOP, PROGRAMS_ON_STREAMS, SHARDED_STATE, STREAMS

_GUARDS = "tests/unit/distributed/guards"
_BUFFERS = "tests/unit/distributed/test_distributed_data_parallel.py"
_BUCKETS = "tests/unit/distributed/flat/test_bucket.py"
_SLOTS = "tests/unit/distributed/flat/test_unit.py"
_SAVED = ("tests/unit/distributed/model/test_forward_hooks.py",)
_FSDP2 = "tests/unit/distributed/test_torch_fully_sharded_data_parallel.py"
_FINALIZE = "tests/unit/distributed/test_finalize_model_grads.py"
_UNITS = ("tests/unit/distributed/plan/test_units.py", "tests/unit/distributed/model/test_unit_cases.py")
_STARTS = "tests/unit/distributed/model/test_initial_values.py"
_PRECISION = ("tests/unit/distributed/plan/test_pieces.py", "tests/unit/distributed/fsdp2/test_precision.py")
_EXPERTS_OVER_RANKS = "tests/functional/test_expert_parallelism.py::test_experts_over_other_ranks_equal_one_process"
_EXPERTS = "tests/unit/distributed/model/test_expert_parameters.py"
_SKIPPED = "tests/unit/distributed/engine/test_gathered_units.py"
_LEFT_OUT = "tests/unit/distributed/test_left_out.py"
_EQUALITY = "tests/functional/test_equality_of_wrappers.py"
_REPRODUCIBLE_LOOP = "tests/unit/distributed/engine/test_gradient_tree.py"
_PACKED = "tests/unit/distributed/model/test_packed_weights.py"
_OFFLOADED = "tests/unit/distributed/model/test_offloaded_activations.py"
_RELEASED = "tests/unit/distributed/test_released_memory.py"

MUTATIONS = (
    # ---- wrappers
    Mutation(
        "a step without gradients of all ranks is let through",
        "core.distributed.step.Step.check",
        r"\.get\(self\.phase\)\) is not None:",
        ".get(self.phase)) is not None and self.phase is not Phase.ACCUMULATING:",
        (f"{OUTSIDE_THE_LOOP}[a_step_without_finalizing-zero2_overlap]",),
    ),
    Mutation(
        "a guard is not asked before a reduction",
        "core.distributed.data_parallel_base._BaseDataParallel.finish_grad_sync",
        r"guard\.before_reduction\(engine\)",
        "pass",
        (f"{_GUARDS}/test_guard.py::test_a_guard_in_the_list_is_asked_at_each_moment",),
    ),
    Mutation(
        "a parameter may be replaced after its model was wrapped",
        "core.distributed.guards.changed_models.ParametersStay._check",
        r"if added or removed:",
        "if False:",
        (f"{_GUARDS}/test_changed_models.py::test_a_replaced_parameter_is_named_at_the_next_sync",),
    ),
    Mutation(
        "the first gradient is not scaled",
        "core.distributed.data_parallel_base._scale",
        r"_foreach_mul_\(gradients",
        "_foreach_mul_(gradients[1:]",
        (CONTRACT, _FSDP2),
    ),
    Mutation(
        "FSDP2 keeps gradients from step to step",
        "core.distributed.fsdp2.fsdp2_engine.TorchGradients.zero",
        r"\w+\.grad = None",
        "pass",
        (CONTRACT, _FSDP2),
    ),
    Mutation(
        "an inner no_sync ends the outer one",
        "core.distributed.data_parallel_base._BaseDataParallel.no_sync",
        r"set_sync\(before\)",
        "set_sync(True)",
        (CONTRACT,),
    ),
    Mutation(
        "each rank divides by its own number of tokens",
        "core.distributed.finalize_model_grads._one_over_global_tokens",
        r"all_reduce_by_backend\(total",
        "all_reduce_by_backend(total.clone()",
        (_FINALIZE, CONTRACT),
    ),
    Mutation(
        "gradients of norms stay partial under sequence parallelism",
        "core.distributed.finalize_model_grads._sum_over_sequence_parallel_ranks",
        r"torch\._foreach_copy_\(.*\)",
        "pass",
        (_FINALIZE,),
    ),
    # ---- plan
    Mutation(
        "units that share a weight are not united",
        "core.distributed.plan.units._unite_sharers",
        r"in owners\.values\(\)",
        "in ()",
        _UNITS,
    ),
    Mutation(
        "gradients are reduced in the compute dtype, not in reduce_dtype",
        "core.distributed.plan.pieces.mixed_precision_policy",
        "reduce_dtype or param_dtype",
        "param_dtype",
        _PRECISION,
    ),
    Mutation(
        "a shard ends one element early",
        "core.distributed.plan.parts.PiecePlan.places_in_shard",
        r"\(start, end\) if",
        "(start, end - 1) if",
        (FLAT, *SHARDED_STATE),
    ),
    Mutation(
        "a parameter begins on the last element of the one before",
        "core.distributed.plan.layout.lay_out",
        r"begin = round_up\(.*",
        "begin = max(begin - 1, 0)",
        ("tests/unit/distributed/plan/test_layout.py", FLAT),
    ),
    # ---- model
    Mutation(
        "the first tensor of replicas is not made equal",
        "core.distributed.model.initial_values.InitialValues.equalize",
        r"in self\._common_tensors\.items\(\)",
        "in list(self._common_tensors.items())[1:]",
        (_STARTS, CONTRACT),
    ),
    # ---- experts
    Mutation(
        "experts: the first rank's replace those of all ranks",
        "core.distributed.model.initial_values.InitialValues.__init__",
        r"groups\.of\(tensor\)\.whole",
        "groups.whole",
        (_EXPERTS,),
    ),
    Mutation(
        "experts: gradients are divided by the number of their own replicas",
        "core.distributed.groups.DataParallelGroups.divisor",
        r"self\.num_dense_replicas or ",
        "",
        (_EXPERTS,),
    ),
    Mutation(
        "experts: gradients are divided by the replicas of one instance",
        "core.distributed.groups._initialized_groups",
        r"whole\.size\(\)\) if",
        "whole.size() // num_instances) if",
        (_EXPERTS_OVER_RANKS,),
    ),
    Mutation(
        "experts: FSDP2 leaves the sum over ranks",
        "core.distributed.fsdp2.shard_model._divide_gradients_of_experts",
        r"1\.0 / groups\.divisor",
        "1.0",
        (_EXPERTS,),
    ),
    Mutation(
        "experts: on one rank each micro-batch is divided again",
        "core.distributed.plan.pieces.kind_of_parameter",
        r"== 'optim_grads' and num_parts > 1",
        "== 'optim_grads' and num_parts > 1 and kind_of(param) != 'expert'",
        (_EXPERTS,),
    ),
    Mutation(
        "experts: gradients are summed over the replicas of dense layers",
        "core.distributed.groups.DataParallelGroups.of_kind",
        r"'expert': self.experts",
        "'expert': None",
        (_EXPERTS,),
    ),
    # ---- what settings leave out
    Mutation(
        "left out: replicated parameters are sharded as others",
        "core.distributed.groups.DataParallelGroups.of_kind",
        r"'replicated': self.replicated",
        "'replicated': None",
        (_LEFT_OUT,),
    ),
    Mutation(
        "left out: FSDP2 leaves replicated gradients to each rank",
        "core.distributed.fsdp2.fsdp2_engine.TorchGradients.finish",
        r"self\._reduce_replicated\(\)",
        "pass",
        (_LEFT_OUT,),
    ),
    Mutation(
        "left out: an ignored parameter is updated",
        "core.distributed.groups.managed_parameters",
        r" if getattr\(p, LEFT_OUT, None\) != 'ignored'",
        "",
        (_LEFT_OUT,),
    ),
    Mutation(
        "left out: a pattern splits a tie",
        "core.distributed.model.unit_transforms._match_patterns",
        r"len\(matched\) < len\(own\)",
        "False",
        (_LEFT_OUT,),
    ),
    # ---- what ranks skip
    Mutation(
        "skipped: a rank that drops an output leaves its gathers and reductions to others",
        "core.distributed.engine.gathered_units.UnitOrder.reach",
        r"self\._pass_by\(.*\)",
        "pass",
        (f"{_SKIPPED}::test_ranks_that_skip_a_tower_train_as_one_process",),
    ),
    Mutation(
        "skipped: what ranks agree to skip is gathered without the setting",
        "core.distributed.engine.gathered_units.UnitOrder.__init__",
        r"list\(units\) if plan\.settings\.gather_skipped_units else \[\]",
        "list(units)",
        (f"{_SKIPPED}::test_ranks_that_agree_send_nothing_more",),
    ),
    # ---- the flat engine
    Mutation(
        "the sum of a global batch over ranks is not made a mean",
        "core.distributed.data_parallel_base._BaseDataParallel.finish_grad_sync",
        r"_scale\(engine, .*\)",
        "pass",
        (f"{_REPRODUCIBLE_LOOP}::test_a_custom_loop_has_equal_gradients_on_one_two_four_ranks",),
    ),
    Mutation(
        "parameters that are being gathered are read at once",
        "core.distributed.flat.unit.Unit._make_pending",
        r"make_pending\(self\..*\)",
        "pass",
        (f"{OUTSIDE_THE_LOOP}[an_average_of_weights_is_kept_by_references-zero2_overlap]",),
    ),
    Mutation(
        "a frozen parameter is updated with zeros",
        "core.distributed.flat.grad_slot.GradSlot.has_gradient",
        "return .*",
        "return True",
        (f"{OUTSIDE_THE_LOOP}[frozen_parameters_do_not_decay-zero2_overlap]",),
    ),
    Mutation(
        "gradients are summed and not averaged",
        "core.distributed.engine.gradients.BucketReduction.reduce",
        r"scale = 1\.0 / divisor",
        "scale = 1.0",
        (FLAT,),
    ),
    Mutation(
        "the first bucket is not reduced",
        "core.distributed.flat.bucket.Bucket.start_grad_sync",
        r"else:(\s+self\._lane\.run)",
        r"elif self.offset:\1",
        (FLAT, CONTRACT),
    ),
    Mutation(
        "only the first bucket's parameters are gathered",
        "core.distributed.flat.unit.Unit.start_gather",
        r"lane\.run\(",
        "self.buckets[0].offset or lane.run(",
        (_BUCKETS, SHARDED_STATE[0], _EQUALITY),
    ),
    Mutation(
        "replicas of a hybrid are summed over the wrong group",
        "core.distributed.engine.gradients.BucketReduction.reduce",
        r"reduce\(part, self\.replica_group",
        "reduce(part, self.shard_group",
        (_BUFFERS, CONTRACT, _EQUALITY),
    ),
    Mutation(
        "gradients of the step before are not cleared",
        "core.distributed.flat.grad_slot.GradSlot.clear",
        r"self\.counts, self\.has_arrived, (.*) = \(False, False, None\)",
        r"self.counts, self.has_arrived, \1 = (self.counts and not self.is_written_by_layer, False, None)",
        (FLAT, CONTRACT),
    ),
    Mutation(
        "a gradient that has not arrived is not zero",
        "core.distributed.flat.grad_slot.GradSlot.complete",
        r"self\.zero\(\)",
        "self.zero(writes=False)",
        (FLAT, CONTRACT),
    ),
    # ---- units
    Mutation(
        "what was gathered before a step is used after it",
        "core.distributed.flat.sharded_parameters.ShardedParameters.invalidate",
        r"unit\.slot\.owner = None",
        "pass",
        (f"{_EQUALITY}::test_wrappers_are_equal_bitwise_on_two_ranks[adamw-zero3-2]",),
    ),
    Mutation(
        "a backward reads the parameters that another unit was gathered into the slot",
        "core.distributed.flat.sharded_parameters.CallHooks._after",
        r"watch_outputs\(.*\)",
        "pass",
        _SAVED,
    ),
    Mutation(
        "a weight that autograd has saved is read from another unit's slot",
        "core.distributed.flat.sharded_parameters.ShardedParameters._gather_saved",
        r"unit\.used_in != current_backward\(\) or unit\.phase is UnitPhase\.HIDDEN",
        "False",
        _SAVED,
    ),
    Mutation(
        "a view of a weight that is in use is not seen",
        "core.distributed.model.forward_hooks.SavedWeights.are_in_use",
        r"> self\._least_uses",
        "< self._least_uses",
        _SAVED,
    ),
    Mutation(
        "a parent reads a weight in a slot that another unit takes",
        "core.distributed.flat.sharded_parameters.ShardedParameters._on_use",
        r"and unit\.takes_turns",
        "and False",
        _SAVED,
    ),
    Mutation(
        "writes to what autograd has saved are not seen",
        "core.distributed.model.forward_hooks.read_kept",
        r"tensor\._version != version",
        "False",
        _SAVED,
    ),
    Mutation(
        "two units that run at once share a slot",
        "core.distributed.flat.sharded_parameters.ShardedParameters.gather",
        r"if owner is not None and owner\.num_running:",
        "if False:",
        (_SLOTS,),
    ),
    Mutation(
        "a write to a gathered parameter is lost",
        "core.distributed.flat.unit.Unit.hide",
        r"if indices:",
        "if False:",
        (_SLOTS,),
    ),
    # ---- fsdp2
    Mutation(
        "FSDP2 forgets what was set aside of a global batch",
        "core.distributed.fsdp2.unit_collectives._TreeReduceScatter._add",
        r"self\._sums\.added_to\(self\._current\)",
        "self._current",
        (f"{_REPRODUCIBLE_LOOP}::test_a_custom_loop_has_equal_gradients_on_one_two_four_ranks",),
    ),
    Mutation(
        "gathered parameters survive a step",
        "core.distributed.fsdp2.fsdp2_engine.TorchParameters.prepare_forward",
        r"(if self\._writes_to_shards\.find\(\)):",
        r"\1 and (not self.has_allocated):",
        ("tests/unit/distributed/fsdp2/test_shard_model.py",),
    ),
    Mutation(
        "a backward that raised is forgotten",
        "core.distributed.fsdp2.fsdp2_engine.TorchGradients.recover",
        r"self\.state\.enter\(Phase\.BROKEN\)",
        "pass",
        (f"{OUTSIDE_THE_LOOP}[a_step_goes_on_after_a_backward_that_raised_and_is_made_again-fsdp2]",),
    ),
    Mutation(
        "FSDP2 reduces every micro-batch",
        "core.distributed.fsdp2.fsdp2_engine.TorchGradients.set_sync",
        r"set_requires_gradient_sync\(enabled",
        "set_requires_gradient_sync(True",
        (CONTRACT, _FSDP2),
    ),
    Mutation(
        "a model that starts on meta loses the marks of its parameters",
        "core.distributed.model.initial_values.parameter_attributes_kept",
        r"setattr\(parameter, key, value\)",
        "pass",
        ("tests/unit/optimizer/muon/test_matrix_owners.py::test_a_model_that_starts_on_meta_keeps_its_matrices",),
    ),
    Mutation(
        "gathered codes have nothing to be unpacked by",
        "core.distributed.model.unit_transforms._restore_state",
        r"vars\(module\._parameters\[name\]\)\.update\(packing\)",
        "pass",
        (f"{_PACKED}::test_codes_keep_their_bytes_and_adapters_train",),
    ),
    Mutation(
        "packed codes are cast with the model",
        "core.distributed.plan.pieces.Pieces._plan_of",
        r"kind\.gathered_dtype != kind\.param_dtype",
        "False",
        (f"{_PACKED}::test_what_would_change_codes_is_refused",),
    ),
    # ---- streams
    Mutation(
        "streams: parameters are used before they are gathered",
        "core.distributed.flat.unit.Unit.finish_gather",
        r"handle\.wait\(\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: gradients are used before they are reduced",
        "core.distributed.flat.bucket.Bucket.wait_for_grads",
        r"handle\.wait\(\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: the host reads offloaded gradients before they are copied",
        "core.distributed.flat.bucket.Bucket.wait_for_shard",
        r"streams\.current_stream\(\)\.synchronize\(\)",
        "pass",
        (f"{PROGRAMS_ON_STREAMS}the_host_reads_offloaded_gradients_once_they_are_there",),
    ),
    Mutation(
        "streams: offloaded gradients block the host",
        "core.distributed.engine.gradients.BucketReduction.reduce",
        r"shard\.copy_\(part, non_blocking=True\)",
        "shard.copy_(part)",
        (f"{PROGRAMS_ON_STREAMS}offloaded_shards_are_copied_while_the_host_goes_on",),
    ),
    Mutation(
        "streams: sums of micro-batches are freed while they are added",
        "core.distributed.fsdp2.unit_collectives._TreeReduceScatter._add",
        r"_keep_for_this_stream\(gradients\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: activations go to the host before they are computed",
        "core.distributed.model.offloaded_activations._OnHost.__init__",
        r"order\.stream\.wait_stream\(streams\.current_stream\(\)\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: the memory of activations is taken while it is copied",
        "core.distributed.model.offloaded_activations._free",
        r"streams\.current_stream\(\)\.wait_event\(end\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: the memory of activations is free when the host asks",
        "core.distributed.model.offloaded_activations._OnHost.__init__",
        r"order\.leave\(tensor, streams\.record_event\(\)\)",
        "streams.used_on(tensor, order.stream)",
        (f"{PROGRAMS_ON_STREAMS}offloaded_activations_are_free_after_two_layers",),
    ),
    Mutation(
        "streams: activations come back into memory that is still in use",
        "core.distributed.model.offloaded_activations._OnHost._copy_back",
        r"self\._stream\.wait_stream\(streams\.current_stream\(\)\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "streams: activations are read before they are back",
        "core.distributed.model.offloaded_activations._OnHost.read",
        r"streams\.current_stream\(\)\.wait_event\(copied\)",
        "pass",
        (STREAMS,),
    ),
    Mutation(
        "an activation that was written since it was saved is that of before",
        "core.distributed.model.offloaded_activations._Forward.place",
        r"memory\.dtype, tensor\._version",
        "memory.dtype",
        (f"{_OFFLOADED}::test_a_tensor_written_later_keeps_its_saved_value",),
    ),
    Mutation(
        "activations come back when backward waits for them",
        "core.distributed.model.offloaded_activations._Forward.reach",
        r"before\.begin_return\(\)",
        "pass",
        (f"{_OFFLOADED}::test_a_unit_comes_back_while_backward_is_in_the_next",),
    ),
    Mutation(
        "pipelines: a weight of two stages is summed twice",
        "core.distributed.finalize_model_grads._sum_shared_embedding",
        r"\(chunk\.plan\.groups\.shard, group\)",
        "(chunk.plan.groups.shard, group, group)",
        ("tests/functional/test_equality_of_pipelines.py::test_pipeline_stages_equal_one_process",),
    ),
    Mutation(
        "FSDP2's load_state_dict loads",
        "core.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel.load_state_dict",
        r"return _IncompatibleKeys\(\[\], \[\]\)",
        "return super().load_state_dict(state_dict, strict)",
        (f"{CONTRACT}::test_load_state_dict_copies_and_misses_no_key",),
    ),
    Mutation(
        "FSDP2's load_state_dict is silent",
        "core.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel.load_state_dict",
        r"not in own",
        "is own",
        (f"{CONTRACT}::test_load_state_dict_copies_and_misses_no_key",),
    ),
    Mutation(
        "blocks of somebody's own model are in the root",
        "core.distributed.plan.units.default_units",
        r"tuple\(_lists_of_layers\(root\)\)",
        "()",
        ("tests/unit/distributed/plan/test_units.py",),
    ),
    Mutation(
        "a resized weight's gradient is added to what it fits",
        "core.distributed.flat.grad_slot.GradSlot.check_size",
        r"self\.param\.numel\(\) != ",
        "False and 0 != ",
        ("tests/unit/distributed/test_foreign_arguments.py::test_a_weight_that_is_resized_after_wrapping_is_named",),
    ),
    Mutation(
        "experts: biases move by this rank's tokens",
        "core.distributed.finalize_model_grads.end_step",
        r"all_reduce_by_backend\(totals, .*\)",
        "pass",
        ("tests/unit/transformer/moe/test_moe_layer.py",),
    ),
    Mutation(
        "what modules count in a step is added over replicas alone",
        "core.distributed.finalize_model_grads.end_step",
        r"in \(group, more_ranks\)",
        "in (group,)",
        ("tests/unit/base/test_module_protocol.py",),
    ),
    Mutation(
        "operations that a module names are recomputed",
        "core.distributed.model.unit_transforms._selective_contexts",
        r", \*saved_operations\(module\)\)",
        ",)",
        ("tests/unit/distributed/model/test_unit_transforms.py",),
    ),
    Mutation(
        "planned all-reduces send as much as gathers",
        "core.distributed.plan.parts.sent_bytes",
        r"2 if",
        "1 if",
        ("tests/unit/planner/test_simulation.py", "tests/unit/distributed/plan/test_parts.py"),
    ),
    Mutation(
        "groups given to a wrapper are those of its replicas alone",
        "core.distributed.groups.find_groups",
        r"groups_in_effect\(pg_collection\)",
        "groups_in_effect()",
        ("tests/unit/distributed/test_groups.py",),
    ),
    Mutation(
        "a model that is split takes all ranks as its replicas",
        "core.distributed.groups._default_ranks",
        r"\(getattr\(config, name, None\) or 1\) > 1",
        "False",
        ("tests/unit/distributed/test_wrap_model.py::test_one_line_names_what_is_missing",),
    ),
    Mutation(
        "released memory comes back as zeros",
        "core.distributed.released_memory._Storage.restore",
        r"values\.copy_\(self\._saved\)",
        "values.zero_()",
        (_RELEASED + "::test_bits_come_back_and_bytes_go",),
    ),
    Mutation(
        "what is released may be stepped",
        "core.distributed.step.Step.reject_released",
        r"self\.released and",
        "False and",
        (_RELEASED + "::test_any_use_of_what_is_released_raises",),
    ),
    Mutation(
        "a model's own config is left out",
        "core.distributed.wrap_model",
        r"own if hasattr\(own, 'calculate_per_token_loss'\) else None",
        "None",
        ("tests/unit/distributed/test_wrap_model.py::test_a_models_own_config_is_read",),
    ),
    Mutation(
        "shards of a flat buffer end inside of blocks of codes",
        "core.distributed.plan.pieces.grain_of",
        r"BLOCK if has_blocks",
        "PARAM_ALIGNMENT if has_blocks",
        ("tests/unit/distributed/test_fewer_bits.py::test_gradients_are_sums_of_what_each_rank_sends",),
    ),
    Mutation(
        "whole parameters are what codes stand for",
        "core.distributed.flat.unit.Unit.gather_apart",
        r"gather_params\(apart, self\._what\)",
        "gather_params(apart, self._what, sent_as=bucket.param_format)",
        ("tests/unit/distributed/test_fewer_bits.py::test_weights_that_a_program_reads_are_exact",),
    ),
)
