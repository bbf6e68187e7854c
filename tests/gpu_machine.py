"""The files with tests for GPUs, and what these need of a machine.

`make test-gpu` asks first, so that they cannot pass by being skipped, and collects no other file: packages that others
import may be missing on such a machine.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ".gpu-wheels"
"""Folder of the packages that `make gpu-wheels` downloads for a machine without a network; git ignores it."""
UNPACKED = f"{CARRIED}/site"
"""Those that the machine lacks, unpacked there. `make test-gpu` and `make gpu-first` have it in PYTHONPATH."""

PYTEST = ("pytest", "pytest_timeout", "xdist")
"""What tests need."""
PURE = ("cyclopts", "docstring_parser")
"""Pure Python packages of the GPT example, which a usual CUDA image lacks."""
EXAMPLE = ("yaml", *PURE, "tqdm", "tokenizers", "matplotlib")
"""What the GPT example needs in addition to torch, and what reads the case files."""

SUITE = (*PYTEST, *EXAMPLE)
PACKAGES = {
    "yaml": "pyyaml",
    "pytest_timeout": "pytest-timeout",
    "xdist": "pytest-xdist",
    "docstring_parser": "docstring-parser",
}
"""Names of packages that differ from those of their modules."""


_MARKED = re.compile(r"\bmark\.gpu\b|\bON_GPU\b")  # the mark itself, or the list of marks of tests/unit/_on_gpu.py


def gpu_files() -> list[str]:
    """Returns the files with tests that have the mark `gpu`, as paths from the root of the repository."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if _MARKED.search(file.read_text(encoding="utf-8"))]


def gpu_slug(name: str) -> str:
    """Returns the name of a GPU as it is in the names of files: ``NVIDIA H200`` is ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def missing_packages(modules: tuple[str, ...] = EXAMPLE) -> list[str]:
    """Returns the packages of modules that this Python does not have."""
    return [PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]


def how_to_bring(packages: list[str]) -> str:
    """Returns what to do about missing packages."""
    pure = {PACKAGES.get(name, name) for name in PURE}
    if set(packages) <= pure:
        return f"run `make gpu-wheels` where there is a network, and let {CARRIED} travel with the checkout"
    return "docs/functional-cases.md says how to bring them along"


def reason_against() -> str | None:
    """Returns why no test for GPUs can run here, in one line; None if they can, given their packages."""
    try:
        import torch  # here: `make gpu-wheels` runs without it
    except ImportError as error:
        return f"{sys.executable} cannot import torch ({error}); make ... PYTHON=python names a Python that can"
    if torch.cuda.is_available():
        return None
    listed = _gpus_of_the_driver()
    if listed:
        return f"the driver lists {listed}, but torch {torch.__version__} sees no GPU; install a build for CUDA"
    return "there is no GPU here; make test and make test-long run on the CPU"


def _gpus_of_the_driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=600).stdout
    return listed.partition("(")[0].strip()


def main() -> None:
    """Prints the files to collect, or ends with the reason why the tests cannot run."""
    from tests.gpu_first.wheels import unpack_missing  # which imports this module

    reason = reason_against()
    if reason is None:
        unpack_missing()
        if missing := missing_packages(SUITE):
            reason = f"this Python lacks {', '.join(missing)}; {how_to_bring(missing)}"
    if reason is not None:
        sys.exit(f"error: {reason}")
    print(*gpu_files())


if __name__ == "__main__":
    main()
