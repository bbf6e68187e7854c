"""What the tests for GPUs need of a machine: `make test-gpu` asks first, so that they cannot pass by being skipped."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys

import torch

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
    return subprocess.run([command, "-L"], capture_output=True, text=True, timeout=60).stdout.partition("(")[0].strip()


if __name__ == "__main__":
    reason = reason_against()
    if reason is not None:
        sys.exit(f"error: {reason}")
