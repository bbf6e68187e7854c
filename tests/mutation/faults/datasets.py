"""Faults of `core.datasets`."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

MUTATIONS = (
    Mutation(
        "ranks read the micro-batches of a global batch in another order than they add them",
        "core.datasets.data_samplers.PretrainingSampler._place",
        r"if self\.tree is None:",
        "if True:",
        ("tests/functional/test_reproducible.py::test_a_run_on_two_then_four_then_one_rank_is_the_run_on_one",),
    ),
    Mutation(
        "a resumed run begins with the first sample again",
        "core.datasets.data_samplers.PretrainingSampler.__iter__",
        r"self\.consumed_samples \+ ",
        "",
        ("tests/unit/datasets/test_data_samplers.py",),
    ),
)
