"""Faults of `core.rendezvous`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a rank that failed to join a group names its next groups as its second ones",
        "core.rendezvous.default_group.init_process_group",
        r"    _reset_group_names\(\)",
        "    pass",
        ("tests/unit/rendezvous/test_default_group.py::test_a_failed_attempt_to_join_leaves_the_names_of_groups",),
    ),
)
