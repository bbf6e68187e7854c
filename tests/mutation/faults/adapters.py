"""Faults of `core.adapters`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

TRL = "tests/unit/adapters/accelerate/test_trl.py"
SHARDED_AT_LOAD = ("tests/unit/adapters/accelerate/test_sharded_at_load.py",)
VERL, ENGINE = "tests/unit/adapters/verl", "core.adapters.verl.engine.ShardstackEngine"
TRAINS = f"{VERL}/test_engine.py::test_losses_and_weights_are_those_of_one_process"
ROUTING = "core.adapters.verl.routing.RoutedSteps"

MUTATIONS = (
    Mutation(
        "TRL sends the weights of its first walk again",
        "core.adapters.accelerate.trl.SendsWholeWeights._iter_named_params",
        r"walk = (.*)$",
        r"walk = vars(self).setdefault('walk', [(n, t.clone()) for n, t in \1])",
        (f"{TRL}::test_vllm_gets_whole_weights_of_the_last_step",),
    ),
    Mutation(
        "one rank's walk for TRL has another order",
        "core.adapters.accelerate.trl.SendsWholeWeights._iter_named_params",
        r"in walk",
        "in (walk if self.accelerator.is_main_process else reversed([*walk]))",
        (f"{TRL}::test_vllm_gets_whole_weights_of_the_last_step",),
    ),
    Mutation(
        "TRL's walk reads a wrapped model as a plain one",
        "core.adapters.accelerate.trl.whole_parameters",
        r"wrappers\[-1\] if wrappers else model",
        "model",
        (f"{TRL}::test_what_cannot_be_sent_raises_on_every_rank",),
    ),
    Mutation(
        "TRL announces weights that cannot be sent",
        "core.adapters.accelerate.trl.whole_parameters",
        r"stream\.check_between_steps\(\)",
        "pass",
        (f"{TRL}::test_what_cannot_be_sent_raises_on_every_rank",),
    ),
    Mutation(
        "TRL's walk gathers the model at once",
        "core.adapters.accelerate.trl.whole_parameters",
        r"in stream if",
        "in [*stream] if",
        (f"{TRL}::test_a_walk_takes_a_bucket_of_whole_tensors",),
    ),
    Mutation(
        "a reference model moves by the share that it keeps",
        "core.adapters.accelerate.trl.SyncsWholeWeights.sync_target_model",
        r"mul_\(1\.0 - alpha\)\.add_\(tensor, alpha=alpha\)",
        "mul_(alpha).add_(tensor, alpha=1.0 - alpha)",
        (f"{TRL}::test_a_trainer_computes_as_stock_in_one_process",),
    ),
    Mutation(
        "a tied tensor of uneven rows is taken as it was sharded at load",
        "core.adapters.accelerate.sharded_at_load.use_own_checkpoints",
        r"% sizes\.fsdp_size:",
        "% 1:",
        SHARDED_AT_LOAD,
    ),
    Mutation(
        "a model sharded at load resumes without its moments",
        "core.adapters.accelerate.sharded_at_load.TrainedByTorch.state_tensors",
        r"if isinstance\(value, Tensor\)",
        "if name.endswith('.step')",
        SHARDED_AT_LOAD,
    ),
    Mutation(
        "means over the tokens of all ranks are added up and not averaged",
        "core.adapters.bridge.trained.Trained.finish_sums",
        r"1\.0 / ranks",
        "1.0",
        (TRAINS,),
    ),
    Mutation(
        "verl's engine reduces gradients in every micro-batch",
        f"{ENGINE}._gradient_sync_context",
        r"nullcontext\(\) if is_last_micro_batch else self\.module\.no_sync\(\)",
        "nullcontext()",
        (TRAINS,),
    ),
    Mutation(
        "verl's engine measures the norm and does not clip",
        f"{ENGINE}.optimizer_step",
        r"math\.inf if limit is None else limit",
        "math.inf",
        (TRAINS,),
    ),
    Mutation(
        "an engine of verl that only runs forward keeps gradients",
        f"{ENGINE}._build_fsdp_module",
        r"module\.requires_grad_\(False\)",
        "pass",
        (f"{VERL}/test_engine.py::test_an_engine_of_forward_alone_infers_the_same",),
    ),
    Mutation(
        "what verl's engine wakes for a phase stays awake",
        f"{ENGINE}._awake",
        r"wakes=False",
        "wakes=True",
        (f"{VERL}/test_sleep.py",),
    ),
    Mutation(
        "verl's engine wakes the optimizer to run forward",
        f"{ENGINE}.eval_mode",
        r"self\._offloaded & \{'model'\}",
        "self._offloaded",
        (f"{VERL}/test_sleep.py",),
    ),
    Mutation(
        "deltas for verl are those of the weights of the first export",
        f"{ENGINE}.get_per_tensor_param_shard",
        r"shards\(self\.module\)",
        "iter(vars(self).setdefault('_kept', [*shards(self.module)]))",
        (f"{VERL}/test_exports.py::test_whole_tensors_shards_and_deltas_have_equal_bits",),
    ),
    Mutation(
        "shards for verl all begin where their tensor does",
        "core.adapters.verl.exports.shards",
        r"offset \* stride",
        "0",
        (f"{VERL}/test_exports.py::test_whole_tensors_shards_and_deltas_have_equal_bits",),
    ),
    Mutation(
        "changes of shards are not gathered for verl's server",
        "core.adapters.verl.exports.shards",
        r"spec\.gather_group = groups\.shard",
        "pass",
        (f"{VERL}/test_exports.py::test_whole_tensors_shards_and_deltas_have_equal_bits",),
    ),
    Mutation(
        "a change of an expert has its place among all experts",
        "core.adapters.verl.exports.delta_entry",
        r"flat - starts\[slot_of\]",
        "flat",
        (f"{VERL}/test_exports.py::test_stacked_experts_go_out_one_by_one",),
    ),
    Mutation(
        "the first element of an expert belongs to the one before",
        "core.adapters.verl.exports.delta_entry",
        r"right=True",
        "right=False",
        (f"{VERL}/test_exports.py::test_stacked_experts_go_out_one_by_one",),
    ),
    Mutation(
        "a run of verl resumes with the first learning rate",
        "core.adapters.verl.checkpoints.ShardstackCheckpointManager.load_checkpoint",
        r"self\.lr_scheduler\.load_state_dict\(contents\['lr_scheduler'\]\)",
        "pass",
        (f"{VERL}/test_checkpoints.py::test_a_run_continues_under_other_strategies_and_ranks",),
    ),
    Mutation(
        "a batch of verl records experts and replays none",
        f"{ROUTING}.forward_step",
        r"if routes is not None:",
        "if False:",
        (f"{VERL}/test_routing.py",),
    ),
    Mutation(
        "tokens whose experts are not known replay what verl fills up with",
        f"{ROUTING}._rows",
        r"routes\.masked_fill\(is_unknown, -1\)",
        "routes",
        (f"{VERL}/test_routing.py::test_what_a_server_chose_is_taken",),
    ),
    Mutation(
        "routers replay the rows of the first layers, dense ones too",
        f"{ROUTING}._rows",
        r"routes\[:, \[.*?\]\]",
        "routes[:, :len(routers)]",
        (f"{VERL}/test_routing.py::test_layers_without_experts_are_left_out",),
    ),
    Mutation(
        "each rank of Ulysses replays the first part of a sequence",
        f"{ROUTING}._rows",
        r"slice_input_tensor\(rows, dim=0, padding=False\)",
        "rows[: len(rows) // self.ulysses_sequence_parallel_size]",
        (f"{VERL}/test_routing.py::test_split_sequences_are_recorded_and_replayed",),
    ),
    Mutation(
        "experts are recorded with those of padding",
        f"{ROUTING}._padding",
        r"to_bucket \+ -\(tokens \+ to_bucket\) % self\.ulysses_sequence_parallel_size",
        "-tokens % self.ulysses_sequence_parallel_size",
        (f"{VERL}/test_routing.py::test_a_step_that_replays_itself_has_its_own_bits",),
    ),
)
