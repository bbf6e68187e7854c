"""The faults: in each a line of `core` becomes another, and the tests that have to notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    name: str
    file: str
    old: str
    """What stands there, exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files or single tests, of which at least one has to fail."""


_DDP = "tests/unit/distributed/test_distributed_data_parallel.py"
_CONTRACT = "tests/unit/distributed/test_data_parallel_base.py"
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
_LAYOUTS = "tests/functional/test_equality_over_layouts.py"
_CUT_STEP = "tests/unit/training/test_train_step.py::test_a_step_over_cut_sequences_is_the_step_of_one_process"

_OUTSIDE = (
    "tests/unit/distributed/test_outside_the_loop.py::test_what_works_on_a_plain_module_gives_that_result_or_raises"
)

MUTATIONS = (
    # ---- outside the loop that is prescribed
    Mutation(
        "parameters that are being gathered are read at once",
        "core/distributed/buffers/bucket_group.py",
        "            make_pending(bucket.params, self.finish_param_sync)\n",
        "",
        (f"{_OUTSIDE}[an_average_of_weights_is_kept_by_references-zero1_overlap]",),
    ),
    Mutation(
        "masters keep what was loaded over",
        "core/optimizer/written_params.py",
        "            if is_written:",
        "            if is_written and p.main.ndim > 2:",
        (f"{_OUTSIDE}[weights_are_loaded_under_low_precision-ddp]",),
    ),
    Mutation(
        "a frozen parameter is updated with zeros",
        "core/distributed/buffers/bucket.py",
        "        return param.requires_grad or self._slots[param].has_arrived",
        "        return True",
        (f"{_OUTSIDE}[frozen_parameters_do_not_decay-zero1]",),
    ),
    Mutation(
        "gathered parameters survive a step",
        "core/distributed/fsdp2/sharded_model.py",
        "        if self._values.are_stale():\n",
        "        if self._values.are_stale() and not self._has_allocated:\n",
        ("tests/unit/distributed/fsdp2/test_sharded_model.py",),
    ),
    Mutation(
        "a backward that raised is forgotten",
        "core/distributed/fsdp2/sharded_model.py",
        "            self._has_failed = True\n",
        "",
        (f"{_OUTSIDE}[a_step_goes_on_after_a_backward_that_raised_and_is_made_again-fsdp2]",),
    ),
    Mutation(
        "a step without gradients of all ranks is let through",
        "core/distributed/gradient_state.py",
        "        if not self.is_reduced:\n",
        "        if not self.is_reduced and self.phase is Phase.ZEROED:\n",
        (f"{_OUTSIDE}[a_step_without_finalizing-zero2]",),
    ),
    # ---- wrappers
    Mutation(
        "gradients are summed and not averaged",
        "core/distributed/buffers/reduction.py",
        "scale = 1.0 / self.group.size()",
        "scale = 1.0",
        (_DDP,),
    ),
    Mutation(
        "the first bucket is not reduced",
        "core/distributed/buffers/bucket_group.py",
        "        else:\n            self._lane.run(run)\n",
        "        elif self.bucket.offset:\n            self._lane.run(run)\n",
        (_DDP, _CONTRACT),
    ),
    Mutation(
        "only the first bucket's parameters are gathered",
        "core/distributed/buffers/bucket_group.py",
        "        else:\n            self._lane.run(gather)\n",
        "        elif not bucket.offset:\n            self._lane.run(gather)\n",
        (_DDP, _SHARDED[0], _EQUALITY),
    ),
    Mutation(
        "replicas of a hybrid are summed over the wrong group",
        "core/distributed/buffers/reduction.py",
        "reduce(part, self.replica_group, what=what)",
        "reduce(part, self.shard_group, what=what)",
        (_DDP, _CONTRACT, _EQUALITY),
    ),
    Mutation(
        "what is reduced replaces the micro-batches before it",
        "core/comm/sums.py",
        "        output.add_(result, alpha=scale)\n        return\n",
        "        output.copy_(result * scale)\n        return\n",
        (_COLLECTIVES, _DDP, _CONTRACT),
    ),
    Mutation(
        "a sum that is added is not scaled",
        "core/comm/sums.py",
        "output.add_(result, alpha=scale)",
        "output.add_(result)",
        (_COLLECTIVES, _DDP),
    ),
    Mutation(
        "the first gradient is not scaled",
        "core/distributed/torch_fully_sharded_data_parallel.py",
        "torch._foreach_mul_(gradients, scaling_factor)",
        "torch._foreach_mul_(gradients[1:], scaling_factor)",
        (_CONTRACT, _FSDP2),
    ),
    Mutation(
        "FSDP2 reduces every micro-batch",
        "core/distributed/fsdp2/sharded_model.py",
        "module.set_requires_gradient_sync(enabled, recurse=False)",
        "module.set_requires_gradient_sync(True, recurse=False)",
        (_CONTRACT, _FSDP2),
    ),
    Mutation(
        "FSDP2 keeps gradients from step to step",
        "core/distributed/torch_fully_sharded_data_parallel.py",
        "            parameter.grad = None\n",
        "            pass\n",
        (_CONTRACT, _FSDP2),
    ),
    Mutation(
        "an inner no_sync ends the outer one",
        "core/distributed/data_parallel_base.py",
        "            self._set_gradient_sync(before)\n",
        "            self._set_gradient_sync(True)\n",
        (_CONTRACT,),
    ),
    Mutation(
        "units that share a weight are not united",
        "core/distributed/plan/units.py",
        "    for holders in owners.values():\n",
        "    for holders in ():\n",
        _UNITS,
    ),
    Mutation(
        "the first tensor of replicas is not made equal",
        "core/distributed/model/initial_values.py",
        "broadcast_tensors(self._equalized, self._group)",
        "broadcast_tensors(self._equalized[1:], self._group)",
        (_STARTS, _CONTRACT),
    ),
    Mutation(
        "gradients are reduced in the dtype of computation, whatever was asked",
        "core/distributed/plan/precision.py",
        "MixedPrecisionPolicy(param_dtype, reduce_dtype or param_dtype,",
        "MixedPrecisionPolicy(param_dtype, param_dtype,",
        _PRECISION,
    ),
    Mutation(
        "each rank divides by its own number of tokens",
        "core/distributed/finalize_model_grads.py",
        "all_reduce_by_backend(total, group,",
        "all_reduce_by_backend(total.clone(), group,",
        (_FINALIZE, _CONTRACT),
    ),
    Mutation(
        "gradients of norms stay partial under sequence parallelism",
        "core/distributed/finalize_model_grads.py",
        "gradient.copy_(total.view_as(gradient))",
        "gradient.copy_(gradient.clone())",
        (_FINALIZE, _LAYOUTS),
    ),
    Mutation(
        "gradients of adapters stay partial under sequence parallelism",
        "core/transformer/lora.py",
        "sequence_parallel=config.sequence_parallel,",
        "sequence_parallel=False,",
        ("tests/unit/transformer/test_lora.py",),
    ),
    # ---- buffers
    Mutation(
        "a shard ends one element early",
        "core/distributed/buffers/bucket.py",
        "min(max(end - begin, 0), length)",
        "min(max(end - begin - 1, 0), length)",
        (_DDP, *_SHARDED),
    ),
    Mutation(
        "gradients of the step before are not cleared",
        "core/distributed/buffers/bucket.py",
        "            if not slot.is_empty:  # else",
        "            if slot.is_written_by_layer and not slot.is_empty:  # else",
        (_DDP, _CONTRACT),
    ),
    Mutation(
        "a gradient that has not arrived is what lay in memory",
        "core/distributed/buffers/bucket.py",
        "            if slot.is_empty:\n                view.zero_()\n                slot.is_empty = False\n",
        "            if slot.is_empty:\n                view.add_(1)\n                slot.is_empty = False\n",
        (_DDP, _CONTRACT),
    ),
    Mutation(
        "a parameter begins on the last element of the one before",
        "core/distributed/plan/layout.py",
        "begin = _round_up(start + begin, PARAM_ALIGNMENT) - start",
        "begin = max(begin - 1, 0)",
        ("tests/unit/distributed/plan/test_layout.py", _DDP),
    ),
    # ---- optimizer and norms
    Mutation(
        "the norm is that of one shard",
        "core/optimizer/clip_grads.py",
        "            for group in groups:\n                all_reduce_by_backend(",
        "            for group in groups[1:]:\n                all_reduce_by_backend(",
        (_NORM, _OPTIMIZER),
    ),
    Mutation(
        "the norm counts what tensor-parallel ranks hold alike on each of them",
        "core/optimizer/clip_grads.py",
        "counted = is_cut or tp_rank == 0",
        "counted = True",
        (_NORM,),
    ),
    Mutation(
        "the clip coefficient may raise a gradient",
        "core/optimizer/clip_grads.py",
        "return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0.0 else 1.0",
        "return max_norm / (norm + 1e-6) if max_norm > 0.0 else 1.0",
        (_NORM, _OPTIMIZER),
    ),
    Mutation(
        "the loss scale is not taken out of gradients",
        "core/optimizer/optimizer.py",
        "factor = clip_coefficient(norm, self.config.clip_grad) / scale",
        "factor = clip_coefficient(norm, self.config.clip_grad)",
        (_OPTIMIZER,),
    ),
    Mutation(
        "the first master is not written back",
        "core/optimizer/optimizer.py",
        '        """Brings what was updated, or loaded, into the model\'s parameters."""\n'
        "        refresh_parameters(self._params)\n",
        '        """Brings what was updated, or loaded, into the model\'s parameters."""\n'
        "        refresh_parameters(self._params[1:])\n",
        (_OPTIMIZER,),
    ),
    Mutation(
        "an overflow does not skip the step",
        "core/optimizer/optimizer.py",
        "overflow = not math.isfinite(norm)",
        "overflow = False",
        (_OPTIMIZER,),
    ),
    Mutation(
        "Adam's bias is corrected for one step more",
        "core/optimizer/update_rules.py",
        "partial(_adamw, group, count)",
        "partial(_adamw, group, count + 1)",
        (_RULES,),
    ),
    Mutation(
        "momentum is dampened",
        "core/optimizer/update_rules.py",
        "dampening=0.0",
        "dampening=0.1",
        (_RULES,),
    ),
    Mutation(
        "the loss scale grows one step late",
        "core/optimizer/grad_scaler.py",
        "if self._finite_steps == self.growth_interval:",
        "if self._finite_steps == self.growth_interval + 1:",
        (_SCALER,),
    ),
    Mutation(
        "warm-up is one step ahead",
        "core/optimizer/optimizer_param_scheduler.py",
        "(max_lr - self.init_lr) * self.num_steps / self.lr_warmup_steps",
        "(max_lr - self.init_lr) * (self.num_steps + 1) / self.lr_warmup_steps",
        (_SCHEDULE,),
    ),
    Mutation(
        "the schedule moves on in a step that was skipped",
        "core/training/train_step.py",
        "        if updated:\n            scheduler.step(1)\n",
        "        scheduler.step(1)\n",
        ("tests/unit/training/test_train_step.py",),
    ),
    # ---- layers
    Mutation(
        "a column-parallel layer's input keeps this rank's gradient",
        "core/tensor_parallel/column_linear.py",
        "adding = dist.all_reduce(grad_input, group=ctx.group, async_op=True)",
        "adding = None",
        ("tests/unit/tensor_parallel/test_layers.py",),
    ),
    Mutation(
        "the backward of entering a parallel region adds nothing",
        "core/tensor_parallel/mappings.py",
        "return reduce_from_tensor_model_parallel_region(grad, ctx.group), None",
        "return grad, None",
        ("tests/unit/tensor_parallel/test_mappings.py",),
    ),
    Mutation(
        "targets are looked up in the first rank's vocabulary",
        "core/tensor_parallel/cross_entropy.py",
        "local = target - group_rank(group) * vocab",
        "local = target - 0 * vocab",
        ("tests/unit/tensor_parallel/test_cross_entropy.py",),
    ),
    Mutation(
        "positions of a context-parallel rank count from zero",
        "core/transformer/context_parallel.py",
        "return own_chunks(torch.arange(length * size, device=device), 0)",
        "return torch.arange(length, device=device)",
        ("tests/unit/transformer/test_context_parallel.py", _LAYOUTS),
    ),
    Mutation(
        "where documents begin is not cut as tokens are",
        "core/training/train_step.py",
        "return {name: own_chunks(tensor).to(",
        "return {name: own_chunks(tensor if name != 'document_starts' else tensor.roll(1, 0)).to(",
        (_CUT_STEP,),
    ),
    Mutation(
        "each context-parallel rank weighs its tokens by their own number",
        "core/training/train_step.py",
        ".clamp(min=1) / parallel_state.get_context_parallel_world_size()",
        ".clamp(min=1)",
        (_CUT_STEP,),
    ),
    Mutation(
        "context-parallel ranks read different samples",
        "core/training/data.py",
        "data_parallel_rank=parallel_state.get_data_parallel_rank(),",
        "data_parallel_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),",
        ("tests/unit/training/test_data.py::test_ranks_of_one_model_read_the_same_whole_sequences",),
    ),
    Mutation(
        "keys and values get no gradient from other ranks' queries",
        "core/transformer/context_parallel.py",
        "            total.add_(part)\n        return grad_query",
        "            total.add_(part, alpha=0)\n        return grad_query",
        ("tests/unit/transformer/test_context_parallel.py",),
    ),
    Mutation(
        "documents are joined at the edge of a chunk",
        "core/transformer/document_masks.py",
        "before = slice(begin, max(begin, start))",
        "before = slice(0, max(begin, start))",
        ("tests/unit/transformer/test_document_masks.py",),
    ),
    Mutation(
        "attention drops the same weights on every tensor-parallel rank",
        "core/transformer/dot_product_attention.py",
        "            with get_rng_tracker().fork():\n                context",
        "            with nullcontext():\n                context",
        ("tests/unit/transformer/test_dropout.py",),
    ),
    Mutation(
        "RMSNorm forgets its weight",
        "core/transformer/norms.py",
        "return F.rms_norm(input_, self.size, self.weight, self.eps)",
        "return F.rms_norm(input_, self.size, self.weight.detach(), self.eps)",
        ("tests/unit/transformer/test_norms.py",),
    ),
    # ---- checkpoints and data
    Mutation(
        "a column-parallel weight is seen as cut along its rows",
        "core/dist_checkpointing/views/global_view.py",
        "        outer = Shard(dim)\n",
        "        outer = Shard(0)\n",
        ("tests/unit/dist_checkpointing/views/test_global_view.py",),
    ),
    Mutation(
        "the last elements of a flat range are in no box",
        "core/dist_checkpointing/views/flat_range.py",
        "        boxes += _inside_row(shape, last, 0, taken)\n",
        "        boxes += _inside_row(shape, last, 0, taken - 1)\n",
        ("tests/unit/dist_checkpointing/views/test_flat_range.py",),
    ),
    Mutation(
        "a rank's range of optimizer state is said to begin one element later",
        "core/optimizer/distrib_optimizer.py",
        "flat_range_view(self.param, state, self.start)",
        "flat_range_view(self.param, state, max(self.start - 1, 0))",
        _SHARDED,
    ),
    Mutation(
        "a resumed run begins with the first sample again",
        "core/datasets/data_samplers.py",
        "first = self.consumed_samples + slot * self.micro_batch_size",
        "first = slot * self.micro_batch_size",
        ("tests/unit/datasets/test_data_samplers.py",),
    ),
)
