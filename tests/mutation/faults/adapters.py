"""Faults of `core.adapters`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

TRL = "tests/unit/adapters/accelerate/test_trl.py"
SHARDED_AT_LOAD = ("tests/unit/adapters/accelerate/test_sharded_at_load.py",)

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
)
