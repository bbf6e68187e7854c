"""Faults of `core.dist_checkpointing`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import PROGRAMS_ON_STREAMS

_COPIES = "tests/unit/dist_checkpointing/test_host_copies.py"

MUTATIONS = (
    Mutation(
        "a column-parallel weight is seen as cut along its rows",
        "core.dist_checkpointing.global_view._outer_placement",
        r"Shard\(_partition_dim\(param\)\)",
        "Shard(0)",
        ("tests/unit/dist_checkpointing/test_global_view.py",),
    ),
    Mutation(
        "experts: each rank's are seen as all of a layer",
        "core.dist_checkpointing.global_view._outer_placement",
        r"return Shard\(0\)",
        "return Replicate()",
        ("tests/functional/test_expert_parallelism.py::test_initial_values_are_the_same_over_any_ranks",),
    ),
    Mutation(
        "the last elements of a flat range are in no box",
        "core.dist_checkpointing.global_view.boxes_of_range",
        r"last, 0, end_in_row\)",
        "last, 0, end_in_row - 1)",
        ("tests/unit/dist_checkpointing/test_global_view.py",),
    ),
    Mutation(
        "the first rows of a stored piece are read in the place of those that a rank holds",
        "core.dist_checkpointing.global_view.overlap",
        r"slice\(start - b, stop - b\)",
        "slice(0, stop - start)",
        ("tests/unit/dist_checkpointing/test_loading.py",),
    ),
    Mutation(
        "a gathered tensor has the first rank's piece in the place of every rank's",
        "core.dist_checkpointing.gathering.plan_transfers",
        r"receiver if receiver in replicas",
        "receiver if replicas",
        ("tests/unit/weights/test_stream.py",),
    ),
    Mutation(
        "buckets hold more than their limit",
        "core.dist_checkpointing.gathering.in_buckets",
        r"size > room",
        "room < 0",
        ("tests/unit/dist_checkpointing/test_gathering.py",),
    ),
    # ---- streams
    Mutation(
        "streams: a checkpoint is written before it is copied",
        "core.dist_checkpointing.saving.HostStaging.copy",
        r"streams\.current_stream\(\)\.synchronize\(\)",
        "pass",
        (f"{PROGRAMS_ON_STREAMS}a_checkpoint_is_staged_while_training_goes_on",),
    ),
    # ---- copies in memory
    Mutation(
        "copies: a partner is on the machine that it stands in for",
        "core.dist_checkpointing.host_copies.partners",
        r"\(machines\.index\(node\) \+ 1\)",
        "machines.index(node)",
        (f"{_COPIES}::test_a_partner_is_on_another_machine",),
    ),
    Mutation(
        "copies: what every machine holds is sent too",
        "core.dist_checkpointing.host_copies.spread_over_nodes",
        r"len\(machines\) == len\(set\(nodes\)\) > 1",
        "False",
        (f"{_COPIES}::test_only_what_one_machine_holds_is_sent",),
    ),
    Mutation(
        "copies: both are of the last step",
        "core.dist_checkpointing.host_copies.HostCopies.wait",
        r"1 - self\._next",
        "self._next",
        (f"{_COPIES}::test_either_machine_may_be_lost",),
    ),
    Mutation(
        "copies: a damaged file is read",
        "core.dist_checkpointing.copy_files._has_sum",
        r"\) == expected",
        ") is not None",
        (f"{_COPIES}::test_either_machine_may_be_lost",),
    ),
    Mutation(
        "copies: a version counts of which a part is lost",
        "core.dist_checkpointing.host_copies._complete_versions",
        r"all\(\(\(version, file, step\)",
        "any(((version, file, step)",
        (f"{_COPIES}::test_either_machine_may_be_lost",),
    ),
    Mutation(
        "copies: the next one overwrites the one before though the last is not complete",
        "core.dist_checkpointing.host_copies.HostCopies.wait",
        r"if is_complete:",
        "if True:",
        (f"{_COPIES}::test_a_full_memory_skips_copies_and_keeps_the_one_before",),
    ),
    Mutation(
        "copies: a mark that a stranger wrote is believed",
        "core.dist_checkpointing.copy_files.decode_mark",
        r"not is_signed\(",
        "False and is_signed(",
        ("tests/unit/dist_checkpointing/test_copy_files.py::test_a_mark_is_of_its_place_and_job",),
    ),
    Mutation(
        "hooks that run before a load are left out",
        "core.dist_checkpointing.model_state._run_hooks_before",
        r"hook\(values, .*?\*arguments\)",
        "pass",
        ("tests/unit/dist_checkpointing/test_model_state.py::test_load_hooks_run_on_a_plain_module",),
    ),
    Mutation(
        "hooks that run after a load are left out",
        "core.dist_checkpointing.model_state._run_hooks_after",
        r"hook\(module, keys\)",
        "pass",
        ("tests/unit/dist_checkpointing/test_model_state.py::test_load_hooks_run_on_a_plain_module",),
    ),
    Mutation(
        "an optimizer does not learn that a checkpoint has filled its tensors",
        "core.dist_checkpointing.loading.note_loaded",
        r"call\(\)",
        "pass",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_tensors_without_scalars_are_refused_at_the_step",),
    ),
    Mutation(
        "the random streams of other ranks go on",
        "core.dist_checkpointing.run_state.own_streams",
        r"\(saved\['layout'\], saved\['rng_bytes'\]\) != \(rank_layout\(\), streams\.numel\(\)\)",
        "saved['rng_bytes'] != streams.numel()",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_random_streams_go_on_on_as_many_ranks",),
    ),
    Mutation(
        "the schedule of another optimizer is saved",
        "core.dist_checkpointing.run_state.RunState._check_parts",
        r"scheduled is not None and scheduled not in",
        "False and scheduled not in",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_parts_of_another_training_are_refused",),
    ),
    Mutation(
        "what ranks add to a checkpoint may differ",
        "core.dist_checkpointing.run_state.save_training",
        r"if text != texts\[0\]",
        "if False",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_what_a_loop_adds_comes_back",),
    ),
    Mutation(
        "weights that are not finite are loaded",
        "core.dist_checkpointing.run_state.load_training",
        r"saved\.get\(FINITE\) is False",
        "False",
        ("tests/unit/dist_checkpointing/test_run_state.py::test_weights_that_are_not_finite_are_refused",),
    ),
)
