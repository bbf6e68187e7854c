"""The same files as the `safetensors` package's, one or several, and no file that says what is not so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.dist_checkpointing.foreign_layout import BoxReader
from core.dist_checkpointing.safetensors_io import (
    begin_new_folder,
    publish_new_folder,
    read_safetensors_index,
    write_safetensors,
)
from core.errors import CheckpointError

TENSORS = {
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "whole": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "count": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
    "tiny": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
}


def _write(folder: Path, max_shard_bytes: int = 10**9) -> Path:
    plan = {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}
    write_safetensors(begin_new_folder(folder), plan, TENSORS.__getitem__, max_shard_bytes=max_shard_bytes)
    assert not folder.exists()
    publish_new_folder(folder)
    return folder


def _read(folder: Path) -> dict[str, torch.Tensor]:
    index = read_safetensors_index(folder)
    reader = BoxReader(folder, index)
    boxes = {name: tuple(slice(0, size) for size in entry.shape) for name, entry in index.tensors.items()}
    return {name: reader.read(name, box) for name, box in boxes.items() if index.tensors[name].pieces}


def _same(found: dict[str, torch.Tensor]) -> bool:
    expected = {name: tensor for name, tensor in TENSORS.items() if tensor.numel()}
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float())
        for name, tensor in expected.items()
    )


def test_the_package_reads_what_is_written_and_is_read(tmp_path: Path):
    library = pytest.importorskip("safetensors.torch")
    theirs = library.load_file(_write(tmp_path / "ours") / "model.safetensors")
    assert theirs.pop("nothing").shape == (0, 4)
    assert _same(theirs)
    (tmp_path / "theirs").mkdir()
    library.save_file(TENSORS, tmp_path / "theirs" / "model.safetensors")
    assert _same(_read(tmp_path / "theirs"))


def test_several_files_share_an_index(tmp_path: Path):
    folder = _write(tmp_path / "ours", max_shard_bytes=110)
    assert sorted(path.name for path in folder.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert json.loads((folder / "model.safetensors.index.json").read_text())["metadata"] == {"total_size": 120}
    assert _same(_read(folder))


def test_a_box_is_read_alone(tmp_path: Path):
    folder = _write(tmp_path / "ours")
    reader = BoxReader(folder, read_safetensors_index(folder))
    found = reader.read("whole", (1, slice(0, 2), slice(1, 3)))
    assert torch.equal(found, TENSORS["whole"][1, 0:2, 1:3])


def _header_changed(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return apply


def _place(name: str, start: int, end: int) -> Callable[[Path], None]:
    return _header_changed(lambda header: header[name].update(data_offsets=[start, end]))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes where its header says"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "bytes where its header says"),
        (lambda path: path.write_bytes(b"\xff" * 8), "truncated: a header of"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "its header is no table"),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"spam"), "its header is no JSON"),
        (lambda path: path.unlink(), "has no model.safetensors: only pytorch_model.bin, a pickle"),
        (_place("half", 12, 36), "half of shape .* has 24 bytes"),
        (_header_changed(lambda header: header["half"].update(dtype="F3")), "half is 'F3'"),
        (_header_changed(lambda header: header["half"].update(shape=[-2, -3])), r"half has the shape \[-2, -3\]"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], told: str):
    folder = _write(tmp_path / "ours")
    (folder / "pytorch_model.bin").write_bytes(b"")
    damage(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=told):
        read_safetensors_index(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"half": "../model-00001-of-00002.safetensors"}, "does not name files beside it"),
        ({"half": "model-00002-of-00002.safetensors"}, "holds half, which"),
        ({"more": "model-00002-of-00002.safetensors"}, "names more, which"),
        ({"half": "absent.safetensors"}, "absent.safetensors cannot be read"),
        ({"half": 3}, "does not name files"),
    ],
)
def test_an_index_that_is_not_what_the_files_hold_is_refused(tmp_path: Path, change: dict[str, str], told: str):
    folder = _write(tmp_path / "ours", max_shard_bytes=110)
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=told):
        read_safetensors_index(folder)


def test_a_failure_to_write_asks_for_every_tensor_all_the_same(tmp_path: Path):
    plan = {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}
    asked = []

    def make(name: str) -> torch.Tensor:
        asked.append(name)
        return TENSORS[name].double() if name == "whole" else TENSORS[name]

    with pytest.raises(CheckpointError, match=r"whole came as torch\.float64"):
        write_safetensors(tmp_path, plan, make, max_shard_bytes=100)
    assert sorted(asked) == sorted(TENSORS)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        begin_new_folder(tmp_path)
