"""The lines of Python in README.md are those of examples/minimal.py, which runs."""

from __future__ import annotations

from pathlib import Path

from tests.unit._program import REPOSITORY, programs_in, run_program

EXAMPLE = REPOSITORY / "examples" / "minimal.py"


def test_the_readmes_lines_are_those_of_the_example() -> None:
    (lines,) = programs_in(REPOSITORY / "README.md")
    imports, loop = lines.split("\n\n")
    program = EXAMPLE.read_text()
    assert set(imports.splitlines()) <= set(program.splitlines())
    assert loop in program and len(lines.splitlines()) <= 15


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    ended = run_program(EXAMPLE, folder=tmp_path, ranks=2)
    assert ended.status == 0, ended.err
    assert [line.split(":")[0] for line in ended.out.splitlines()] == ["step 0", "step 1", "step 2"]
