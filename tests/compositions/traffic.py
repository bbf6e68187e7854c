"""Faults that change no number, or not always: a reduction too many, a wider one, parameters read too early."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from core.comm import collectives
from tests.compositions.composition import Composition
from tests.compositions.wrapped import Wrapped
from tests.unit.distributed._toys import recorded_collectives

Calls = Counter[tuple[str, int, int]]
"""Times by kind, bytes and ranks."""


GATHER_S = 0.004


@contextmanager
def gathering_slowly() -> Iterator[None]:
    """Delays gathers, so that code that does not wait for one reads old parameters."""
    all_gather = collectives.all_gather

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(GATHER_S)
        all_gather(*args, **options)

    with mock.patch.object(collectives, "all_gather", slow):
        yield


@contextmanager
def reductions_as_planned(training: Wrapped) -> Iterator[None]:
    """Counts the reductions of a step.

    Raises:
        AssertionError: they are not those of the plan.
    """
    with recorded_collectives("the gradients of") as recorded:
        yield
    counted = Counter(
        (kind, size, ranks)
        for kind, _, size, ranks in recorded
        if kind != "all-gather"  # as whole ones are, after their reduction
    )
    planned = _planned(training)
    if planned is not None:
        assert counted == planned, f"reductions in a step are {dict(counted)}, and {dict(planned)} in the plan"


def _planned(training: Wrapped) -> Calls | None:
    """Returns the planned reductions; None where a layer is frozen now, or a unit of FSDP2 runs twice."""
    part = training.part
    if part.trained == "a layer at times" or part.runs_units_twice:
        return None
    planned: Calls = Counter()
    backwards = training.number if part.forwards == "one by one" else training.number // 2
    for model in training.models:
        if part.is_fsdp2:
            policy = model.plan.root.precision
            planned_dtype = policy.reduce_dtype or policy.param_dtype or torch.float32
            assert planned_dtype == _reduce_dtype(part), f"the plan reduces in {planned_dtype}"
        for unit in model.plan.units:
            for entry in model.plan.traffic(backwards, unit):
                # torch sums shards over the replicas of a hybrid by itself, unrecorded.
                is_recorded = not part.is_fsdp2 or unit.kind == "replicated"
                if entry.kind == "reduce-scatter" or (entry.kind == "all-reduce" and is_recorded):
                    planned[entry.kind, entry.nbytes, entry.ranks] += entry.calls
    return planned


def _reduce_dtype(part: Composition) -> torch.dtype:
    """Returns the dtype that FSDP2 was asked to reduce in."""
    if part.precision == "fp32" or part.policy in ("reduce in fp32", "by dtypes"):
        return torch.float32
    return torch.bfloat16 if part.precision == "bf16" else torch.float16
