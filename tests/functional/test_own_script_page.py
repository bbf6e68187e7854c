"""docs/own-script.md: its program runs as its reader makes it, from the plain script by each of its changes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit._program import REPOSITORY, Ended, program_environment, programs_in, run_program

PAGE = REPOSITORY / "docs" / "own-script.md"
PLAIN, EXPORT, CHECK = programs_in(PAGE)
CHANGES = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), re.DOTALL)
CONFIGS = dict.fromkeys(re.findall(r"^\| `(\w*Config\(.*?\))` \|", PAGE.read_text(), re.MULTILINE))
ZERO3 = "FullyShardedDataParallelConfig"


def changed(program: str, change: str) -> str:
    """Returns a program after a change: in each part the lines with a minus give way to those with a plus."""
    for part in re.split(r"^@@.*\n", change, flags=re.MULTILINE)[1:]:
        lines = [(line[:1], line[1:]) for line in part.splitlines(keepends=True)]
        old = "".join(text for sign, text in lines if sign != "+")
        new = "".join(text for sign, text in lines if sign != "-")
        assert program.count(old) == 1, f"{old!r} is not there once"
        program = program.replace(old, new)
    return program


SHARDED = changed(PLAIN, CHANGES[0])
RESUMED = changed(SHARDED, CHANGES[1])
LOGGED = changed(RESUMED, CHANGES[2])


def _under(program: str, config: str) -> str:
    name = config.partition("(")[0]
    return program.replace(f"import {ZERO3},", f"import {name},").replace(f"{ZERO3}()", config)


def _run(program: str, folder: Path, ranks: int = 0) -> Ended:
    script = folder / "train.py"
    script.write_text(program)
    ended = run_program(script, folder=folder, ranks=ranks)
    assert ended.status == 0, ended.err
    return ended


def _losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", out, re.MULTILINE)]


@pytest.fixture(scope="module")
def plain_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return _losses(_run(PLAIN, tmp_path_factory.mktemp("plain")).out)


def test_the_page_names_wrappers_and_shows_losses(plain_losses: list[float]) -> None:
    assert len(CONFIGS) == 5 and len(CHANGES) == 3
    shown = _losses(re.sub("^ +", "", PAGE.read_text(), flags=re.MULTILINE))
    assert shown == pytest.approx(plain_losses, abs=0.02)  # another processor rounds otherwise


@pytest.mark.parametrize("config", CONFIGS)
def test_the_sharded_script_has_the_plain_losses(config: str, plain_losses: list[float], tmp_path: Path) -> None:
    losses = _losses(_run(_under(SHARDED, config), tmp_path, ranks=2).out)
    # Sums of a batch in another order, 40 updates of AdamW long, which divides roundings by themselves; four decimals.
    assert losses == pytest.approx(plain_losses, abs=2e-3)
    assert losses[-1] < losses[0] - 1


def test_a_run_goes_on_and_is_exported(plain_losses: list[float], tmp_path: Path) -> None:
    _run(RESUMED, tmp_path, ranks=2)
    shutil.rmtree(tmp_path / "run" / "iter_0000040")
    (tmp_path / "run" / "latest").write_text("iter_0000020")
    out = _run(_under(RESUMED, list(CONFIGS)[1]), tmp_path, ranks=4).out
    losses = _losses(out)
    assert "goes on at step 20\n" in out and losses == pytest.approx(plain_losses[2:], abs=2e-3)  # steps 20 and 30
    (tmp_path / "export.py").write_text(EXPORT)
    assert run_program(tmp_path / "export.py", folder=tmp_path).status == 0
    (tmp_path / "read.py").write_text(
        "import torch\nfrom train import GPT\n"
        "model = GPT()\nmodel.load_state_dict(torch.load('gpt.pt', weights_only=True))\n"
    )
    assert run_program(tmp_path / "read.py", folder=tmp_path).status == 0


def test_the_log_has_a_line_for_each_tenth_step(tmp_path: Path) -> None:
    _run(LOGGED, tmp_path, ranks=2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 10, 20, 30, 39]
    assert {"loss", "lr", "step_s", "tokens_per_s", "memory_bytes", "skew"} <= lines[-1].keys()
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


@pytest.mark.long
def test_the_model_of_the_page_is_checked(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "check.py").write_text(CHECK)
    command = [sys.executable, "-m", "core.verify", "check:build", "--steps", "3"]
    result = subprocess.run(command, cwd=tmp_path, env=program_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal" in result.stdout and "parts" not in result.stdout
