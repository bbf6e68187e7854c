"""Faults of `core.base.micro_batch_tree`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "sums of a global batch wait for its end, and are added there",
        "core.base.micro_batch_tree.MicroBatchTree.additions",
        r"return \(~.*",
        "return 0",
        ("tests/unit/base/test_micro_batch_tree.py",),
    ),
)
