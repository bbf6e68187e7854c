"""Faults of `core.training`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import PROGRAMS_ON_STREAMS, REPRODUCIBLE

_CUT_STEP = "tests/unit/training/test_train_step.py::test_a_step_over_cut_sequences_is_the_step_of_one_process"

MUTATIONS = (
    Mutation(
        "dropout depends on a micro-batch's place on its rank, not in the global batch",
        "core.training.train_step.train_step",
        r"seeds\.enter\(.*\)",
        "seeds.enter(i)",
        (f"{REPRODUCIBLE}[8 micro-batches-ddp-4]",),
    ),
    Mutation(
        "the schedule moves on in a step that was skipped",
        "core.training.train_step.RunningStep._conclude",
        r"if outcome\.has_update:",
        "if True:",
        ("tests/unit/training/test_train_step.py",),
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
        "core.training.data.SideStream.start",
        r"computing\.wait_event\(.*\)",
        "pass",
        ("tests/unit/training/test_data.py",),
    ),
    Mutation(
        "a batch's memory on the GPU is reused while the step reads it",
        "core.training.data.SideStream.start",
        r"streams\.used_on\(tensor, computing\)",
        "pass",
        ("tests/unit/training/test_data.py",),
    ),
    Mutation(
        "context-parallel ranks read different samples",
        "core.training.data.open_batches",
        r"get_data_parallel_rank\(\)",
        "get_data_parallel_rank(with_context_parallel=True)",
        ("tests/unit/training/test_data.py::test_ranks_of_one_model_read_the_same_whole_sequences",),
    ),
    # ---- streams
    Mutation(
        "streams: a batch is used before it is copied",
        "core.training.data.SideStream.start",
        r"computing\.wait_event\(event\)",
        "pass",
        (f"{PROGRAMS_ON_STREAMS}batches_are_copied_on_a_side_stream",),
    ),
    Mutation(
        "a rank counts as hanging that itself waits for another one",
        "core.training.launch.supervisor.behind",
        r"is_behind and \(?not any\(\(waits for _, waits in position\.values\(\)\)\)\)?",
        "is_behind",
        ("tests/unit/training/launch/test_supervisor.py::test_ranks_that_others_wait_for_are_found",),
    ),
    Mutation(
        "two launchers of one machine are taken for two machines",
        "core.training.launch.joining.Joining._refusal",
        r"name == hello\.machine and other != number",
        "False",
        ("tests/unit/training/launch/test_nodes.py",),
    ),
)
