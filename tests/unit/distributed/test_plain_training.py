"""Wrappers and the optimizer train a model of plain torch modules, and load no layer, model or application."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.distributed import _plain_training

LIBRARY = {"base", "comm", "dist_checkpointing", "distributed", "optimizer", "process_groups", "process_groups_config"}
"""Rooms of `core` below the wall, as in ``[tool.importlinter]`` of `pyproject.toml`, without `parallel_state`, which
none of them imports, and without the plug-ins below."""
PLUG_INS = {
    "base.foreign_initialization": "no parameter starts on meta",
    "diagnostics": "nothing fails",
    "dist_checkpointing.format.torch_files": "own checkpoints have no pickles",
    "optimizer.averaged_weights": "no average is kept",
    "optimizer.exact_sums": "sums are exact with `reproducible_across_ranks` alone",
    "optimizer.muon": "the optimizer knows update rules by an interface",
    "optimizer.muon_recipe": "the config of another optimizer has none",
    "optimizer.run_state": "nothing is saved",
    "process_groups.make_groups": "a wrapper takes groups as values, whoever made them",
}
"""Modules of the library that a training without their subject does not load, and why."""


def test_a_plain_model_trains_without_any_layer_of_ours(tmp_path: Path) -> None:
    command = [sys.executable, "-m", _plain_training.__name__]
    root = Path(__file__).parents[3]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], cwd=root, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        output, *_ = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0]
    loaded, results = json.loads(output)
    assert {name.split(".")[0] for name in loaded} == LIBRARY
    assert PLUG_INS.keys() & set(loaded) == set()
    blocks = [f"blocks.{index}" for index in range(3)]
    assert [results[name][0] for name in ("zero3", "fsdp2")] == [blocks, blocks]
    expected = results["replicas"][1]
    assert {name: logits == expected for name, (_, logits) in results.items()} == dict.fromkeys(results, True)
