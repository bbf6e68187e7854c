"""Every case of `cases/` runs as a user would run it, and its curve is the one that was written down.

make test                                   the quick ones, on the CPU
make test-long                              all, on the CPU
make test-gpu                               all, on the GPUs at hand
pytest tests/functional/test_cases.py -m '' --update-golden    writes golden values anew, and says what changed
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the case files are read by PyYAML, which this Python does not have")

from tests.functional._case_runs import CPU, CaseRunner, as_golden, gpu_target, missing_packages
from tests.functional._cases import (
    TOLERANCES,
    Case,
    CaseError,
    Golden,
    differences,
    explain_update,
    golden_path,
    precision,
    read_cases,
    read_golden,
    write_golden,
)
from tests.functional._wrapper_cases import wrapper_cases

CASES = read_cases(others=wrapper_cases())
EQUAL = ("loss", "grad_norm", "num_zeros", "loss_scale", "skipped")
"""What equal runs have in common; memory is not."""


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> CaseRunner:
    return CaseRunner(tmp_path_factory.mktemp("cases"), CPU)


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    target = gpu_target()
    if target is None:
        pytest.skip("torch sees no GPU here")
    if missing := missing_packages():
        pytest.skip(f"the example needs {', '.join(missing)}, which this Python does not have")
    yield CaseRunner(tmp_path_factory.mktemp("cases"), target)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.is_quick else [pytest.mark.long]) for c in CASES]
)
def test_a_case_on_the_cpu(
    case: Case, on_cpu: CaseRunner, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    _check(case, on_cpu, request, capsys)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in CASES])
def test_a_case_on_gpus(
    case: Case, on_gpu: CaseRunner, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = on_gpu.target.gpus
    if case.gpu.min_ranks > gpus:
        pytest.skip(f"{case} needs {case.gpu.min_ranks} GPUs, and there are {gpus}")
    _check(case, on_gpu, request, capsys)


@pytest.mark.gpu
def test_a_deterministic_run_is_repeated_bit_by_bit_on_one_gpu(on_gpu: CaseRunner, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.name == "deterministic")
    curves = []
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        curves.append(CaseRunner(tmp_path / name, replace(on_gpu.target, gpus=1)).curve(case)[0])
    assert_equal(*curves, 0.0, 0, "its repetition")


def _check(case: Case, runner: CaseRunner, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    curve, undisturbed = runner.curve(case)
    assert_learned(curve)
    legs = runner.target.legs(case)
    equal_to, tolerance = runner.target.equality(case)
    few = TOLERANCES[precision(legs[0].flags)]["num_zeros"]
    if len(legs) > 1:
        assert_equal(curve, undisturbed, tolerance, few, "the run that was not interrupted")
    if equal_to is not None:
        other = next(c for c in CASES if c.name == equal_to)
        assert_equal(curve, runner.curve(other)[0], tolerance, few, equal_to)

    path = golden_path(case, runner.target.device)
    if request.config.getoption("--update-golden"):
        before = _readable(path)
        write_golden(as_golden(curve), path)
        with capsys.disabled():
            print(f"\n{case} on {runner.target.device}: " + "\n    ".join(explain_update(before, as_golden(curve))))
        return
    if runner.target.gpus and not path.exists():
        pytest.skip(f"it learned, and equals what it has to; {path.name} is not there (--update-golden writes it)")
    golden = read_golden(path)
    if golden.ranks != legs[0].ranks:
        pytest.skip(f"it learned; {path.name} is of {golden.ranks} ranks, and {legs[0].ranks} ran here")
    wrong = differences(as_golden(curve), golden, _tolerances(curve, golden, legs[0].flags))
    assert not wrong, "\n".join([f"{case} is not what {path.name} says:", *wrong])


def _tolerances(curve: Golden, golden: Golden, flags: tuple[str, ...]) -> dict[str, float]:
    tolerances = dict(TOLERANCES[precision(flags)])
    if _build(curve) != _build(golden):
        # On the CPU most of the memory is torch itself, which differs in a build for GPUs.
        tolerances["peak_memory_mib"] = float("inf")
    return tolerances


def _build(golden: Golden) -> str:
    return golden.torch.partition("+")[2]


def _readable(path: Path) -> Golden | None:
    try:
        return read_golden(path)
    except CaseError:
        return None


def assert_learned(curve: Golden) -> None:
    """Asserts that the loss has fallen: otherwise equal curves mean little."""
    losses = [loss for loss in curve.values["loss"] if loss is not None]
    assert len(losses) == len(curve.steps), f"losses {curve.values['loss']} of steps {curve.steps}"
    assert losses[-1] < 0.9 * losses[0], losses


def assert_equal(found: Golden, expected: Golden, tolerance: float, few: float, of: str) -> None:
    """`few` is the number of zeros that come by rounding, where a tolerance is allowed at all."""
    ours, theirs = (replace(g, values={metric: g.values[metric] for metric in EQUAL}) for g in (found, expected))
    most = max(count or 0 for count in expected.values["num_zeros"])
    zeros = few + 10 * tolerance * most if tolerance else 0
    wrong = differences(ours, theirs, {"loss": tolerance, "grad_norm": 10 * tolerance, "num_zeros": zeros})
    assert not wrong, "\n".join([f"not equal to {of}:", *wrong])
