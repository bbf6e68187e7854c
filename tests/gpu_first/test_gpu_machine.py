"""`make test-gpu`: which files it collects, what these import, and what it says of a machine that cannot run them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests import gpu_machine
from tests.gpu_first import wheels
from tests.gpu_machine import ROOT, SUITE, gpu_files, reason_against
from tests.unit.test_import import NEED_EXTRAS

EXAMPLES = {file.stem for file in (ROOT / "examples" / "gpt").glob("*.py")}
KNOWN = {*sys.stdlib_module_names, "torch", "numpy", *SUITE, *EXAMPLES}


def test_every_test_with_the_mark_is_in_a_file_that_is_run(files_with_gpu_tests: set[Path]) -> None:
    assert {str(file.relative_to(ROOT)) for file in files_with_gpu_tests} <= set(gpu_files())


def test_the_files_are_those_with_the_mark() -> None:
    files = gpu_files()
    assert {"tests/functional/test_cases.py", "tests/unit/training/test_host_reads.py"} <= set(files)
    assert len(files) < 30 and "tests/unit/examples/test_text_sources.py" not in files  # which imports zstandard


def _at_the_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that an import of the module runs, those in its blocks too."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            continue
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _at_the_top(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from _at_the_top(handler.body)


def _imported(file: Path) -> set[str]:
    """Returns the modules that importing a file imports, and the names that may be modules."""
    found: set[str] = set()
    for statement in _at_the_top(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0 and statement.module, f"{file} imports relatively"
            found |= {statement.module} | {f"{statement.module}.{alias.name}" for alias in statement.names}
        elif isinstance(statement, (ast.Expr, ast.Assign)):
            calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call) and node.args]
            # which skips the file where the package is missing
            found |= {call.args[0].value for call in calls if ast.unparse(call.func) == "pytest.importorskip"}
    return found


def _files_of(module: str) -> list[Path]:
    """Returns the file of a module of the repository and those of the packages that it is in."""
    parts = module.split(".")
    packages = [ROOT.joinpath(*parts[: i + 1], "__init__.py") for i in range(len(parts))]
    return [file for file in (*packages, ROOT.joinpath(*parts).with_suffix(".py")) if file.exists()]


def _foreign(files: list[Path]) -> set[str]:
    """Returns what importing files imports beyond the packages that are checked for; `core` needs no other."""
    waiting, seen, found = list(files), set(files), set()
    while waiting:
        for module in _imported(waiting.pop()):
            top = module.partition(".")[0]
            if top == "tests":
                new = set(_files_of(module)) - seen
                waiting += new
                seen |= new
            elif module.startswith(NEED_EXTRAS) or (top != "core" and top not in KNOWN):
                found.add(module)
    return found


def test_they_import_only_what_the_machine_is_asked_for() -> None:
    assert _foreign([ROOT / "tests" / "conftest.py", *(ROOT / file for file in gpu_files())]) == set()


def test_an_import_of_another_package_would_show(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(
        "try:\n    import tests.unit.examples.test_text_sources\nexcept ImportError:\n    import hypothesis\n"
        "pytest.importorskip('peft')\n"
    )
    assert _foreign([file]) == {"zstandard", "hypothesis", "peft"}


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        (("yaml", "xdist"), "this Python lacks pytest-xdist, pyyaml; docs/functional-cases.md says how"),
        (
            ("cyclopts", "docstring_parser"),
            "this Python lacks cyclopts, docstring-parser; run `make gpu-wheels` where",
        ),
    ],
)
def test_missing_packages_are_named(with_a_gpu: pytest.MonkeyPatch, lacks: tuple[str, ...], reason: str) -> None:
    with_a_gpu.setattr(wheels, "unpack_missing", list)
    with_a_gpu.setattr(gpu_machine.importlib.util, "find_spec", lambda name: None if name in lacks else 1)
    with pytest.raises(SystemExit, match=f"error: {reason}"):
        gpu_machine.main()


@pytest.mark.parametrize(
    ("listed", "reason"),
    [("", "there is no GPU here"), ("GPU 0: NVIDIA H100", "the driver lists GPU 0: NVIDIA H100, but torch ")],
)
def test_a_machine_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch, listed: str, reason: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_machine, "_gpus_of_the_driver", lambda: listed)
    assert str(reason_against()).startswith(reason)


def test_a_python_without_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert str(reason_against()).startswith(f"{sys.executable} cannot import torch (")


def test_make_collects_the_files_that_are_printed() -> None:
    runs = [
        subprocess.run(
            ["make", "--silent", "test-gpu", f"PYTHON={python}"],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"]},  # without the flags and variables of the make that runs this test
            capture_output=True,
            text=True,
            timeout=600,
        )
        for python in ("echo", "false")
    ]
    # echo prints what it is called with: the first call's output is the second's list of files
    assert runs[0].stdout == "-m pytest -n 6 --dist worksteal -m gpu -m tests.gpu_machine\n"
    assert runs[1].returncode != 0 and runs[1].stdout == ""


def test_the_module_prints_the_files_or_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_machine, "reason_against", lambda: None)
        patch.setattr(wheels, "unpack_missing", list)
        gpu_machine.main()
        assert capsys.readouterr().out.split() == gpu_files()
        patch.setattr(gpu_machine, "reason_against", lambda: "no GPU")
        with pytest.raises(SystemExit, match="error: no GPU"):
            gpu_machine.main()
        assert capsys.readouterr().out == ""
