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

import torch

ROOT = Path(__file__).resolve().parents[1]

EXAMPLE = ("yaml", "cyclopts", "docstring_parser", "tqdm", "tokenizers", "matplotlib")
"""What the GPT example needs in addition to torch, and what reads the case files."""

SUITE = ("pytest", "pytest_timeout", "xdist", *EXAMPLE)
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


def missing_packages(modules: tuple[str, ...] = EXAMPLE) -> list[str]:
    """Returns the packages of modules that this Python does not have."""
    return [PACKAGES.get(name, name) for name in modules if importlib.util.find_spec(name) is None]


def reason_against() -> str | None:
    """Returns why the tests for GPUs cannot run here, in one line; None if they can."""
    if not torch.cuda.is_available():
        listed = _gpus_of_the_driver()
        if listed:
            return f"the driver lists {listed}, but torch {torch.__version__} sees no GPU; install a build for CUDA"
        return "there is no GPU here; make test and make test-long run on the CPU"
    if missing := missing_packages(SUITE):
        return f"this Python lacks {', '.join(missing)}; docs/functional-cases.md says how to bring them along"
    return None


def _gpus_of_the_driver() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=600).stdout
    return listed.partition("(")[0].strip()


def main() -> None:
    """Prints the files to collect, or ends with the reason why the tests cannot run."""
    reason = reason_against()
    if reason is not None:
        sys.exit(f"error: {reason}")
    print(*gpu_files())


if __name__ == "__main__":
    main()
