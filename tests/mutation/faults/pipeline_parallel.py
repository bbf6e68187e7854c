"""Faults of pipeline stages."""

from __future__ import annotations

from tests.mutation.mutation import Mutation

_EQUALITY = ("tests/functional/test_equality_of_pipelines.py::test_pipeline_stages_equal_one_process",)

MUTATIONS = (
    Mutation(
        "pipelines: a stage reduces before its last micro-batch",
        "core.pipeline_parallel.stages._Chunk._note_backward",
        r"self\._backwards_left == 0",
        "self._backwards_left == 1",
        _EQUALITY,
    ),
    Mutation(
        "pipelines: weights' deferred gradients come after the reduction",
        "core.pipeline_parallel.stages._Chunk.backward",
        r"if self\._products is None:",
        "if True:",
        _EQUALITY,
    ),
    Mutation(
        "pipelines: tokens of the last micro-batch alone are counted",
        "core.pipeline_parallel.schedules.forward_backward",
        r"total_tokens = total_tokens \+ tokens",
        "total_tokens = tokens",
        _EQUALITY,
    ),
)
