"""Faults of `core.dist_checkpointing`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import PROGRAMS_ON_STREAMS

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
        "core.dist_checkpointing.flat_range.boxes_of_range",
        r"last, 0, taken\)",
        "last, 0, taken - 1)",
        ("tests/unit/dist_checkpointing/test_flat_range.py",),
    ),
    Mutation(
        "the first rows of a stored piece are read in the place of those that a rank holds",
        "core.dist_checkpointing.flat_range.overlap",
        r"slice\(start - b, stop - b\)",
        "slice(0, stop - start)",
        ("tests/unit/dist_checkpointing/test_serialization.py",),
    ),
    Mutation(
        "a gathered tensor has the first rank's piece in the place of every rank's",
        "core.dist_checkpointing.gathering.move",
        r"receiver if receiver in replicas",
        "receiver if replicas",
        ("tests/unit/weights/test_stream.py",),
    ),
    Mutation(
        "buckets hold more than their limit",
        "core.dist_checkpointing.flat_range.in_buckets",
        r"size > room",
        "room < 0",
        ("tests/unit/weights/test_stream.py",),
    ),
    # ---- streams
    Mutation(
        "streams: a checkpoint is written before it is copied",
        "core.dist_checkpointing.async_save.HostStaging.copy",
        r"streams\.current_stream\(\)\.synchronize\(\)",
        "pass",
        (f"{PROGRAMS_ON_STREAMS}a_checkpoint_is_staged_while_training_goes_on",),
    ),
)
