"""A Python that has torch and a few named packages, as a lent machine has: an environment of links to this one's."""

from __future__ import annotations

import venv
from importlib.metadata import Distribution, distribution
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
        for file in package.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__", "bin"):
                link = site / top
                if not link.is_symlink():
                    link.symlink_to(Path(str(package.locate_file(top))))
    return folder / "bin" / "python"


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
