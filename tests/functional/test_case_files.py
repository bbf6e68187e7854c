"""The premises of the suite of cases: its files say what they should, its comparison can fail, its curves differ."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from core.training.config import validate
from core.training.config.arguments import parse_arguments
from tests.functional._case_runs import COMMON
from tests.functional._cases import CaseError, merged_flags, read_case, read_cases
from tests.functional._golden import (
    METRICS,
    TOLERANCES,
    Golden,
    differences,
    explain_update,
    golden_path,
    precision,
    read_golden,
    write_golden,
)
from tests.functional._wrapper_cases import wrapper_cases

ALL = read_cases(others=wrapper_cases())
CASES = [case for case in ALL if not case.gpu.is_needed]
CLOSE = 1e-4
"""Within which curves count as equal where nothing else is said."""


# ---- the cases


def test_there_are_enough_and_of_every_kind():
    assert len(CASES) >= 24
    assert {case.kind for case in CASES} == {"regular", "resume", "reshard", "equality"}
    assert any(case.is_quick for case in CASES)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_flags_of_a_case_are_a_run(case):
    for leg in case.legs:
        for more in ((), case.gpu.flags):
            config = parse_arguments(merged_flags(COMMON, leg.flags, more), {"swiglu": True}, name="case")
            validate(config, leg.ranks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_case_has_golden_values_of_a_run_that_learned(case):
    golden = read_golden(golden_path(case, "cpu"))
    assert golden.steps == list(range(1, 17))
    assert golden.ranks == case.legs[0].ranks
    assert differences(golden, golden, {}) == []  # every value is a number
    losses = golden.values["loss"]
    assert losses[-1] < 0.9 * losses[0]


def test_no_two_curves_are_equal_unless_that_is_what_is_asserted():
    asserted = _asserted_equalities()
    for one, other in itertools.combinations(CASES, 2):
        ours, theirs = (read_golden(golden_path(case, "cpu")) for case in (one, other))
        if asserted[one.name] == asserted[other.name]:
            within = max(CLOSE, one.tolerance + other.tolerance)
            assert _differences_of_curves(ours, theirs, within) == [], f"{one} and {other}"
        else:
            assert _differences_of_curves(ours, theirs, CLOSE), f"{one} and {other}"


def _asserted_equalities() -> dict[str, str]:
    """Returns for each case the one that it and all that are equal to it go back to."""
    equal_to = {case.name: case.equal_to for case in CASES}
    found = {}
    for name in equal_to:
        first = name
        while equal_to[first] is not None:
            first = equal_to[first]
        found[name] = first
    return found


def _differences_of_curves(ours: Golden, theirs: Golden, tolerance: float) -> list[str]:
    both = [replace(g, values={k: g.values[k] for k in ("loss", "grad_norm", "skipped")}) for g in (ours, theirs)]
    return differences(*both, {"loss": tolerance, "grad_norm": 10 * tolerance})


# ---- the comparison bites


def _curve(**changes: list) -> Golden:
    values = {
        "loss": [5.0, 4.0, 3.0],
        "grad_norm": [1.0, None, 2.0],
        "num_zeros": [7, None, 9],
        "loss_scale": [8.0, 8.0, 4.0],
        "skipped": [0, 1, 0],
        "peak_memory_mib": [300.0, 300.0, 301.0],
    }
    return Golden("cpu", "2.13.0+cpu", 2, 1, 3, 1, values | changes)


FP32 = TOLERANCES["fp32"]


def test_a_curve_within_its_tolerance_agrees():
    near = _curve(
        loss=[5.001, 4.0, 3.0],
        grad_norm=[1.005, None, 2.0],
        num_zeros=[12, None, 4],
        peak_memory_mib=[340.0, 340.0, 340.0],
    )
    assert differences(near, _curve(), FP32) == []
    off_by_one = _curve(num_zeros=[8, None, 9])
    assert differences(off_by_one, _curve(), {}) == ["num_zeros of step 1 is 8, not 7 (within 0)"]


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (_curve(loss=[5.1, 4.0, 3.0]), "loss of step 1 is 5.1, not 5.0"),
        (_curve(loss=[5.0, float("nan"), 3.0]), "loss of step 2 is nan"),
        (_curve(loss=[5.0, None, 3.0]), "loss of step 2 is None"),
        (_curve(grad_norm=[None, None, 2.0]), "grad_norm of step 1 is None"),
        (_curve(grad_norm=[1.0, 1.0, 2.0]), "grad_norm of step 2 is 1.0, not None"),
        (_curve(grad_norm=[float("inf"), None, 2.0]), "grad_norm of step 1 is inf"),
        (_curve(loss=[5.0, 4.0]), "loss has 2 of 3 steps"),
        (_curve(loss_scale=[8.0, 8.0, 8.0]), "loss_scale of step 3 is 8.0, not 4.0"),
        (_curve(skipped=[0, 0, 0]), "skipped of step 2 is 0, not 1"),
        (_curve(num_zeros=[7, None, 20]), "num_zeros of step 3"),
        (_curve(num_zeros=[13, None, 9]), "num_zeros of step 1"),
        (_curve(peak_memory_mib=[300.0, 300.0, 500.0]), "peak_memory_mib of step 3"),
        (replace(_curve(), end=4), "steps 1 to 4 by 1 instead of 1 to 3 by 1"),
        (replace(_curve(), start=2), "steps 2 to 3"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_difference_is_seen(found: Golden, said: str):
    assert any(said in line for line in differences(found, _curve(), FP32))


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_on_one_side_only_is_a_difference(metric: str):
    less = replace(_curve(), values={name: v for name, v in _curve().values.items() if name != metric})
    assert f"{metric} is on one side only" in differences(less, _curve(), FP32)
    assert f"{metric} is on one side only" in differences(_curve(), less, FP32)


def test_a_golden_value_that_is_no_number_agrees_with_nothing():
    nan = _curve(loss=[5.0, float("nan"), 3.0])
    assert differences(nan, nan, FP32) == ["loss of step 2 is nan, not nan (within 0.001)"]


def test_an_update_says_what_it_changes():
    assert explain_update(None, _curve()) == ["new"]
    assert explain_update(_curve(), _curve()) == ["unchanged"]
    after = replace(_curve(loss=[5.0, 4.5, 3.1]), torch="2.14.0")
    assert explain_update(_curve(), after) == [
        "torch 2.13.0+cpu -> 2.14.0",
        "loss: 2 of 3 steps, most at step 2: 4.0 -> 4.5",
    ]


def test_precision_decides_the_tolerance():
    assert precision(["--bf16"]) == precision(["--fp16", "--lr", "1"]) == "low"
    assert precision(["--lr", "1"]) == "fp32"


# ---- bad input


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: regular\nrank: 2\n", "config.yaml: unknown key rank; known are kind, flags, ranks"),
        ("flags: --bf16\n", "config.yaml: kind is missing"),
        ("kind: irregular\n", "kind is 'irregular'; it takes one of regular, resume, reshard, equality"),
        ("kind: regular\nranks: two\n", "ranks is 'two', of type str"),
        ("kind: regular\nranks: true\n", "ranks is True, of type bool"),
        ("kind: regular\nequal_to: [a]\n", "equal_to is ['a'], of type list"),
        ("kind: equality\n", "kind is equality and there is no equal_to"),
        ("kind: resume\n", "resume_at is missing"),
        ("kind: reshard\nlegs:\n  - until: 3\n", "unknown key until"),
        ("kind: reshard\nlegs:\n  - until: 3\n  - until: 3\n  - ranks: 2\n", "legs are 3, until [3, 3]"),
        ("kind: reshard\nlegs:\n  - flags: --bf16\n  - ranks: 2\n", "leg 1: until is missing"),
        ("kind: regular\ngpu:\n  ranks: 2\n", "config.yaml: gpu: unknown key ranks"),
        ("- kind\n", "holds list; write keys with their values"),
        ("kind: [\n", "config.yaml: cannot be read"),
    ],
)
def test_a_case_file_is_refused(tmp_path: Path, text: str, said: str):
    folder = tmp_path / "a-case"
    folder.mkdir()
    (folder / "config.yaml").write_text(text)
    with pytest.raises(CaseError) as caught:
        read_case(folder)
    assert said in str(caught.value)
    assert str(caught.value).startswith("a-case/config.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", ["b", "a"])
def test_an_equality_with_no_other_case_is_refused(tmp_path: Path, other: str):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.yaml").write_text(f"kind: equality\nequal_to: {other}\n")
    with pytest.raises(CaseError, match=f"a/config.yaml: equal_to is '{other}', which is no other case"):
        read_cases(tmp_path)


def test_golden_values_come_back_as_they_were_written(tmp_path: Path):
    write_golden(_curve(), tmp_path / "golden_values_cpu.json")
    assert read_golden(tmp_path / "golden_values_cpu.json") == _curve()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema is 2 and this suite reads 1; write it again with --update-golden"),
        ({"schema": None}, "schema is None"),
        ({"steps": 3}, "is not of schema 1"),
        (
            {"values": {"loss": [1.0, 2.0, 3.0]}},
            "has loss for [3] steps, and the schema wants finite numbers of loss, grad_norm",
        ),
        ({"values": [1]}, "is not of schema 1"),
        ({"end": 4}, "for 4"),
        ({"interval": 0}, "is not of schema 1"),
    ],
)
def test_golden_values_of_another_form_are_refused(tmp_path: Path, change: dict, said: str):
    path = tmp_path / "golden_values_cpu.json"
    write_golden(_curve(), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CaseError) as caught:
        read_golden(path)
    assert said in str(caught.value)
    assert f"{tmp_path.name}/golden_values_cpu.json: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_golden_values_that_are_no_json_or_not_there_are_refused(tmp_path: Path):
    path = tmp_path / "golden_values_cpu.json"
    with pytest.raises(CaseError, match="there are no golden values; make them with --update-golden"):
        read_golden(path)
    path.write_text("{")
    with pytest.raises(CaseError, match="is no JSON"):
        read_golden(path)
