"""Installs a version of torch for tests on the CPU, without the packages for GPUs that it asks for.

    .venv-torch-2.11.0/bin/python tests/install_torch.py 2.11.0    # or: newest

On Linux the registry has torch built for GPUs: half a gigabyte, and 2.5 more of NVIDIA's libraries, which a test
on the CPU never calls. But the loader refuses to load torch without them. One library that has every function torch
asks for, each answering "no device", takes the place of all. A build that needs none (macOS, Windows, CPU) is left as
it is.

It needs pip alone, and for the library `readelf` and a C compiler.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

OF_GPUS = "cu|nv|nccl"
"""How names of NVIDIA's libraries and functions begin."""
NO_DEVICE = 100
"""cudaErrorNoDevice, and an error of each of the other libraries."""


def install(version: str) -> None:
    """Installs torch into this Python's environment; what else it needs comes with the project."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "torch" if version == "newest" else f"torch=={version}"], check=True)
    installed = importlib.metadata.distribution("torch")
    folder = Path(str(installed.locate_file("torch/lib")))
    if list(folder.glob("libtorch_cuda.so")):
        _drop_requirements(Path(str(installed.locate_file(f"torch-{installed.version}.dist-info/METADATA"))))
        _replace_libraries(folder)


def _drop_requirements(metadata: Path) -> None:
    """Drops requirements that pip would fetch with the next package that needs torch."""
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(re.sub(r"Requires-Dist: (nvidia|cuda|triton)\b.*\n", "", text), encoding="utf-8")


def _replace_libraries(folder: Path) -> None:
    libraries = set(re.findall(rf"\(NEEDED\).*\[(lib(?:{OF_GPUS})\S+)\]", _readelf(folder, "--dynamic")))
    functions: dict[str, list[str]] = defaultdict(list)  # by the version of the library that they are asked for with
    for name, version in sorted(set(re.findall(_undefined(), _readelf(folder, "--dyn-syms")))):
        functions[version].append(name)
    everything = folder / "libno_device.so"
    with tempfile.TemporaryDirectory() as temporary:
        source, versions = Path(temporary, "functions.c"), Path(temporary, "versions.map")
        source.write_text("".join(_answer(name) for names in functions.values() for name in names))
        versions.write_text(
            "".join(f"{version} {{ {'; '.join(names)}; }};\n" for version, names in functions.items() if version)
        )
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,--version-script={versions}", "-o", everything, source]
        subprocess.run(command, check=True)
    for name in libraries:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(everything.name)


def _answer(function: str) -> str:
    """In C. Torch asks for the text of an error that it is given, to raise it."""
    if function.endswith(("GetErrorString", "GetErrorName")):
        return f'const char *{function}(void) {{ return "no device"; }}\n'
    return f"int {function}(void) {{ return {NO_DEVICE}; }}\n"


def _undefined() -> str:
    """Returns a function that a library asks another one for, as `readelf` writes it, with the version if it wants
    one."""
    return rf"\bUND ((?:__)?(?:{OF_GPUS})\w+)(?:@(\S+))?"


def _readelf(folder: Path, what: str) -> str:
    command = ["readelf", "--wide", what, *sorted(folder.glob("libtorch*.so")), *sorted(folder.glob("libc*.so"))]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    install(sys.argv[1])
