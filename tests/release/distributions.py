"""Builds the distributions from the tracked files, and checks what the wheel has."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
DATA = (".html", ".json")
"""Suffixes of files that modules read."""


class ReleaseError(Exception):
    """What stands in the way of a release, and what to do."""


def version_of(root: Path = REPOSITORY) -> str:
    """Returns the version in a checkout's `core/__init__.py`."""
    text = (root / "core" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError("core/__init__.py has no line `__version__ = ...`")
    return found[1]


def copy_tracked(folder: Path) -> Path:
    """Copies the tracked files as they are now, so that nothing else gets into a distribution."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def build(root: Path, target: Path, *options: str) -> tuple[Path, Path]:
    """Builds the source distribution, and the wheel from it; returns both."""
    run([sys.executable, "-m", "build", "--outdir", str(target), *options, str(root)])
    (source,), (wheel,) = target.glob("shardstack-*.tar.gz"), target.glob("shardstack-*.whl")
    return source, wheel


def run(command: list[str], *, folder: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Runs a program and returns what it prints.

    Raises:
        ReleaseError: it fails, or takes half an hour.
    """
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"{' '.join(command)} takes more than half an hour") from error
    if ended.returncode:
        raise ReleaseError(f"{' '.join(command)} ended with status {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout + ended.stderr


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata_of(wheel: Path) -> Message:
    files = files_of(wheel)
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(files[name].decode())


def expected_files(root: Path) -> set[str]:
    """Returns the files that a wheel has besides metadata: `core` as `shardstack`, the second name, the programs."""
    package = {
        f"shardstack/{path.relative_to(root / 'core').as_posix()}"
        for path in (root / "core").rglob("*")
        if path.suffix in (".py", *DATA) or path.name == "py.typed"
    }
    programs = {f"shardstack/examples/gpt/{path.name}" for path in (root / "examples" / "gpt").glob("*.py")}
    return package | programs | {"core.py"}


def check_files(wheel: Path, root: Path) -> None:
    """Raises a ReleaseError for files that a wheel has and should not have, or lacks."""
    found = {name for name in files_of(wheel) if ".dist-info/" not in name}
    if wrong := found ^ expected_files(root):
        raise ReleaseError(f"{wheel.name} has, or lacks: {', '.join(sorted(wrong))}; see packages in setup.py")
