"""`python -m core.verify` as a user calls it: next to a module of the user's, with an exit status to go by."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit._program import LIMIT_S, Ended, program_environment, run_program

MODULE = """
import torch
from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return 0.5 * y if type(self).__name__ == "FSDPNet" else y  # torch's name for a sharded module


def build():
    model = Net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(model, index):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        return (model(x) - x.flip(1)).square().mean()

    return model, loss
"""


COMMAND = 'import runpy\nrunpy.run_module("core.verify", run_name="__main__")\n'


def _verify(folder: Path, *arguments: str) -> Ended:
    """Runs the command on two ranks that are forked, as under a launcher."""
    (folder / "command.py").write_text(COMMAND)
    return run_program(folder / "command.py", *arguments, folder=folder, ranks=2, SHARDSTACK_DEVICE="cpu")


def _verify_on_its_own_ranks(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
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
    assert ended.status == 1, ended
    lines = ended.out.splitlines()
    assert lines[0] == "my_module:build on 2 ranks (cpu): 3 steps of 2 micro-batches, sgd"
    assert lines[1].split(maxsplit=1) == ["ddp", "equal within 7.62939e-06, as one process"]
    assert lines[2].split(maxsplit=1) == ["zero2", "equal, bit by bit, as ddp"]
    assert lines[3].split(maxsplit=1)[1].startswith("parts at step 0: the loss")
    assert lines[4] == "not equal: fsdp2"


@pytest.mark.long  # a start takes ten seconds of imports
def test_it_starts_ranks_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "my_module.py").write_text(MODULE)
    one_rank = ("--nproc-per-node", "1", "--wrappers", "zero1")
    equal = _verify_on_its_own_ranks(tmp_path, "my_module:build", "--steps", "1", *one_rank)
    assert equal.returncode == 0 and equal.stdout.splitlines()[-1] == "equal", equal


def test_a_module_that_does_not_import_is_one_line(tmp_path: Path) -> None:
    ended = _verify(tmp_path, "my_modul:build")
    assert ended.status == 2 and ended.out == "", ended
    (line,) = ended.err.splitlines()
    assert line.startswith("error: my_modul does not import (ModuleNotFoundError: No module named 'my_modul'); run")
