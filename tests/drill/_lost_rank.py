"""A rank of the GPT example that writes which generation it is in, to a file of its own in the folder DRILL_PLACES."""

from __future__ import annotations

import os
from pathlib import Path

from core.training.launch import generations
from core.training.launch.entry import run_command
from core.training.launch.messages import Generation
from tests.unit._program import load_program

_enter = generations._Launcher.enter


def _noted(launcher: generations._Launcher) -> Generation:
    generation = _enter(launcher)
    path = Path(os.environ["DRILL_PLACES"], str(os.getpid()))
    path.with_suffix(".new").write_text(f"{generation.number} {generation.rank}")
    path.with_suffix(".new").rename(path)
    return generation


if __name__ == "__main__":
    generations._Launcher.enter = _noted  # type: ignore[method-assign]
    run_command(load_program("pretrain_gpt").main)
