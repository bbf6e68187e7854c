"""Faults of `core.training`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import PROGRAMS_ON_STREAMS, REPRODUCIBLE

_CUT_STEP = "tests/unit/training/test_train_step.py::test_a_step_on_two_ranks_is_the_step_of_one_process"

LAUNCH = "tests/unit/training/launch/"

MUTATIONS = (
    Mutation(
        "dropout depends on a micro-batch's place on its rank, not in the global batch",
        "core.training.train_step._run_batches",
        r"seeds\.enter\(.*\)",
        "seeds.enter(next(numbers[index]))",
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
        "each rank prints its own traceback of the same crash",
        "core.training.launch.tracebacks._report",
        r"if before:",
        "if False:",
        (f"{LAUNCH}test_tracebacks.py::test_one_rank_prints_its_traceback_without_core",),
    ),
    Mutation(
        "two launchers of one machine are taken for two machines",
        "core.training.launch.joining.Joining._refusal",
        r"name == hello\.machine and other != number",
        "False",
        (f"{LAUNCH}test_nodes.py::test_launchers_that_do_not_belong_together_are_refused",),
    ),
    Mutation(
        "a rank that leaves with status 0 has done its work",
        "core.training.launch.supervisor.Worker.is_lost",
        r"self\.says_done and \(?not self\.is_done\)?",
        "False",
        (f"{LAUNCH}test_supervisor.py::test_a_rank_that_leaves_without_a_word_is_lost",),
    ),
    Mutation(
        "a machine whose launcher is frozen is waited for",
        "core.training.launch.lines.Connection.look_at_time",
        r"now - self\._heard_at > SILENCE_S",
        "False",
        (f"{LAUNCH}test_nodes.py::test_a_launcher_that_falls_silent_is_lost",),
    ),
    Mutation(
        "whoever answers in the place of the first launcher is believed",
        "core.training.launch.follower.Follower._take_answer",
        r"is_signed\(answer\.signature, secret, 'welcome', nonce\)",
        "True",
        (f"{LAUNCH}test_nodes.py::test_who_answers_in_the_place_of_the_first_runs_nothing",),
    ),
    Mutation(
        "whoever joins as a machine is believed",
        "core.training.launch.joining.Joining._join",
        r"not is_signed\(.*challenge\)\)",
        "False",
        (f"{LAUNCH}test_nodes.py::test_launchers_that_do_not_belong_together_are_refused",),
    ),
    Mutation(
        "a number that another process may have is killed",
        "core.training.launch.processes.LocalProcess.send_signal",
        r"self\._process\.returncode is None",
        "True",
        (f"{LAUNCH}test_processes.py::test_no_other_process_is_killed_for_one_that_is_gone",),
    ),
)
