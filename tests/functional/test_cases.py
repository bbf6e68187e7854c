"""Every case of `cases/` runs as a user would run it, and its curve is the one that was written down.

make test                                   the quick ones, on the CPU
make test-long                              all, on the CPU
make test-gpu                               all, on the GPUs of this machine
pytest tests/functional/test_cases.py -m 'not gpu' --update-golden    writes golden values again, and says what changed
make test-gpu ARGS=--update-golden                                    the same on GPUs
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the case files are read by PyYAML, which this Python does not have")

from tests.functional._case_runs import CPU, CaseRunner, as_golden, gpu_target
from tests.functional._cases import Case, CaseError, read_cases
from tests.functional._golden import (
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
from tests.gpu_machine import missing_packages

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
        pytest.fail(f"there is a GPU here, and this Python lacks {', '.join(missing)}, which the example needs")
    yield CaseRunner(tmp_path_factory.mktemp("cases"), target, _shared_folder(tmp_path_factory))


def _shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """Returns a folder that xdist's workers share; None if this process runs all tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return None
    folder = tmp_path_factory.getbasetemp().parent / "curves"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c.is_quick else [pytest.mark.long]) for c in CASES if not c.gpu.is_needed],
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
    is_missing = not path.exists() and request.config.getoption("--write-missing-golden")
    if is_missing or request.config.getoption("--update-golden"):
        before = _readable(path)
        write_golden(as_golden(curve), path)
        with capsys.disabled():
            print(f"\n{case} on {runner.target.device}: " + "\n    ".join(explain_update(before, as_golden(curve))))
        return
    golden = read_golden(path) if path.exists() or not runner.target.gpus else None
    if golden is None or golden.ranks != legs[0].ranks:
        there = "not there" if golden is None else f"of {golden.ranks} ranks, and {legs[0].ranks} ran here"
        warnings.warn(
            f"{case} learned, and equals what it has to, but its values were compared with none: {path.name} is "
            f"{there}; make test-gpu ARGS=--update-golden writes it",
            stacklevel=2,
        )
        return
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
