"""A lent machine, imitated: carried wheels, a bare Python, a copy of the files without git, a pretended GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import asdict
from pathlib import Path

import pytest

from tests._bare_python import bare_python, wheels_of
from tests.gpu_first import wheels
from tests.gpu_first.checkout import FILES, FOLDERS, NOTE, Checkout, hash_of_sources
from tests.gpu_first.take_in import read_archive
from tests.gpu_machine import CARRIED, PURE, ROOT, UNPACKED

GPU = "Pretended GPU"


def _wheel(folder: Path, name: str, content: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", content)
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\n")


def test_carried_wheels_fill_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / CARRIED).mkdir()
    _wheel(tmp_path / CARRIED, "carried_and_missing", "VALUE = 3")
    _wheel(tmp_path / CARRIED, "numpy", "raise AssertionError")
    assert wheels.unpack_missing(tmp_path) == ["carried_and_missing-1.0"]
    assert [path.name for path in (tmp_path / UNPACKED).iterdir() if "dist-info" not in path.name] == [
        "carried_and_missing"
    ]
    assert __import__("carried_and_missing").VALUE == 3
    assert wheels.unpack_missing(tmp_path) == []


def test_a_damaged_wheel_is_named_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / CARRIED).mkdir()
    _wheel(tmp_path / CARRIED, "carried_and_damaged", "VALUE = 3")
    _wheel(tmp_path / CARRIED, "carried_and_whole", "VALUE = 4")
    (damaged,) = (tmp_path / CARRIED).glob("*damaged*")
    damaged.write_bytes(damaged.read_bytes()[:60])
    assert wheels.unpack_missing(tmp_path) == ["carried_and_whole-1.0"]
    ended = capsys.readouterr()
    assert ended.err.startswith(f"warning: {damaged} cannot be unpacked: ") and ended.err.count("\n") == 1


def test_a_failed_download_leaves_the_wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheels, "ROOT", tmp_path)
    (tmp_path / CARRIED).mkdir()
    _wheel(tmp_path / CARRIED, "old", "")
    monkeypatch.setattr(wheels, "PURE", ("--no-such-option",))
    with pytest.raises(SystemExit, match=r"error: pip ended with status 2; \.gpu-wheels is as it was"):
        wheels.main(str(ROOT / "constraints.txt"))
    assert [path.name for path in (tmp_path / CARRIED).iterdir()] == ["old-1.0-py3-none-any.whl"]


def _archive_of(folder: Path) -> Path:
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def lent_machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns a Python and a copy of the files, with what `make gpu-wheels` adds."""
    python = bare_python(tmp_path_factory.mktemp("bare"))
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    shutil.copy(ROOT / "tests/unit/_pretended_gpu.py", site / "sitecustomize.py")
    copy = tmp_path_factory.mktemp("copy") / "checkout"
    for name in (*FILES, *FOLDERS):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "golden_values_[!c]*"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy(source, copy / name)
    wheels_of(PURE, copy / CARRIED)
    note = Checkout("0" * 40, hash_of_sources(copy))
    (copy / CARRIED / NOTE).write_text(json.dumps(asdict(note)))
    return python, copy


def _imitate(
    machine: tuple[Path, Path], folder: Path, *only: str, **environment: str
) -> tuple[int, str, dict[str, dict[str, str]]]:
    """Runs stages; returns the status, the log, and the status of each command."""
    python, copy = machine
    ended = subprocess.run(
        [python, "-m", "tests.gpu_first", "--results", folder, "--only", *only],
        cwd=copy,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PRETENDED_GPU": GPU, **environment},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert (folder / "results.json").exists(), ended.stderr
    summary = json.loads((folder / "results.json").read_text())
    assert (summary["device"], summary["commit"], summary["is_noted"]) == (GPU, "0" * 40, True)
    outcomes = {
        stage: {name: outcome["status"] for name, outcome in commands.items()}
        for stage, commands in summary["stages"].items()
    }
    return ended.returncode, (folder / "log.txt").read_text(), outcomes


def test_a_lent_machine_collects_tests_of_kernels(lent_machine: tuple[Path, Path], tmp_path: Path) -> None:
    status, log, outcomes = _imitate(lent_machine, tmp_path / "new", "kernels", PYTEST_ADDOPTS="--collect-only")
    assert outcomes == {"kernels": {"kernels": "failed", "lanes": "failed"}} and status == 1  # no test ran
    assert log.count("tests collected") == 2 and log.count("no test ran: 0 of 0 were skipped") == 2, log
    assert "error" not in log.lower() and "unpacked " in log and "cyclopts" in log, log


@pytest.mark.long
def test_stages_pass_on_a_lent_machine(lent_machine: tuple[Path, Path], tmp_path: Path) -> None:
    """All but `large`, whose models no CPU trains in minutes. Tests that use CUDA are left out."""
    few = {"FEW": "on_gpus[ddp-tied-fp32],on_gpus[moe]", "PYTEST_ADDOPTS": "-p sitecustomize"}
    stages = ("speed", "comparison", "golden", "new")
    _, log, outcomes = _imitate(lent_machine, tmp_path / "new", *stages, **few)
    assert outcomes["speed"] == {"assumptions": "passed", "first rows": "passed"}, log
    assert (
        outcomes["comparison"].keys() == {"against", "other rows"} and outcomes["comparison"]["other rows"] == "passed"
    )
    assert outcomes["golden"] == {"golden values": "passed"}, log
    assert outcomes["new"] == {"new code": "failed", "new cases": "passed", "no rows": "failed"}, log
    assert log.count("failed, status 5") == 2  # pytest's, where no test is left
    packed = read_archive(_archive_of(tmp_path / "new"))
    reports = [json.loads(content) for name, content in packed.items() if "/gpt_throughput" in name]
    assert all(report["finished"] and report["versions"]["commit"] == "0" * 40 for report in reports)
    assert sorted(len(report["rows"]) for report in reports) == [0, 2, 4]
    (compared,) = [report["ratios"] for report in reports if report["ratios"]]
    assert compared[0]["limit"] == 1.01  # which tiny layers on a CPU exceed
    cases = {name.split("/")[1] for name in packed if name.startswith("golden/")}
    assert cases == {"ddp-tied-fp32", "moe"}
