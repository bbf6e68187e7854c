"""Brings pure Python packages to a machine without a network: `make gpu-wheels` downloads them, here.

The folder `.gpu-wheels` is ignored by git and travels with the checkout. There each wheel that has a module which the
Python lacks is unpacked; a package that the Python has is never replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.gpu_first.checkout import leave_note
from tests.gpu_machine import CARRIED, PURE, ROOT, UNPACKED

OF_PYTHON = "3.12"
"""The version there, whose requirements pip follows; pure wheels themselves are of any."""


def download(constraints: Path) -> list[Path]:
    """Downloads the pure packages that a usual CUDA image lacks, with what they need; returns the wheels."""
    folder = ROOT / CARRIED
    for old in folder.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", folder]
    pure = ["--only-binary=:all:", "--platform", "any", "--python-version", OF_PYTHON, "--constraint", constraints]
    subprocess.run([*pip, *pure, *PURE], check=True)
    leave_note()
    return sorted(folder.glob("*.whl"))


def unpack_missing(root: Path = ROOT) -> list[str]:
    """Unpacks the carried wheels that this Python lacks and makes them importable; returns their names."""
    site = root / UNPACKED
    if str(site) not in sys.path:
        sys.path.append(str(site))
    names = []
    for wheel in sorted((root / CARRIED).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if all(importlib.util.find_spec(module) for module in _modules(archive)):
                continue
            archive.extractall(site)  # which drops absolute paths and `..`
        names.append("-".join(wheel.name.split("-")[:2]))
        importlib.invalidate_caches()
    return names


def _modules(archive: zipfile.ZipFile) -> set[str]:
    """Returns the modules of a wheel that are in no package."""
    tops = {name.partition("/")[0] for name in archive.namelist()}
    return {top.removesuffix(".py") for top in tops if not top.endswith((".dist-info", ".data"))}


if __name__ == "__main__":
    wheels = download(Path(sys.argv[1]))
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{CARRIED} has {len(wheels)} wheels, {size:.1f} MiB: {', '.join(wheel.name for wheel in wheels)}")
