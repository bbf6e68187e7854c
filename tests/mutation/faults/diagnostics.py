"""Faults of `core.diagnostics`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "a rank that waits for a third one counts as waiting for this one",
        "core.diagnostics.out_of_step._has_begun_any",
        r"wait\[0\] not in own_calls or",
        "wait[0] in own_calls and",
        ("tests/unit/diagnostics/test_out_of_step.py::test_a_chain_of_waiting_ranks_is_waited_for",),
    ),
)
