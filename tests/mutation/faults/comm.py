"""Faults of `core.comm`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation
from tests.mutation.suites import CONTRACT, DDP

_COLLECTIVES = "tests/unit/comm/test_collectives.py"

MUTATIONS = (
    Mutation(
        "what is reduced replaces the micro-batches before it",
        "core.comm.sums.store",
        r"\.add_\(result, alpha=scale\)",
        ".copy_(result * scale)",
        (_COLLECTIVES, DDP, CONTRACT),
    ),
    Mutation(
        "a sum that is added is not scaled",
        "core.comm.sums.store",
        ", alpha=scale",
        "",
        (_COLLECTIVES, DDP),
    ),
    Mutation(
        "a collective that is enqueued counts as over",
        "core.comm.call.Collective.is_over",
        r"self\.event\.query\(\)",
        "True",
        ("tests/unit/comm/test_host_read.py",),
    ),
)
