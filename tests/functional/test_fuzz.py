"""The fuzzer over every reader, for a moment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit._program import REPOSITORY, program_environment


@pytest.mark.long
def test_a_minute_of_hostile_files() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--minutes", "1", "--seed", "5"],
        cwd=REPOSITORY,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "hostile files: checkpoint" in ended.stdout
