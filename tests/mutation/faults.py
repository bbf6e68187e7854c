"""The faults: each changes one place in one function of `core`, and names the tests that have to fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    name: str
    function: str
    """Qualified name of the function, its module included."""
    pattern: str
    """Regular expression that matches once in the function's normalised source (`tests.mutation.plant.source_of`)."""
    replacement: str
    """What takes the place of the match, as for `re.sub`."""
    tests: tuple[str, ...]
    """Files or single tests; at least one has to fail."""


_DDP = "tests/unit/distributed/test_distributed_data_parallel.py"
_CONTRACT = "tests/unit/distributed/test_data_parallel_base.py"
_SLOTS = "tests/unit/distributed/fully_sharded/test_gathering.py"
_FSDP2 = "tests/unit/distributed/test_torch_fully_sharded_data_parallel.py"
_COLLECTIVES = "tests/unit/comm/test_collectives.py"
_FINALIZE = "tests/unit/distributed/test_finalize_model_grads.py"
_UNITS = ("tests/unit/distributed/plan/test_units.py", "tests/unit/distributed/model/test_unit_cases.py")
_STARTS = "tests/unit/distributed/model/test_initial_values.py"
_PRECISION = ("tests/unit/distributed/plan/test_precision.py", "tests/unit/distributed/fsdp2/test_fsdp_precision.py")
_OPTIMIZER = "tests/unit/optimizer/test_optimizer.py"
_NORM = "tests/unit/optimizer/test_clip_grads.py"
_RULES = "tests/unit/optimizer/test_update_rules.py"
_SCALER = "tests/unit/optimizer/test_grad_scaler.py"
_SHARDED = ("tests/unit/optimizer/test_distrib_optimizer.py", "tests/unit/optimizer/test_portable_state.py")
_SCHEDULE = "tests/unit/optimizer/test_optimizer_param_scheduler.py"
_EQUALITY = "tests/functional/test_equality_of_wrappers.py"
_LOSS_IN_PARTS = "tests/unit/tensor_parallel/test_linear_cross_entropy.py"
_LAYOUTS = "tests/functional/test_equality_over_layouts.py"
_CUT_STEP = "tests/unit/training/test_train_step.py::test_a_step_over_cut_sequences_is_the_step_of_one_process"

_REPRODUCIBLE_LOOP = "tests/unit/distributed/test_reproducible.py"
_REPRODUCIBLE = "tests/functional/test_reproducible.py::test_a_run_has_the_same_bits_on_any_number_of_ranks"

_OUTSIDE = (
    "tests/unit/distributed/test_outside_the_loop.py::test_what_works_on_a_plain_module_gives_that_result_or_raises"
)

MUTATIONS = (
    # ---- parameters in slots
    Mutation(
        "what was gathered before a step is used after it",
        "core.distributed.fully_sharded.gathering.ParameterGathering.forget",
        r"unit\.slot\.owner = None",
        "pass",
        (f"{_EQUALITY}::test_wrappers_are_equal_bitwise_on_two_ranks[adamw-zero3-2]",),
    ),
    Mutation(
        "a backward reads the parameters that another unit was gathered into the slot",
        "core.distributed.fully_sharded.gathering.ParameterGathering._watch",
        r"tensor\.register_hook\(.*\)",
        "pass",
        (_SLOTS,),
    ),
    Mutation(
        "two units that run at once share a slot",
        "core.distributed.fully_sharded.gathering.ParameterGathering._reject_running",
        r"if owner is not None and owner\.running:",
        "if False:",
        (_SLOTS,),
    ),
    Mutation(
        "a write to a gathered parameter is lost",
        "core.distributed.fully_sharded.unit.Unit.hide",
        r"if before != self\._versions:",
        "if False:",
        (_SLOTS,),
    ),
    # ---- the same bits on any number of ranks
    Mutation(
        "sums of a global batch wait for its end, and are added there",
        "core.micro_batch_tree.MicroBatchTree.additions",
        r"return \(~.*",
        "return 0",
        ("tests/unit/test_micro_batch_tree.py",),
    ),
    Mutation(
        "FSDP2 forgets what was set aside of a global batch",
        "core.distributed.fsdp2.torch_private.micro_batch_sums._UnitSums._complete",
        r"if not self\.sums\.tensors:",
        "if True:",
        (f"{_REPRODUCIBLE_LOOP}::test_a_loop_of_ones_own_has_the_same_gradients_on_one_two_and_four_ranks",),
    ),
    Mutation(
        "the sum of a global batch over ranks is not made a mean",
        "core.distributed.buffers.bucket_sums.BucketSums.finish",
        r"shard\.mul_\(.*\)",
        "pass",
        (f"{_REPRODUCIBLE_LOOP}::test_a_loop_of_ones_own_has_the_same_gradients_on_one_two_and_four_ranks",),
    ),
    Mutation(
        "ranks round the squares of a global batch's gradient to units of their own",
        "core.optimizer.clip_grads.GradientStatistics._measure_exactly",
        r"all_reduce_by_backend\(of_key, .*\)",
        "pass",
        (f"{_REPRODUCIBLE}[8 micro-batches-zero1-2]",),
    ),
    Mutation(
        "dropout depends on a micro-batch's place on its rank, not in the global batch",
        "core.training.train_step.train_step",
        r"seeds\.enter\(.*\)",
        "seeds.enter(i)",
        (f"{_REPRODUCIBLE}[8 micro-batches-ddp-4]",),
    ),
    Mutation(
        "ranks read the micro-batches of a global batch in another order than they add them",
        "core.datasets.data_samplers.PretrainingSampler._place",
        r"if self\.tree is None:",
        "if True:",
        ("tests/functional/test_reproducible.py::test_a_run_on_two_then_four_then_one_rank_is_the_run_on_one",),
    ),
    # ---- outside the prescribed training loop
    Mutation(
        "parameters that are being gathered are read at once",
        "core.distributed.buffers.bucket_group.BucketGroup.start_param_sync",
        r"make_pending\(.*\)",
        "pass",
        (f"{_OUTSIDE}[an_average_of_weights_is_kept_by_references-zero1_overlap]",),
    ),
    Mutation(
        "masters keep what was loaded over",
        "core.optimizer.written_params.WrittenParams.refresh_masters",
        "if is_written:",
        "if is_written and p.main.ndim > 2:",
        (f"{_OUTSIDE}[weights_are_loaded_under_low_precision-ddp]",),
    ),
    Mutation(
        "a frozen parameter is updated with zeros",
        "core.distributed.buffers.grad_slot.GradSlot.has_gradient",
        "return .*",
        "return True",
        (f"{_OUTSIDE}[frozen_parameters_do_not_decay-zero1]",),
    ),
    Mutation(
        "gathered parameters survive a step",
        "core.distributed.fsdp2.sharded_model.ShardedModel.prepare_forward",
        r"(if self\._values\.are_stale\(\)):",
        r"\1 and (not self._has_allocated):",
        ("tests/unit/distributed/fsdp2/test_sharded_model.py",),
    ),
    Mutation(
        "a backward that raised is forgotten",
        "core.distributed.fsdp2.sharded_model.ShardedModel._end_failed_backward",
        r"self\._has_failed = True",
        "pass",
        (f"{_OUTSIDE}[a_step_goes_on_after_a_backward_that_raised_and_is_made_again-fsdp2]",),
    ),
    Mutation(
        "a step without gradients of all ranks is let through",
        "core.distributed.gradient_state.GradientState.check_may_step",
        r"if not self\.is_reduced:",
        "if not self.is_reduced and self.phase is Phase.ZEROED:",
        (f"{_OUTSIDE}[a_step_without_finalizing-zero2]",),
    ),
    # ---- wrappers
    Mutation(
        "gradients are summed and not averaged",
        "core.distributed.buffers.reduction.BucketReduction.reduce",
        r"scale = 1\.0 / self\.group\.size\(\)",
        "scale = 1.0",
        (_DDP,),
    ),
    Mutation(
        "the first bucket is not reduced",
        "core.distributed.buffers.bucket_group.BucketGroup.start_grad_sync",
        r"else:(\s+self\._lane\.run)",
        r"elif self.bucket.offset:\1",
        (_DDP, _CONTRACT),
    ),
    Mutation(
        "only the first bucket's parameters are gathered",
        "core.distributed.buffers.bucket_group.BucketGroup.start_param_sync",
        r"else:(\s+self\._lane\.run)",
        r"elif not bucket.offset:\1",
        (_DDP, _SHARDED[0], _EQUALITY),
    ),
    Mutation(
        "replicas of a hybrid are summed over the wrong group",
        "core.distributed.buffers.reduction.BucketReduction.reduce",
        r"reduce\(part, self\.replica_group",
        "reduce(part, self.shard_group",
        (_DDP, _CONTRACT, _EQUALITY),
    ),
    Mutation(
        "what is reduced replaces the micro-batches before it",
        "core.comm.sums.store",
        r"\.add_\(result, alpha=scale\)",
        ".copy_(result * scale)",
        (_COLLECTIVES, _DDP, _CONTRACT),
    ),
    Mutation(
        "a sum that is added is not scaled",
        "core.comm.sums.store",
        ", alpha=scale",
        "",
        (_COLLECTIVES, _DDP),
    ),
    Mutation(
        "the first gradient is not scaled",
        "core.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel._scale_gradients",
        r"_foreach_mul_\(gradients",
        "_foreach_mul_(gradients[1:]",
        (_CONTRACT, _FSDP2),
    ),
    Mutation(
        "FSDP2 reduces every micro-batch",
        "core.distributed.fsdp2.sharded_model.ShardedModel.set_gradient_sync",
        r"set_requires_gradient_sync\(enabled",
        "set_requires_gradient_sync(True",
        (_CONTRACT, _FSDP2),
    ),
    Mutation(
        "FSDP2 keeps gradients from step to step",
        "core.distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel._zero_gradients",
        r"\w+\.grad = None",
        "pass",
        (_CONTRACT, _FSDP2),
    ),
    Mutation(
        "an inner no_sync ends the outer one",
        "core.distributed.data_parallel_base._BaseDataParallel.no_sync",
        r"_set_gradient_sync\(before\)",
        "_set_gradient_sync(True)",
        (_CONTRACT,),
    ),
    Mutation(
        "units that share a weight are not united",
        "core.distributed.plan.units._unite_sharers",
        r"in owners\.values\(\)",
        "in ()",
        _UNITS,
    ),
    Mutation(
        "the first tensor of replicas is not made equal",
        "core.distributed.model.initial_values.InitialValues.equalize",
        r"broadcast_tensors\(self\._equalized",
        "broadcast_tensors(self._equalized[1:]",
        (_STARTS, _CONTRACT),
    ),
    Mutation(
        "gradients are reduced in the compute dtype, not in reduce_dtype",
        "core.distributed.plan.precision.mixed_precision_policy",
        "reduce_dtype or param_dtype",
        "param_dtype",
        _PRECISION,
    ),
    Mutation(
        "each rank divides by its own number of tokens",
        "core.distributed.finalize_model_grads._one_over_global_tokens",
        r"all_reduce_by_backend\(total",
        "all_reduce_by_backend(total.clone()",
        (_FINALIZE, _CONTRACT),
    ),
    Mutation(
        "gradients of norms stay partial under sequence parallelism",
        "core.distributed.finalize_model_grads._sum_over_sequence_parallel_ranks",
        r"torch\._foreach_copy_\(.*\)",
        "pass",
        (_FINALIZE, _LAYOUTS),
    ),
    Mutation(
        "gradients of adapters stay partial under sequence parallelism",
        "core.transformer.lora._WholeLinear.__init__",
        r"sequence_parallel=config\.sequence_parallel",
        "sequence_parallel=False",
        ("tests/unit/transformer/test_lora.py",),
    ),
    # ---- buffers
    Mutation(
        "a shard ends one element early",
        "core.distributed.plan.flat_plan.BucketPlan.places_in_shard",
        r"\(start, end\) if",
        "(start, end - 1) if",
        (_DDP, *_SHARDED),
    ),
    Mutation(
        "gradients of the step before are not cleared",
        "core.distributed.buffers.grad_slot.GradSlot.clear",
        r"self\.content = self\.content\.cleared\(\)",
        "self.content = self.content.cleared() if self.is_written_by_layer else self.content",
        (_DDP, _CONTRACT),
    ),
    Mutation(
        "a gradient that has not arrived is not zero",
        "core.distributed.buffers.grad_slot.GradSlot.complete",
        r"\.zero_\(\)",
        ".add_(1)",
        (_DDP, _CONTRACT),
    ),
    Mutation(
        "a parameter begins on the last element of the one before",
        "core.distributed.plan.layout.lay_out",
        r"begin = round_up\(.*",
        "begin = max(begin - 1, 0)",
        ("tests/unit/distributed/plan/test_layout.py", _DDP),
    ),
    # ---- optimizer and norms
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
        "core.optimizer.optimizer.MegatronOptimizer.start_step",
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
        "core.optimizer.update_rules.AdamW.step",
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
        "warm-up is one step ahead",
        "core.optimizer.optimizer_param_scheduler.OptimizerParamScheduler.get_lr",
        r"\* self\.num_steps / self\.lr_warmup_steps",
        "* (self.num_steps + 1) / self.lr_warmup_steps",
        (_SCHEDULE,),
    ),
    Mutation(
        "the schedule moves on in a step that was skipped",
        "core.training.running_step.RunningStep._conclude",
        r"if outcome\.updated:",
        "if True:",
        ("tests/unit/training/test_train_step.py",),
    ),
    Mutation(
        "a collective that is enqueued counts as over",
        "core.comm.call.Collective.is_over",
        r"self\.event\.query\(\)",
        "True",
        ("tests/unit/comm/test_host_read.py",),
    ),
    # ---- layers
    Mutation(
        "a column-parallel layer's input keeps this rank's gradient",
        "core.tensor_parallel.column_linear._ColumnParallelLinear.backward",
        r"dist\.all_reduce\(grad_input.*\)",
        "None",
        ("tests/unit/tensor_parallel/test_layers.py",),
    ),
    Mutation(
        "the backward of entering a parallel region adds nothing",
        "core.tensor_parallel.mappings._CopyToModelParallelRegion.backward",
        r"reduce_from_tensor_model_parallel_region\((\w+), ctx\.group\)",
        r"\1",
        ("tests/unit/tensor_parallel/test_mappings.py",),
    ),
    Mutation(
        "targets are looked up in the first rank's vocabulary",
        "core.tensor_parallel.cross_entropy._VocabParallelCrossEntropy.forward",
        r"group_rank\(group\)",
        "0",
        ("tests/unit/tensor_parallel/test_cross_entropy.py",),
    ),
    Mutation(
        "loss in parts: the gradient of a part is not scaled by that of its tokens",
        "core.tensor_parallel.linear_cross_entropy._LinearCrossEntropy.backward",
        r"of_logits\.mul_\(scale\)",
        "of_logits",
        (_LOSS_IN_PARTS,),
    ),
    Mutation(
        "loss in parts: a tensor-parallel rank takes targets for columns of its own",
        "core.tensor_parallel.linear_cross_entropy._LinearCrossEntropy.backward",
        r"local = target - .*",
        "local = target",
        (f"{_LOSS_IN_PARTS}::test_two_ranks_share_the_vocabulary",),
    ),
    Mutation(
        "loss in parts: a rank normalises by its own vocabulary",
        "core.tensor_parallel.linear_cross_entropy._LinearCrossEntropy.forward",
        r"torch\.logsumexp\(everyone\[:, 0\], dim=0\)",
        "mine[0, 0]",
        (f"{_LOSS_IN_PARTS}::test_two_ranks_share_the_vocabulary",),
    ),
    Mutation(
        "loss in parts: the largest logit is left in the exponent",
        "core.tensor_parallel.linear_cross_entropy._LinearCrossEntropy.forward",
        r"logits\.amax\(dim=1\)",
        "torch.zeros_like(logits[:, 0])",
        (_LOSS_IN_PARTS,),
    ),
    Mutation(
        "loss in parts: the gradient of the input is that of the last part",
        "core.tensor_parallel.linear_cross_entropy._add_product",
        r"total\.addmm_\(left, right\)",
        "torch.mm(left, right, out=total)",
        (_LOSS_IN_PARTS,),
    ),
    Mutation(
        "positions of a context-parallel rank count from zero",
        "core.transformer.context_parallel.own_positions",
        "return .*",
        "return torch.arange(length, device=device)",
        ("tests/unit/transformer/test_context_parallel.py", _LAYOUTS),
    ),
    Mutation(
        "document starts are not split as tokens are",
        "core.training.train_step._own_chunks",
        r"own_chunks\(tensor\)",
        "own_chunks(tensor if name != 'document_starts' else tensor.roll(1, 0))",
        (_CUT_STEP,),
    ),
    Mutation(
        "each context-parallel rank divides by its own number of tokens",
        "core.training.train_step._tokens_a_rank",
        r" / parallel_state\.get_context_parallel_world_size\(\)",
        "",
        (_CUT_STEP,),
    ),
    Mutation(
        "a batch is used before its copy to the GPU is complete",
        "core.training.device_batches._Recorded.wait",
        r"computing\.wait_event\(.*\)",
        "pass",
        ("tests/unit/training/test_device_batches.py",),
    ),
    Mutation(
        "a batch's memory on the GPU is reused while the step reads it",
        "core.training.device_batches._Recorded.wait",
        r"tensor\.record_stream\(computing\)",
        "pass",
        ("tests/unit/training/test_device_batches.py",),
    ),
    Mutation(
        "context-parallel ranks read different samples",
        "core.training.data._loader",
        r"get_data_parallel_rank\(\)",
        "get_data_parallel_rank(with_context_parallel=True)",
        ("tests/unit/training/test_data.py::test_ranks_of_one_model_read_the_same_whole_sequences",),
    ),
    Mutation(
        "keys and values get no gradient from queries of other ranks",
        "core.transformer.context_parallel._PiecewiseAttention.backward",
        r"(?<= total\.add_\()part",
        "part, alpha=0",
        ("tests/unit/transformer/test_context_parallel.py",),
    ),
    Mutation(
        "documents are joined at the edge of a chunk",
        "core.transformer.document_masks.document_pieces",
        r"slice\(begin, ",
        "slice(0, ",
        ("tests/unit/transformer/test_document_masks.py",),
    ),
    Mutation(
        "attention drops the same weights on every tensor-parallel rank",
        "core.transformer.dot_product_attention.DotProductAttention.forward",
        r"with get_rng_tracker\(\)\.fork\(\)",
        "with nullcontext()",
        ("tests/unit/transformer/test_dropout.py",),
    ),
    Mutation(
        "RMSNorm forgets its weight",
        "core.transformer.norms.RMSNorm.forward",
        r"self\.weight, self\.eps\)$",
        "self.weight.detach(), self.eps)",
        ("tests/unit/transformer/test_norms.py",),
    ),
    # ---- checkpoints and data
    Mutation(
        "a column-parallel weight is seen as cut along its rows",
        "core.dist_checkpointing.views.global_view._layout",
        r"Shard\(dim\)",
        "Shard(0)",
        ("tests/unit/dist_checkpointing/views/test_global_view.py",),
    ),
    Mutation(
        "the last elements of a flat range are in no box",
        "core.dist_checkpointing.views.flat_range.boxes_of_range",
        r"last, 0, taken\)",
        "last, 0, taken - 1)",
        ("tests/unit/dist_checkpointing/views/test_flat_range.py",),
    ),
    Mutation(
        "a rank's range of optimizer state begins one element early",
        "core.optimizer.distrib_optimizer.MainRange.whole",
        r"self\.start",
        "max(self.start - 1, 0)",
        _SHARDED,
    ),
    Mutation(
        "a resumed run begins with the first sample again",
        "core.datasets.data_samplers.PretrainingSampler.__iter__",
        r"self\.consumed_samples \+ ",
        "",
        ("tests/unit/datasets/test_data_samplers.py",),
    ),
)
