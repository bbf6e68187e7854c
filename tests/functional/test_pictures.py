"""A run describes its wrapped model, and draws the memory of a step on request."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit._program import TINY, run_program


def test_a_run_describes_its_model_and_draws_its_memory(corpus: Path, tmp_path: Path) -> None:
    flags = ("--data-path", corpus, "--save", "run", "--train-iters", 4, "--use-torch-fsdp2", "--profile-memory")
    ended = run_program("pretrain_gpt", *TINY, *flags, folder=tmp_path)
    assert ended.status == 0, ended.err
    assert "TorchFullyShardedDataParallel: " in ended.err and "decoder.layers.1" in ended.err
    assert "iteration 3: drew run/memory.png" in ended.err
    page = (tmp_path / "run" / "model.html").read_text()
    assert "decoder.layers.1" in page.replace("<wbr>", "")
    assert (tmp_path / "run" / "memory.png").stat().st_size > 1000
    series = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert series["iteration"] == 3
    assert series["peak_bytes"] > series["bytes_at_peak"]["parameters"] > 0


def test_other_runs_draw_no_memory(corpus: Path, tmp_path: Path) -> None:
    flags = ("--data-path", corpus, "--save", "run", "--train-iters", 1)
    ended = run_program("pretrain_gpt", *TINY, *flags, folder=tmp_path)
    assert ended.status == 0, ended.err
    assert "DistributedDataParallel: " in ended.err
    assert (tmp_path / "run" / "model.html").exists()
    assert not (tmp_path / "run" / "memory.png").exists()
