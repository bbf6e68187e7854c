"""The program in README.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.functional._program import REPOSITORY, program_environment


def test_the_readmes_program_runs(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 1
    script = tmp_path / "script.py"
    script.write_text(programs[0])
    ended = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split(":")[0] for line in ended.stdout.splitlines()] == ["step 0", "step 1", "step 2"]
