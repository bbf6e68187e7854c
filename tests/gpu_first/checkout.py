"""Names the commit of a checkout, also where there is no git repository.

A copy of the files may come without `.git`. A hash of the files that results depend on then identifies them, and a
note that `make gpu-wheels` has left names the commit, if the files are still those of the note.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.gpu_machine import CARRIED, ROOT

FOLDERS = ("benchmarks", "core", "examples", "tests")
FILES = ("Makefile", "constraints.txt", "pyproject.toml", "setup.py", "shardstack.py")
SUFFIXES = (".json", ".py", ".yaml")
NOTE = "checkout.json"


@dataclass(frozen=True)
class Checkout:
    """Identifies the code that results come from."""

    commit: str | None
    """With `+` where a tracked file differs from it; None where it is not known."""
    sources: str
    """Hash of the files that results depend on."""
    is_noted: bool = False
    """Whether the commit is that of the note: later commits may have changed files that are in no hash."""

    def __str__(self) -> str:
        short = self.commit and self.commit[:12] + "+" * self.commit.endswith("+")
        return f"commit {short}" if short else f"an unnamed commit (sources {self.sources[:12]})"


def this_checkout(root: Path = ROOT) -> Checkout:
    """Identifies the files in `root`."""
    sources = hash_of_sources(root)
    commit = _commit_by_git(root)
    if commit is not None:
        return Checkout(commit, sources)
    commit = _commit_by_note(root, sources)
    return Checkout(commit, sources, is_noted=commit is not None)


def is_result(path: str) -> bool:
    """Returns whether a path, relative to the root, is of a file that a run writes and none reads as its source."""
    return path.startswith("benchmarks/results/") or Path(path).name.startswith("golden_values_")


def hash_of_sources(root: Path = ROOT) -> str:
    """Returns a hash of names and contents of the files that results depend on."""
    paths = [root / name for name in FILES] + [p for folder in FOLDERS for p in (root / folder).rglob("*")]
    names = {p.relative_to(root).as_posix(): p for p in paths if p.name in FILES or p.suffix in SUFFIXES}
    whole = hashlib.sha256()
    for name, path in sorted(names.items()):
        if path.is_file() and not is_result(name):
            whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def leave_note(root: Path = ROOT) -> None:
    """Writes the commit next to the wheels, for a copy of this checkout without a repository."""
    (root / CARRIED).mkdir(exist_ok=True)
    (root / CARRIED / NOTE).write_text(json.dumps(asdict(this_checkout(root))) + "\n")


def _commit_by_note(root: Path, sources: str) -> str | None:
    try:
        note = Checkout(**json.loads((root / CARRIED / NOTE).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return note.commit if note.sources == sources else None


def _commit_by_git(root: Path) -> str | None:
    if not (root / ".git").exists():
        return None
    head = git(root, "rev-parse", "HEAD")
    return head and head.strip() + ("+" if git(root, "status", "--porcelain", "-uno") else "")


def git(root: Path, *arguments: str) -> str | None:
    """Returns what git prints; None if it is missing or fails."""
    try:
        ended = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout if ended.returncode == 0 else None
