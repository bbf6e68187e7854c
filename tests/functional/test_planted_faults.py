"""The comparisons of `test_equality_of_wrappers` can fail: a fault in `core` makes each of them fail.

A fault run is short and compared as its case is. Warm-up begins at zero, so the third step is the first to show what
the first got wrong in the weights. A rank that crashes is no AssertionError, and so no fault that was seen.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.functional._equality import FOUR_RANKS, SERIAL, TWO_RANKS, Case
from tests.functional._faults import DOUBLED, FAULTS, SKIPPED, STALE, run_with_fault
from tests.functional._runs import HYBRIDS, WRAPPERS
from tests.unit._spawn import run_distributed

FAULT_STEPS, FP16_FAULT_STEPS = 3, 5
"""In fp16 the first steps are skipped, until the loss scale fits."""
CASES = [*TWO_RANKS, *FOUR_RANKS, *SERIAL]

PLANTED: dict[str, dict[str, tuple[str, ...]]] = {
    "ddp": {"sgd, tied": ("skipped_bucket",), "sgd, untied": ("stale_replica",), "sgd, per token": ("own_tokens",)},
    "ddp, overlapped": {
        "adamw": ("skipped_bucket", "doubled_gradients", "stale_replica"),
        "sgd, untied": ("doubled_gradients",),
        "bf16": ("stale_low_precision",),
        "fp16": ("overflow_forgiven",),
        "per token": ("own_tokens",),
    },
    "zero1": {
        "adamw": ("skipped_bucket", "norm_of_one_shard", "gradients_off_by_a_millionth"),
        "sgd, untied": ("stale_parameter",),
        "bf16": ("skipped_bucket",),
        "fp16": ("doubled_gradients",),
        "per token": ("skipped_bucket",),
    },
    "zero1, overlapped": {
        "adamw": ("skipped_bucket", "doubled_gradients", "stale_parameter"),
        "sgd, untied": ("clip_of_its_own",),
        "bf16": ("stale_low_precision",),
        "fp16": ("overflow_forgiven",),
        "per token": ("own_tokens",),
    },
    "zero2": {
        "adamw": ("skipped_bucket", "doubled_gradients", "stale_parameter"),
        "sgd, untied": ("skipped_bucket",),
        "bf16": ("doubled_gradients",),
        "fp16": ("stale_parameter",),
        "per token": ("skipped_bucket",),
        "sgd, tied": ("stale_parameter",),
        "sgd, per token": ("own_tokens",),
    },
    "zero2, overlapped": {
        "adamw": ("skipped_bucket",),
        "sgd, untied": ("stale_parameter",),
        "bf16": ("norm_of_one_shard",),
        "fp16": ("skipped_bucket",),
        "per token": ("doubled_gradients",),
    },
    "zero2, every micro-batch": {
        "adamw": ("skipped_bucket",),
        "sgd, untied": ("clip_of_its_own",),
        "bf16": ("stale_low_precision",),
        "fp16": ("doubled_gradients",),
        "per token": ("stale_parameter",),
    },
    "zero3": {
        "adamw": ("skipped_bucket", "doubled_gradients", "stale_slot", "gradients_off_by_a_millionth"),
        "sgd, untied": ("doubled_gradients",),
        "bf16": ("stale_low_precision",),
        "fp16": ("overflow_forgiven",),
        "per token": ("own_tokens",),
        "sgd, tied": ("stale_slot",),
        "sgd, per token": ("skipped_bucket",),
    },
    "zero3, gathered once a step": {
        "adamw": ("stale_slot",),
        "sgd, untied": ("skipped_bucket",),
        "bf16": ("norm_of_one_shard",),
        "fp16": ("doubled_gradients",),
        "per token": ("own_tokens",),
    },
    "zero3, every micro-batch": {
        "adamw": ("skipped_bucket",),
        "sgd, untied": ("clip_of_its_own",),
        "bf16": ("stale_low_precision",),
        "fp16": ("doubled_gradients",),
        "per token": ("stale_slot",),
    },
    "fsdp2": {
        "adamw": (
            *("skipped_unit", "doubled_gradients", "stale_unit", "without_no_sync", "gradients_off_by_a_millionth"),
        ),
        "sgd, untied": ("doubled_gradients",),
        "bf16": ("norm_of_one_shard",),
        "fp16": ("skipped_unit",),
        "per token": ("own_tokens",),
        "sgd, tied": ("stale_unit",),
        "sgd, per token": ("skipped_unit",),
    },
    "fsdp2, torch's collectives": {
        "adamw": ("skipped_unit",),
        "sgd, untied": ("stale_unit",),
        "bf16": ("doubled_gradients",),
        "fp16": ("overflow_forgiven",),
        "per token": ("skipped_unit",),
    },
    "fsdp2, gathered once a step": {
        "adamw": ("stale_unit",),
        "sgd, untied": ("skipped_unit",),
        "bf16": ("stale_unit",),
        "fp16": ("doubled_gradients",),
        "per token": ("own_tokens",),
    },
    "fsdp2, offloaded": {
        "adamw": ("norm_of_one_shard",),
        "sgd, untied": ("clip_of_its_own",),
        "bf16": ("stale_unit",),
        "fp16": ("skipped_unit",),
        "per token": ("doubled_gradients",),
    },
    "fsdp2, every micro-batch": {
        "adamw": ("skipped_unit",),
        "sgd, untied": ("norm_of_one_shard",),
        "bf16": ("stale_unit",),
        "fp16": ("overflow_forgiven",),
        "per token": ("own_tokens",),
    },
    "hybrid zero1": {
        "adamw": ("one_instance_only", "doubled_gradients"),
        "sgd, untied": ("skipped_bucket",),
        "bf16": ("stale_low_precision",),
        "fp16": ("one_instance_only",),
        "per token": ("own_tokens",),
    },
    "hybrid zero2, overlapped": {
        "adamw": ("stale_parameter",),
        "sgd, untied": ("one_instance_only",),
        "bf16": ("skipped_bucket",),
        "fp16": ("overflow_forgiven",),
        "per token": ("norm_of_one_shard",),
    },
    "hybrid zero3": {
        "adamw": ("one_instance_only", "stale_slot"),
        "sgd, untied": ("skipped_bucket",),
        "bf16": ("doubled_gradients",),
        "fp16": ("overflow_forgiven",),
        "per token": ("norm_of_one_shard",),
    },
    "hybrid fsdp2": {
        "adamw": ("skipped_unit", "doubled_gradients", "stale_unit", "norm_of_one_shard"),
        "sgd, untied": ("doubled_gradients",),
        "bf16": ("stale_unit",),
        "fp16": ("skipped_unit",),
        "per token": ("own_tokens",),
    },
}
"""What is planted under each wrapper in each training, on every number of ranks on which there is a case of it."""

FAMILIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hybrid")


def faults_in(case: Case) -> tuple[str, ...]:
    return PLANTED.get(case.wrapper, {}).get(case.training, ())


def test_every_case_has_a_fault():
    assert [str(case) for case in CASES if not faults_in(case)] == []


def test_every_fault_that_is_listed_has_a_case():
    cases = {(case.wrapper, case.training) for case in CASES}
    listed = {(wrapper, training) for wrapper, row in PLANTED.items() for training in row}
    assert listed <= cases
    assert {fault for case in CASES for fault in faults_in(case)} == FAULTS.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_engine_family_has_each_fault_kind_in_the_quick_set(family: str):
    quick = [case for case in CASES if case.wrapper.startswith(family) and not case.is_long]
    assert {FAULTS[fault].kind for case in quick for fault in faults_in(case)} >= {SKIPPED, DOUBLED, STALE}


def test_every_wrapper_is_of_a_family():
    assert [wrapper for wrapper in WRAPPERS | HYBRIDS if not wrapper.startswith(FAMILIES)] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_patch_of_names_that_core_has(fault: str):
    for owner, _ in FAULTS[fault].places:
        assert getattr(owner, "__module__", owner.__name__).startswith("core.")
    with FAULTS[fault].planted():  # an AttributeError where a name is not there
        pass


PARAMS = [
    pytest.param(case, fault, id=f"{case}-{fault}", marks=[pytest.mark.long] if case.is_long else [])
    for case in CASES
    for fault in faults_in(case)
]


@pytest.mark.parametrize(("case", "fault"), PARAMS)
def test_the_comparison_sees_a_planted_fault(case: Case, fault: str):
    steps = FP16_FAULT_STEPS if case.settings.precision == "fp16" else FAULT_STEPS
    expected = case.expected(steps)
    case.compare([expected] * case.ranks, expected)  # nothing in it, as what is not finite, that differs from itself
    settings = dataclasses.replace(case.settings, steps=steps)
    curves = run_distributed(run_with_fault, case.ranks, fault, case.wrapper, settings)
    with pytest.raises(AssertionError):
        case.compare(curves, expected)
