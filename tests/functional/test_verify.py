"""`python -m core.verify` as a user calls it: next to a module of the user's, with an exit status to go by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.functional._program import LIMIT_S, program_environment

MODULE = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model[2].bias.register_hook(lambda gradient: 0.5 * gradient)  # FSDP2 does not call it

    def loss(model, index):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        return (model(x) - x.flip(1)).square().mean()

    return model, loss
"""


def _verify(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "core.verify", *arguments],
        cwd=folder,
        env=program_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_a_model_of_ones_own_is_verified(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(MODULE)
    ended = _verify(tmp_path, "my_module:build", "--steps", "3", "--wrappers", "ddp", "zero2", "fsdp2")
    assert ended.returncode == 1, ended
    lines = ended.stdout.splitlines()
    assert lines[0] == "my_module:build on 2 ranks (cpu): 3 steps of 2 micro-batches, sgd"
    assert lines[1].split(maxsplit=1) == ["ddp", "equal within 7.62939e-06, as one process"]
    assert lines[2].split(maxsplit=1) == ["zero2", "equal, bit by bit, as ddp"]
    assert lines[3].split(maxsplit=1)[1].startswith("parts at step 0: the gradient of 2.bias is off by 1.0e+00")
    assert lines[4] == "not equal: fsdp2"
    equal = _verify(tmp_path, "my_module:build", "--steps", "1", "--nproc-per-node", "1", "--wrappers", "zero1")
    assert equal.returncode == 0 and equal.stdout.splitlines()[-1] == "equal", equal


def test_a_module_that_does_not_import_is_one_line(tmp_path: Path) -> None:
    ended = _verify(tmp_path, "my_modul:build")
    assert ended.returncode == 2 and ended.stdout == "", ended
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: my_modul does not import (ModuleNotFoundError: No module named 'my_modul'); run")
