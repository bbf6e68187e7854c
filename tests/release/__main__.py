"""Builds the distributions into `dist/`, checks them in a new environment, and tags the commit.

python -m tests.release             the checks, and the tag
python -m tests.release --no-tag    a rehearsal, of files that need not be committed
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.release.distributions import REPOSITORY, ReleaseError, build, check_files, copy_tracked, run, version_of
from tests.release.installed import check_installed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-tag", action="store_true", help="only build and check")
    options = parser.parse_args(arguments)
    version = version_of()
    try:
        if not options.no_tag:
            check_ready(version, REPOSITORY)
        with tempfile.TemporaryDirectory(prefix="release-") as scratch:
            for line in build_and_check(Path(scratch), REPOSITORY / "dist"):
                print(line, flush=True)
        if not options.no_tag:
            run(
                [
                    "git",
                    "-C",
                    str(REPOSITORY),
                    "tag",
                    "--annotate",
                    f"v{version}",
                    "--message",
                    f"shardstack {version}",
                ]
            )
            print(f"tagged v{version}; publish it: git push origin main v{version}")
    except ReleaseError as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    return 0


def check_ready(version: str, root: Path) -> None:
    """Raises a ReleaseError unless the changelog dates the version, all is committed, and there is no such tag."""
    headings = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if not any(re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading) for heading in headings):
        raise ReleaseError(f"CHANGELOG.md has no heading `## {version} - YEAR-MONTH-DAY`; write it, and commit")
    git = ["git", "-C", str(root)]
    if changed := run([*git, "status", "--porcelain"]):
        raise ReleaseError(f"these files are not committed:\n{changed}")
    if run([*git, "tag", "--list", f"v{version}"]):
        raise ReleaseError(f"v{version} is tagged already; raise the version in core/__init__.py")


def build_and_check(scratch: Path, target: Path) -> Iterator[str]:
    """Builds the distributions into an empty `target`, and yields a line for each check that passes."""
    shutil.rmtree(target, ignore_errors=True)
    root = copy_tracked(scratch / "checkout")
    source, wheel = build(root, target)
    yield f"built {source.name}, and {wheel.name} from it"
    run([sys.executable, "-m", "twine", "check", "--strict", str(source), str(wheel)])
    check_files(wheel, root)
    yield "the metadata is valid, and the wheel has the package and nothing else"
    for name, extras in (("without extras", ""), ("with the extra train", "[train]")):
        environment, folder = scratch / f"environment{extras}", scratch / f"folder{extras}"
        run([sys.executable, "-m", "venv", str(environment)])
        folder.mkdir()
        python = environment / "bin" / "python"
        constraints = str(root / "constraints.txt")
        run([str(python), "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}{extras}"])
        yield f"{name}, next to another project's core:\n{check_installed(python, folder, has_extras=bool(extras))}"


if __name__ == "__main__":
    sys.exit(main())
