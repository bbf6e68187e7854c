"""Takes the archive of a run of `make gpu-first` into this checkout: `make gpu-results ARCHIVE=...`.

Golden values go to the cases of `tests/functional`, reports, log and summary to `benchmarks/results`. Results of
another commit than this checkout's are refused. An archive is a stranger's: of its files only those with known names
are read, each as what it has to be, and nothing is written before all are.
"""

from __future__ import annotations

import json
import re
import sys
import tarfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.functional._cases import CaseError
from tests.functional._golden import explain_update, parse_golden, read_golden
from tests.gpu_first.checkout import Checkout, git, is_result, this_checkout
from tests.gpu_first.results import GOLDEN, LOG, PARTS, SCHEMA, SUMMARY
from tests.gpu_machine import ROOT, gpu_slug

MOST_FILES, MOST_BYTES = 1000, 64 * 2**20
"""Limits of an archive, all its files together."""
_GOLDEN = re.compile(rf"{GOLDEN}/([\w-]{{1,80}})/(golden_values_([\w-]{{1,80}})\.json)", re.ASCII)
_REPORT = re.compile(rf"{PARTS}/(gpt_throughput-[\w.-]{{1,120}}\.json)", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}\+?")


class ArchiveError(ValueError):
    """An archive that cannot be taken in; one line that says why."""


@dataclass(frozen=True)
class Run:
    """What an archive's summary says of its run."""

    checkout: Checkout
    device: str
    day: str

    @property
    def slug(self) -> str:
        """The GPU's name as it is in names of files."""
        return gpu_slug(self.device)


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
    contents = read_archive(archive)
    run = _run_of(archive, contents)
    check_commit(run.checkout, this_checkout(root), root)
    folder = root / "benchmarks" / "results"
    files: dict[Path, bytes] = {}
    lines: dict[Path, str] = {}
    for name, content in contents.items():
        if golden := _GOLDEN.fullmatch(name):
            path = root / "tests" / "functional" / "cases" / golden[1] / golden[2]
            files[path], lines[path] = content, _explain_golden(path, content, golden[3], run)
        elif report := _REPORT.fullmatch(name):
            if (device := _json(name, content).get("device")) != run.device:
                raise ArchiveError(f"{name} is of device {device!r}, and the run was on {run.device!r}")
            path = _free(folder / report[1], content, files)
            files[path], lines[path] = content, "throughput"
    for name, suffix in ((LOG, ".txt"), (SUMMARY, ".json")):
        path = _free(folder / f"gpu_first-{run.slug}-{run.day}{suffix}", contents[name], files)
        files[path], lines[path] = contents[name], name
    for path, content in files.items():
        path.write_bytes(content)
    return [f"{path.relative_to(root).as_posix()}: {line}" for path, line in lines.items()]


def check_commit(of_results: Checkout, here: Checkout, root: Path) -> None:
    """Refuses results of another commit. Commits of results alone do not count.

    Raises:
        ArchiveError: they are of another one.
    """
    remedy = "check that commit out and take them in there, or run again"
    if of_results.sources != here.sources:
        raise ArchiveError(f"these results are of {of_results}, and this checkout is {here}: files differ; {remedy}")
    commit = of_results.commit
    if commit is None or here.commit is None or commit.endswith("+"):
        return  # the files are equal, and nothing else is known
    if of_results.is_noted:  # later commits, if any, changed no file in the hash
        is_same = git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None
    else:
        changed = git(root, "diff", "--name-only", commit, "HEAD")
        is_same = changed is not None and all(map(is_result, changed.splitlines()))
    if not is_same:
        raise ArchiveError(f"these results are of {of_results}, and this checkout is of {here}; {remedy}")


def read_archive(archive: Path) -> dict[str, bytes]:
    """Returns the contents of an archive's plain files by their names.

    Raises:
        ArchiveError: it cannot be read, is too large, or has no summary or log.
    """
    contents: dict[str, bytes] = {}
    size = 0
    try:
        with tarfile.open(archive, "r:gz") as opened:
            for member in opened:
                size += member.size
                if not member.isreg() or len(contents) == MOST_FILES or size > MOST_BYTES:
                    raise ArchiveError(
                        f"{archive}: {member.name[:200]!r} is no plain file, or one too many: an archive has at most "
                        f"{MOST_FILES} of {MOST_BYTES} bytes together"
                    )
                stream = opened.extractfile(member)
                contents[member.name] = stream.read() if stream else b""
    except (OSError, ValueError, tarfile.TarError, EOFError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"{archive} cannot be read: {error}; give the archive of a results folder") from None
    if missing := [name for name in (SUMMARY, LOG) if name not in contents]:
        raise ArchiveError(f"{archive} has no {missing[0]}; give the archive of a results folder of make gpu-first")
    return contents


def _run_of(archive: Path, contents: dict[str, bytes]) -> Run:
    summary = _json(SUMMARY, contents[SUMMARY])
    try:
        commit, device = summary["commit"], summary["device"]
        day = datetime.fromisoformat(summary["date"]).date().isoformat()
        is_well_formed = (
            summary["schema"] == SCHEMA
            and (commit is None or _COMMIT.fullmatch(commit) is not None)
            and re.fullmatch(r"[0-9a-f]{64}", summary["sources"]) is not None
            and 0 < len(gpu_slug(device)) <= 80
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        is_well_formed = False
    if not is_well_formed:
        raise ArchiveError(f"{archive}: {SUMMARY} is not as this command writes it, of schema {SCHEMA}; run again")
    return Run(Checkout(commit, summary["sources"], summary.get("is_noted") is True), device, day)


def _json(name: str, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"{name} is no JSON ({error}); the run was cut off while it wrote it") from None
    if not isinstance(document, dict):
        raise ArchiveError(f"{name} has a {type(document).__name__} in the place of an object")
    return document


def _explain_golden(path: Path, content: bytes, slug: str, run: Run) -> str:
    """Returns what new golden values change; refuses those of another device, or of no case here."""
    where = f"{path.parent.name}/{path.name}"
    if not path.parent.is_dir():
        raise ArchiveError(f"there is no case {path.parent.name} here, and the archive has golden values of it")
    try:
        golden = parse_golden(content.decode(), where)
        before = read_golden(path) if path.exists() else None
    except (CaseError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{where}: {error}") from None
    if not golden.device == slug == run.slug:
        raise ArchiveError(f"{where} is of device {golden.device!r}, and the run was on {run.slug}")
    return "; ".join(explain_update(before, golden))


def _free(path: Path, content: bytes, taken: Collection[Path]) -> Path:
    """Returns a path that has this content, or is free: the given one, or the next with a number."""
    number, candidate = 1, path
    while candidate in taken or (candidate.exists() and candidate.read_bytes() != content):
        number += 1
        candidate = path.with_stem(f"{path.stem}-{number}")
    return candidate


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
