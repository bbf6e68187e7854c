"""Faults of `core.base`."""

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
    Mutation(
        "a rank that failed to join a group names its next groups as its second ones",
        "core.base.device.init_process_group",
        r"    _reset_group_names\(\)",
        "    pass",
        ("tests/unit/base/test_device.py::test_a_failed_attempt_to_join_leaves_the_names_of_groups",),
    ),
    Mutation(
        "host memory is lent again while a view of it lives",
        "core.base.host_memory.LentMemory.take",
        r"part\[2\]\(\) is not None",
        "part[2] is None",
        ("tests/unit/base/test_host_memory.py::test_memory_is_lent_again_once_nothing_refers_to_it",),
    ),
)
