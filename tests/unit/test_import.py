"""Every module of core imports with torch and numpy alone, in a bare environment, without a warning."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEED_EXTRAS = tuple(
    f"core.adapters.{adapter}" for adapter in ("accelerate", "lightning", "megatron_lm", "torchtitan", "verl")
)
"""Packages that import an optional dependency at their top, because they subclass what is in it. Each says so itself,
with the name of the extra."""


def _modules(folder: Path, package: str) -> Iterator[str]:
    yield package
    for info in pkgutil.iter_modules([str(folder)]):
        if info.ispkg:
            yield from _modules(folder / info.name, f"{package}.{info.name}")
        elif info.name != "__main__":
            yield f"{package}.{info.name}"


MODULES = sorted(name for name in _modules(ROOT / "core", "core") if not name.startswith(NEED_EXTRAS))
FIRST = ("core.models.gpt", "has_no_compiler")
"""Imported before the others, which may import torch's compiler; that takes longer than the rest."""
PLANTED = {
    "has_no_compiler": "import sys; assert 'torch._dynamo' not in sys.modules",
    "uses_an_extra": "import pytest",
    "warns": "import warnings; warnings.warn('a planted warning')",
    "asks_politely": "from importlib.util import find_spec; assert find_spec('pytest') is None",
}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return _problems("together", tmp_path_factory.mktemp("planted"))


def _problems(way: str, folder: Path) -> dict[str, str]:
    """Returns what went wrong with each module; empty where nothing did."""
    for name, text in PLANTED.items():
        (folder / f"{name}.py").write_text(text)
    program = ROOT / "tests" / "unit" / "_import_alone.py"
    run = subprocess.run(
        [
            sys.executable,
            "-I",
            "-W",
            "error",
            program,
            way,
            f"{ROOT}{os.pathsep}{folder}",
            *FIRST,
            *MODULES,
            *NEED_EXTRAS,
            *PLANTED,
        ],
        env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert (run.returncode, run.stderr) == (0, "")
    return dict(json.loads(line) for line in run.stdout.splitlines())


def test_torch_and_numpy_are_enough(problems: dict[str, str]) -> None:
    assert {module: problems[module] for module in MODULES if problems[module]} == {}


@pytest.mark.parametrize("package", NEED_EXTRAS)
def test_an_adapter_without_its_system_names_the_extra(package: str, problems: dict[str, str]) -> None:
    assert "MissingExtraError" in problems[package] and "pip install 'shardstack[" in problems[package]


def test_other_packages_and_warnings_would_show(problems: dict[str, str]) -> None:
    assert "No module named 'pytest'" in problems["uses_an_extra"]
    assert "UserWarning: a planted warning" in problems["warns"]
    assert problems["asks_politely"] == ""


@pytest.mark.long  # no module's import depends on another one's as long as the import contracts have no circle
def test_each_module_imports_alone(tmp_path: Path) -> None:
    found = _problems("alone", tmp_path)
    assert [module for module in MODULES if found[module]] == []


def test_models_import_without_the_compiler(problems: dict[str, str]) -> None:
    assert not problems["has_no_compiler"]
