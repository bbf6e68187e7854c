"""Plants every fault in a copy of the checkout and runs the tests that have to catch it.

python -m tests.mutation                 all; the exit status is 0 if each was caught
python -m tests.mutation --only norm     those with this in their name
python -m tests.mutation --write         all, and the table of docs/mutations.md
python -m tests.mutation --sample        how many the sample of compositions catches by itself; not all have to be
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutation.faults import MUTATIONS
from tests.mutation.mutation import Mutation
from tests.mutation.plant import REPOSITORY, file_of, mutated

PAGE = REPOSITORY / "docs" / "mutations.md"
COPIED = (
    "core",
    "tests",
    "benchmarks",
    "examples",
    "docs",
    "alias",
    "pyproject.toml",
    "setup.py",
    "shardstack.py",
    "README.md",
    "Makefile",
)
FAILED, PASSED = 1, 0
"""Exit statuses of pytest; any other is no test that failed."""

LIMIT_S = 1800

SAMPLE = ("tests/functional/test_compositions.py::test_a_composition_trains_as_one_process_does",)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="plant only faults with this in their name")
    parser.add_argument("--write", action="store_true", help="write the table of docs/mutations.md")
    parser.add_argument("--sample", action="store_true", help="run the sample of compositions alone")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name]
    if not chosen:
        parser.error(f"no fault has {options.only!r} in its name")
    if options.sample and options.write:
        parser.error("--write is given with --sample, which does not run the tests that the table names; drop one")
    if options.sample:
        chosen = [dataclasses.replace(mutation, tests=SAMPLE) for mutation in chosen]
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copy = _copied(Path(scratch))
        print(f"{len(chosen)} faults; their tests without any fault first", flush=True)
        status, output = _run(copy, dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        if status != PASSED:
            print(f"{output[-4000:]}\nthese tests do not pass as they are, so that they show nothing")
            return 2
        caught = {mutation: _caught_by(copy, mutation) for mutation in chosen}
    survivors = [mutation.name for mutation, test in caught.items() if test is None]
    if options.write and not survivors:
        write_table(caught)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught", flush=True)
    for name in survivors:
        print(f"not caught: {name}")
    return 1 if survivors and not options.sample else 0


def _copied(scratch: Path) -> Path:
    for name in COPIED:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, scratch / name)
    return scratch


def _caught_by(copy: Path, mutation: Mutation) -> str | None:
    """Returns the first test that fails for the fault; None if none does."""
    file = file_of(mutation, copy)
    sound = file.read_text(encoding="utf-8")
    file.write_text(mutated(mutation, copy), encoding="utf-8")
    start = time.monotonic()
    try:
        status, output = _run(copy, mutation.tests)
    finally:
        file.write_text(sound, encoding="utf-8")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    test = found.group(1) if found and status == FAILED else None
    print(f"{time.monotonic() - start:5.0f} s  {mutation.name}: {test or f'NOT CAUGHT (status {status})'}", flush=True)
    return test


def _run(copy: Path, tests: Sequence[str] | dict[str, None]) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    kinds = "not gpu" if tuple(tests) == SAMPLE else "not long and not gpu"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", kinds, *tests]
    try:
        ended = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, "no end"
    return ended.returncode, ended.stdout + ended.stderr


def write_table(caught: dict[Mutation, str | None]) -> None:
    """Puts which test caught which fault into the page, in place of the table there."""
    text = PAGE.read_text(encoding="utf-8")
    rows = ["| fault | where | caught by |", "| --- | --- | --- |"]
    rows += [f"| {m.name} | `{m.function.removeprefix('core.')}` | `{_short(test)}` |" for m, test in caught.items()]
    head, _, _ = text.partition("| fault |")
    PAGE.write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


def _short(test: str | None) -> str:
    path, _, name = (test or "").partition("::")
    return f"{Path(path).relative_to('tests')}::{name.partition('[')[0]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
