"""Installs the newest release of torch and of each trainer, without our constraints, and says which door breaks.

    python3 tests/newest.py            # one line for each door: package, version, what its tests say
    python3 tests/newest.py --python   # the newest Python on this machine, and nothing else

The environment is `.venv-newest`, of the newest Python that is found, and is made anew. A package that pip refuses to
install next to the newest torch is named, and the others go on.
"""

from __future__ import annotations

import glob
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-newest"
PYTHONS = ("3.14", "3.13", "3.12", "3.11")
"""Versions to look for, the newest first."""
UNIT, ADAPTERS = "tests/unit/", "tests/unit/adapters/"
DOORS = {
    "torch": [f"{UNIT}distributed/fsdp2", f"{UNIT}distributed/test_torch_fully_sharded_data_parallel.py"],
    "transformers": [f"{UNIT}distributed/test_hugging_face_experts.py", f"{UNIT}models/gpt/test_hugging_face.py"],
    "accelerate": [f"{ADAPTERS}accelerate"],
    "peft": [f"{UNIT}distributed/test_peft_models.py"],
    "trl": [f"{ADAPTERS}accelerate/test_sft.py", f"{ADAPTERS}accelerate/test_trl.py"],
    "lightning": [f"{ADAPTERS}lightning"],
    "ray": ["tests/functional/test_launchers.py"],
    "torchtitan": [f"{ADAPTERS}test_torchtitan.py"],
    "megatron-core": [f"{ADAPTERS}megatron_lm"],
    "verl": [f"{ADAPTERS}verl"],
}
"""Tests of each package's door."""
PACKAGES = {
    "ray": ["ray[train]"],
    "megatron-core": ["megatron-core", "triton"],  # which it imports and does not require
    # What it requires is an older transformers. These are the rest that its workers import, and hydra's own antlr.
    "verl": [
        "--no-deps", "verl", "tensordict", "pyvers", "hydra-core", "omegaconf", "antlr4-python3-runtime==4.9.*",
        "codetiming", "pylatexenc",
    ],
}  # fmt: skip
"""What pip installs for a door, where it is not its name."""


def newest_python() -> str:
    """Returns the newest Python on PATH or among pyenv's, that runs."""
    for version in PYTHONS:
        found = [path] if (path := shutil.which(f"python{version}")) else []
        if shutil.which("pyenv"):
            root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
            found += sorted(glob.glob(f"{root}/versions/{version}.*/bin/python{version}"))  # noqa: PTH207
        for python in found:
            if subprocess.run([python, "-c", "import venv, ssl"], capture_output=True).returncode == 0:
                return python
    return sys.executable


def main() -> int:
    """Installs and tests. Returns the exit status: 1 if a door broke."""
    python = ENVIRONMENT / "bin" / "python"
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    subprocess.run([newest_python(), "-m", "venv", ENVIRONMENT], check=True)
    subprocess.run([python, "tests/install_torch.py", "newest"], check=True, cwd=ROOT)
    installed = ENVIRONMENT / "torch.txt"
    installed.write_text(f"torch=={_version(python, 'torch')}\n")
    lines, broken = [], False
    if failure := _install(python, installed, "-e", ".[train,test]"):
        raise SystemExit(f"the project itself cannot be installed: {failure}")
    for door, tests in DOORS.items():
        failure = _install(python, installed, "--upgrade", *PACKAGES.get(door, [door])) if door != "torch" else ""
        # 5: no test was collected, which a renamed file would bring about
        command = [python, "-m", "pytest", "-q", "-m", "not long and not gpu", *tests]
        run = None if failure else subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if run is not None and run.returncode:
            print(run.stdout[-8000:])
        broken |= bool(run is not None and run.returncode)
        result = (
            f"pip refused it: {failure}" if run is None else (run.stdout.strip().splitlines() or ["no answer"])[-1]
        )
        lines.append(f"{door:15}{_version(python, door):12}{result}")
        print(lines[-1], flush=True)
    print(
        "\nnewest releases on", subprocess.run([python, "-V"], capture_output=True, text=True).stdout, *lines, sep="\n"
    )
    return int(broken)


def _install(python: Path, constraints: Path, *what: str) -> str:
    """Returns pip's error, or nothing."""
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", "-c", constraints]
    done = subprocess.run([*pip, *what], cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "; ".join(errors or [f"exit status {done.returncode}"]) if done.returncode else ""


def _version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip() or "-"


if __name__ == "__main__":
    if sys.argv[1:] == ["--python"]:
        print(newest_python())
    else:
        sys.exit(main())
