"""A rank of the GPT example whose steps take a while, and which plants one fault of its own, once over all restarts.

DRILL_FAULT is ``kind@iteration``, DRILL_ONCE a file that is made when the fault is planted, DRILL_STEP_S how long a
step takes at least.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import torch

from core.training import loop
from core.training.launch.entry import run_command
from tests.unit._program import load_program

_train_step = loop.train_step
_kind, _, _at = os.environ.get("DRILL_FAULT", "").partition("@")
_once = Path(os.environ.get("DRILL_ONCE", "/nonexistent/once"))
_steps = 0
LITTLE_ROOM_STEPS = 4
"""Steps that a full disk lasts, where it is the log's alone."""


def _step(model, *arguments, **settings):
    global _steps
    time.sleep(float(os.environ.get("DRILL_STEP_S", "0")))
    _steps += 1
    if _kind and _steps == int(_at) and not _once.exists():
        if os.environ["RANK"] == "0" or _kind == "nan":
            _plant(model)
        torch.distributed.barrier()
        _once.touch()
    if _kind == "full log" and _steps == int(_at) + LITTLE_ROOM_STEPS:
        _allow_files_of(resource.RLIM_INFINITY)
    return _train_step(model, *arguments, **settings)


def _plant(model) -> None:
    if _kind == "nan":
        with torch.no_grad():
            next(iter(model.parameters())).view(-1)[:1] = torch.nan
    elif _kind in ("full log", "full disk"):
        _allow_files_of(100)


def _allow_files_of(num_bytes: int) -> None:
    """The kernel refuses to let a file of this process grow beyond, as it does when a disk is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


if __name__ == "__main__":
    loop.train_step = _step
    run_command(load_program("pretrain_gpt").main)
