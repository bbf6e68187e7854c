"""Brings pure Python packages to a machine without a network: `make gpu-wheels` downloads them, here.

The folder `.gpu-wheels` is ignored by git and travels with the checkout. There each wheel that has a module which the
Python lacks is unpacked; a package that the Python has is never replaced.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tests.gpu_first.checkout import leave_note
from tests.gpu_machine import CARRIED, PURE, ROOT, UNPACKED

OF_PYTHON = "3.12"
"""The version there, whose requirements pip follows; pure wheels themselves are of any."""


def download(constraints: Path) -> list[Path]:
    """Downloads the pure packages that a usual CUDA image lacks, with what they need; returns the wheels.

    Raises:
        subprocess.CalledProcessError: pip failed, and has said why. Wheels of an earlier call are still there.
    """
    folder = ROOT / CARRIED
    folder.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    pure = ["--only-binary=:all:", "--platform", "any", "--python-version", OF_PYTHON, "--constraint", constraints]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        subprocess.run([*pip, *pure, "--dest", temporary, *PURE], check=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        shutil.rmtree(ROOT / UNPACKED, ignore_errors=True)
        for wheel in Path(temporary).glob("*.whl"):
            wheel.replace(folder / wheel.name)
    leave_note()
    return sorted(folder.glob("*.whl"))


def unpack_missing(root: Path = ROOT) -> list[str]:
    """Unpacks the carried wheels that this Python lacks and makes them importable; returns their names.

    Warns of one that cannot be unpacked: what needs it is then missing, and named.
    """
    site = root / UNPACKED
    if str(site) not in sys.path:
        sys.path.append(str(site))
    names = []
    for wheel in sorted((root / CARRIED).glob("*.whl")):
        try:
            if _unpack(wheel, site):
                names.append("-".join(wheel.name.split("-")[:2]))
        except (OSError, zipfile.BadZipFile) as error:
            print(f"warning: {wheel} cannot be unpacked: {error}; run `make gpu-wheels` again", file=sys.stderr)
    return names


def _unpack(wheel: Path, site: Path) -> bool:
    """Unpacks a wheel unless this Python has all its modules; returns whether it did."""
    with zipfile.ZipFile(wheel) as archive:
        if all(importlib.util.find_spec(module) for module in _modules(archive)):
            return False
        site.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=site) as temporary:  # a copy that is cut off is in no module's place
            archive.extractall(temporary)  # which drops absolute paths and `..`
            for path in Path(temporary).iterdir():
                shutil.rmtree(site / path.name, ignore_errors=True)
                path.replace(site / path.name)
    importlib.invalidate_caches()
    return True


def _modules(archive: zipfile.ZipFile) -> set[str]:
    """Returns the modules of a wheel that are in no package."""
    tops = {name.partition("/")[0] for name in archive.namelist()}
    return {top.removesuffix(".py") for top in tops if not top.endswith((".dist-info", ".data"))}


def main(constraints: str) -> None:
    """Downloads, and prints what there is; ends with one line where pip fails."""
    try:
        wheels = download(Path(constraints))
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: pip ended with status {error.returncode}; {CARRIED} is as it was")
    size = sum(wheel.stat().st_size for wheel in wheels) / 2**20
    print(f"{CARRIED} has {len(wheels)} wheels, {size:.1f} MiB: {', '.join(wheel.name for wheel in wheels)}")


if __name__ == "__main__":
    main(sys.argv[1])
