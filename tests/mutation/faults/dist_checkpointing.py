"""Faults of `core.dist_checkpointing`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
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
)
