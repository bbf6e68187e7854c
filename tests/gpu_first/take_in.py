"""Takes the archive of a run of `make gpu-first` into this checkout: `make gpu-results ARCHIVE=...`.

Golden values go to the cases of `tests/functional`, reports, log and summary to `benchmarks/results`. Results of
another commit than this checkout's are refused. Nothing of the archive is written that is not known by its name, and
read as what it has to be.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.functional._cases import CaseError
from tests.functional._golden import explain_update, parse_golden, read_golden
from tests.gpu_first.checkout import Checkout, git, is_result, this_checkout
from tests.gpu_first.results import GOLDEN, LOG, PARTS, SCHEMA, SUMMARY
from tests.gpu_machine import ROOT, gpu_slug

MOST_BYTES = 64 * 2**20
"""Of a file in an archive."""
_GOLDEN = re.compile(rf"{GOLDEN}/([\w-]+)/(golden_values_([\w-]+)\.json)")
_REPORT = re.compile(rf"{PARTS}/(gpt_throughput-[\w.-]+\.json)")


class ArchiveError(ValueError):
    """An archive that cannot be taken in; one line that says why."""


def main(arguments: Sequence[str]) -> int:
    """Prints what was written; returns 2 and writes nothing where the archive is refused."""
    if len(arguments) != 1 or not arguments[0]:
        print("error: name an archive: make gpu-results ARCHIVE=gpu-first-....tar.gz", file=sys.stderr)
        return 2
    try:
        lines = take_in(Path(arguments[0]))
    except ArchiveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def take_in(archive: Path, root: Path = ROOT) -> list[str]:
    """Writes the results of an archive into a checkout; returns a line for each file.

    Raises:
        ArchiveError: it cannot be read, or is of another commit, device or form than it should. Nothing was written.
    """
    contents = _read(archive)
    summary = _summary(archive, contents)
    check_commit(Checkout(summary["commit"], summary["sources"]), this_checkout(root), root)
    slug, day = gpu_slug(summary["device"]), summary["date"][:10]
    new: dict[Path, bytes] = {}
    lines: dict[Path, str] = {}
    for name, content in contents.items():
        if golden := _GOLDEN.fullmatch(name):
            path = root / "tests" / "functional" / "cases" / golden[1] / golden[2]
            lines[path] = _explain_golden(path, content, slug if golden[3] == slug else "")
            new[path] = content
        elif report := _REPORT.fullmatch(name):
            _json(name, content)
            path = _free(root / "benchmarks" / "results" / report[1], content)
            new[path], lines[path] = content, "throughput"
    for name, suffix in ((LOG, ".txt"), (SUMMARY, ".json")):
        path = _free(root / "benchmarks" / "results" / f"gpu_first-{slug}-{day}{suffix}", contents.get(name, b""))
        new[path], lines[path] = contents.get(name, b""), name
    for path, content in new.items():
        path.write_bytes(content)
    return [f"{path.relative_to(root).as_posix()}: {line}" for path, line in lines.items()]


def check_commit(theirs: Checkout, ours: Checkout, root: Path) -> None:
    """Refuses results of another commit. Commits that add nothing but results count as the one before them.

    Raises:
        ArchiveError: they are of another one.
    """
    remedy = "check that commit out and take them in there, or run again"
    if theirs.sources != ours.sources:
        raise ArchiveError(f"these results are of {theirs}, and this checkout is {ours} with other files; {remedy}")
    if theirs.commit is None or ours.commit is None or theirs.commit.endswith("+"):
        return  # the files are equal, and nothing else is known
    changed = git(root, "diff", "--name-only", theirs.commit, "HEAD")
    if changed is None or not all(map(is_result, changed.splitlines())):
        raise ArchiveError(f"these results are of {theirs}, and this checkout is of {ours}; {remedy}")


def _read(archive: Path) -> dict[str, bytes]:
    """Returns the contents of an archive's plain files by their names."""
    contents = {}
    try:
        with tarfile.open(archive, "r:gz") as opened:
            for member in opened:
                if not member.isreg() or member.size > MOST_BYTES:
                    raise ArchiveError(f"{archive}: {member.name} is no plain file of at most {MOST_BYTES} bytes")
                stream = opened.extractfile(member)
                contents[member.name] = stream.read() if stream else b""
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ArchiveError(f"{archive} cannot be read: {error}; give the archive of a results folder") from None
    return contents


def _summary(archive: Path, contents: dict[str, bytes]) -> dict[str, Any]:
    if SUMMARY not in contents:
        raise ArchiveError(f"{archive} has no {SUMMARY}; give the archive of a results folder of make gpu-first")
    summary = _json(SUMMARY, contents[SUMMARY])
    kinds = {"schema": int, "date": str, "device": str, "sources": str, "commit": (str, type(None))}
    if wrong := [key for key, kind in kinds.items() if not isinstance(summary.get(key, 0.0), kind)]:
        raise ArchiveError(f"{archive}: {SUMMARY} has no {', '.join(wrong)} as this command writes them; run again")
    if summary["schema"] != SCHEMA or not re.match(r"\d{4}-\d\d-\d\d", summary["date"]):
        raise ArchiveError(f"{archive}: {SUMMARY} is of schema {summary['schema']}, and this reads {SCHEMA}")
    return summary


def _json(name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError as error:
        raise ArchiveError(f"{name} is no JSON ({error}); the run was cut off while it wrote it") from None
    if not isinstance(document, dict):
        raise ArchiveError(f"{name} has a {type(document).__name__} in the place of an object")
    return document


def _explain_golden(path: Path, content: bytes, slug: str) -> str:
    """Returns what new golden values change; refuses those of another device, or of no case here."""
    if not path.parent.is_dir():
        raise ArchiveError(f"there is no case {path.parent.name} here, and the archive has golden values of it")
    try:
        golden = parse_golden(content.decode(), f"{path.parent.name}/{path.name}")
        before = read_golden(path) if path.exists() else None
    except (CaseError, UnicodeDecodeError) as error:
        raise ArchiveError(str(error)) from None
    if golden.device != slug:
        raise ArchiveError(
            f"{path.parent.name}/{path.name} is of device {golden.device}; the run was on {slug or '?'}"
        )
    return "; ".join(explain_update(before, golden))


def _free(path: Path, content: bytes) -> Path:
    """Returns a path that is free or has this content: its own, or the next with a number."""
    number, candidate = 1, path
    while candidate.exists() and candidate.read_bytes() != content:
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
