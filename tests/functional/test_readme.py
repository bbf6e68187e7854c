"""The program in README.md runs as it is printed there."""

from __future__ import annotations

from pathlib import Path

from tests.functional._program import REPOSITORY, programs_in, run_scripts


def test_the_readmes_program_runs(tmp_path: Path) -> None:
    programs = programs_in(REPOSITORY / "README.md")
    assert len(programs) == 1
    ended = run_scripts(programs, tmp_path)
    assert ended.status == 0, ended.err
    assert [line.split(":")[0] for line in ended.out.splitlines()] == ["step 0", "step 1", "step 2"]
