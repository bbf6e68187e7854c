"""The command's description of a checkpoint, and its check of the files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from core.dist_checkpointing import save
from core.dist_checkpointing.inspect import main


def _state() -> dict[str, torch.Tensor]:
    layers = {f"model.layers.{n}.mlp.weight": torch.full((4, 3), float(n)) for n in range(12)}
    layers["model.layers.12.mlp.weight"] = torch.zeros(5, 3)
    return layers | {"model.embedding.weight": torch.zeros(300, 7), "optimizer.step": torch.tensor(3)}


def _metadata(**changes: Any) -> dict[str, Any]:
    return {
        "iteration": 30,
        "consumed_samples": 240,
        "layout": {"ranks": 4, "tensor": 2, "context": 1},
        "config": {"use_torch_fsdp2": True, "model": {"hidden_size": 3}, "ddp": {}},
        "many": list(range(100)),
        **changes,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(_state(), tmp_path / "run" / "iter_0000030", metadata=_metadata())
    return tmp_path / "run"


def test_one_page_has_metadata_and_tensors(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == str(run / "iter_0000030")
    assert lines[1] == "  15 tensors, 8.83 KiB in 1 file"
    assert any(line.startswith("  iteration 30, consumed_samples 240, ") for line in lines)
    assert "  layout: ranks 4, tensor 2, context 1" in lines
    assert "  config.model: hidden_size 3" in lines
    assert any("many (100 entries)" in line for line in lines)
    tree = [line.split() for line in lines]
    assert ["model.embedding.weight", "8.2", "KiB", "float32", "[300,", "7]"] in tree
    assert ["model.layers.0-11.mlp.weight", "(12", "x)", "576", "B", "float32", "[4,", "3]"] in tree
    assert ["model.layers.12.mlp.weight", "60", "B", "float32", "[5,", "3]"] in tree
    assert ["optimizer.step", "8", "B", "int64", "[]"] in tree


def test_equal_layers_are_listed_one_by_one_on_request(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run), "--expand"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-14:-1]] == [
        f"model.layers.{n}.mlp.weight" for n in range(13)
    ]


def test_expanded_pages_differ_where_two_checkpoints_do(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def page(folder: Path) -> set[str]:
        assert main([str(folder), "--expand"]) == 0
        return {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[2:]}

    state = _state()
    save(state, tmp_path / "a" / "iter_0000030", metadata=_metadata())
    assert page(run) == page(tmp_path / "a")
    state["model.layers.3.mlp.weight"][1, 2] += 0.5
    config = {"use_torch_fsdp2": True, "model": {"hidden_size": 4}, "ddp": {}}
    save(state, tmp_path / "b" / "iter_0000030", metadata=_metadata(config=config))
    differing = sorted(page(run) ^ page(tmp_path / "b"))
    assert [line.split()[:2] for line in differing] == [
        *[["config.model:", "hidden_size"]] * 2,
        *[["model.layers.3.mlp.weight", "48"]] * 2,
        *[["weights", line.split()[1]] for line in differing[4:]],
    ]
    hashes = {line.split()[-1] for line in differing[2:4]}
    assert len(hashes) == 2 and all(len(value) == 16 for value in hashes)


def test_a_model_of_hugging_faces_is_described_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    library = pytest.importorskip("safetensors.torch")
    library.save_file({"a.0.b": torch.zeros(2, 3).half()}, tmp_path / "model.safetensors")
    assert main([str(tmp_path), "--expand"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  tensors alone, no metadata",
        "  1 tensor, 12 B in 1 file",
        "",
        "  a.0.b  12 B  float16 [2, 3]",
    ]


def test_files_are_hashed_unless_switched_off(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run)]) == 0
    verified = capsys.readouterr().err
    assert verified.startswith(f"verified 15 tensors of {run}/iter_0000030 by their hashes: ")
    file = run / "iter_0000030" / "rank_00000.bin"
    save(_state(), run / "iter_0000020", metadata=_metadata())
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    assert main([str(run / "iter_0000030")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{file} is damaged in " in captured.err and " (bytes 0 to " in captured.err
    assert captured.err.endswith(f"continue from it with --load {run}/iter_0000020\n")
    assert main([str(run / "iter_0000030"), "--no-verify-checkpoint"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and captured.out.startswith(str(run / "iter_0000030"))


def test_what_cannot_be_read_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    library = pytest.importorskip("safetensors.torch")
    (tmp_path / "other").mkdir()
    library.save_file({"x": torch.zeros(1)}, tmp_path / "other" / "model.safetensors")
    index = run / "iter_0000030" / "checkpoint.json"
    assert main([str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "there is no such folder" in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main([str(tmp_path / "other")]) == 2
    assert "pip install 'shardstack[hf]'" in capsys.readouterr().err
    index.write_text(json.dumps({}))
    assert main([str(run)]) == 2
    assert "damaged or unsafe" in capsys.readouterr().err
