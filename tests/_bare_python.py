"""A Python that has torch and a few named packages, as a lent machine has: an environment of links to this one's."""

from __future__ import annotations

import venv
import zipfile
from importlib.metadata import Distribution, PackagePath, distribution
from pathlib import Path

from packaging.requirements import Requirement

CUDA_IMAGE = (
    *("torch", "numpy", "pytest", "pytest-xdist", "pytest-timeout", "pyyaml", "tqdm", "tokenizers", "matplotlib"),
    *("pillow", "safetensors", "tensorboard"),
)
"""What a usual CUDA image has of the packages that tests and benchmarks import."""


def bare_python(folder: Path, packages: tuple[str, ...] = CUDA_IMAGE) -> Path:
    """Makes the environment, with the packages and what they require; returns its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in _with_requirements(packages):
        for top in {file.parts[0] for file in _files_of(package)}:
            if not (site / top).is_symlink():
                (site / top).symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin" / "python"


def wheels_of(packages: tuple[str, ...], folder: Path) -> None:
    """Makes wheels of installed packages, and of what they require, as `make gpu-wheels` downloads them."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in _with_requirements(packages):
        name = package.name.replace("-", "_").lower()
        with zipfile.ZipFile(folder / f"{name}-{package.version}-py3-none-any.whl", "w") as archive:
            for file in _files_of(package):
                archive.write(str(package.locate_file(file)), str(file))


def _files_of(package: Distribution) -> list[PackagePath]:
    """Returns the files of a package that are inside site-packages, without compiled ones."""
    files = package.files or []
    return [file for file in files if file.parts[0] not in ("..", "bin") and "__pycache__" not in file.parts]


def _with_requirements(packages: tuple[str, ...]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    waiting = list(packages)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = distribution(name)
            required = map(Requirement, found[name].requires or ())
            waiting += [r.name.lower() for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    return list(found.values())
