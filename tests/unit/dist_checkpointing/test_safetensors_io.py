"""Models in one file or several, read without loading them; files that contradict their index are refused."""

from __future__ import annotations

import json
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.base.errors import CheckpointError, MissingExtraError
from core.dist_checkpointing.agreement import Ranks
from core.dist_checkpointing.foreign_layout import BoxReader
from core.dist_checkpointing.safetensors_io import read_safetensors_index, save_folder

library = pytest.importorskip("safetensors.torch")

TENSORS = {
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "whole": torch.arange(24, dtype=torch.float32).view(2, 3, 4),
    "count": torch.tensor(7),
    "nothing": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
    "tiny": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
}


PLAN = {name: (tensor.dtype, tensor.shape) for name, tensor in TENSORS.items()}


def _save(folder: Path, plan: dict[str, Any], tensors: Iterator[tuple[str, torch.Tensor]], **options: Any) -> None:
    ranks = Ranks()
    ranks.rank = options.pop("rank", 0)
    save_folder(folder, plan, tensors, lambda temporary: None, ranks, **options)


def _write(folder: Path, max_shard_bytes: int = 10**9) -> Path:
    _save(folder, PLAN, iter(TENSORS.items()), max_shard_bytes=max_shard_bytes)
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


def test_others_read_what_is_written_and_are_read(tmp_path: Path):
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
    found.zero_()  # the file stays as it is
    assert _same(_read(folder))


def test_an_index_is_read_without_the_tensors(tmp_path: Path):
    num_bytes = 2**30
    header = json.dumps({"large": {"dtype": "F32", "shape": [2**14, 2**14], "data_offsets": [0, num_bytes]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as stream:
        stream.truncate(8 + len(header) + num_bytes)  # a hole
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    reader = BoxReader(tmp_path, read_safetensors_index(tmp_path))
    assert not reader.read("large", (slice(5, 8), slice(0, 2**14))).any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 2000  # pages of 4 KiB; the file has 2**18


def test_the_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = _write(tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for use in (lambda: read_safetensors_index(folder), lambda: _write(tmp_path / "new")):
        with pytest.raises(MissingExtraError, match=r"package 'safetensors': pip install 'shardstack\[hf\]'"):
            use()
    assert not (tmp_path / "new").exists()


def _header_changed(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    return apply


DAMAGED = "model.safetensors is no safetensors file, or damaged"


def _place(name: str, start: int, end: int) -> Callable[[Path], None]:
    return _header_changed(lambda header: header[name].update(data_offsets=[start, end]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), DAMAGED),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), DAMAGED),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), DAMAGED),
        (lambda path: path.write_bytes(b""), DAMAGED),
        (lambda path: path.write_bytes(b"\xff" * 8), DAMAGED),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), DAMAGED),
        (lambda path: path.write_bytes((4).to_bytes(8, "little") + b"spam"), DAMAGED),
        (lambda path: path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000), DAMAGED),
        (lambda path: torch.save(TENSORS, path), DAMAGED),
        (lambda path: path.unlink(), "has no model.safetensors: only pytorch_model.bin, a pickle"),
        (_place("half", 12, 36), DAMAGED),
        (_place("half", 100, 112), DAMAGED),  # in the midst of another
        (_place("half", 2**40, 2**40 + 12), DAMAGED),
        (_header_changed(lambda header: header["half"].update(dtype="F3")), DAMAGED),
        (_header_changed(lambda header: header["half"].update(dtype="F4", shape=[24])), "half is 'F4', which no"),
        (_header_changed(lambda header: header["half"].update(shape=[-2, -3])), DAMAGED),
        (_header_changed(lambda header: header["half"].update(shape=[2**62, 8])), DAMAGED),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str):
    folder = _write(tmp_path / "ours")
    (folder / "pytorch_model.bin").write_bytes(b"")
    damage(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors_index(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"half": "../model-00001-of-00002.safetensors"}, "that names a file next to it"),
        ({"half": "model-00002-of-00002.safetensors"}, "holds half, which"),
        ({"more": "model-00002-of-00002.safetensors"}, "names more, which"),
        ({"half": "absent.safetensors"}, "absent.safetensors is missing"),
        ({"half": 3}, "has 3 for weight_map, which takes str"),
    ],
)
def test_an_index_that_is_not_what_the_files_hold_is_refused(tmp_path: Path, change: dict[str, str], message: str):
    folder = _write(tmp_path / "ours", max_shard_bytes=110)
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"] |= change
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message):
        read_safetensors_index(folder)


@pytest.mark.parametrize("rank", [0, 1], ids=["writes", "helps"])
def test_tensors_of_one_file_are_held_at_a_time(tmp_path: Path, rank: int):
    plan = {f"{number}": (torch.float32, (10,)) for number in range(9)}
    made: list[weakref.ref[np.ndarray]] = []
    held: list[int] = []

    def make() -> torch.Tensor:
        held.append(sum(memory() is not None for memory in made))
        memory = np.zeros(10, np.float32)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    tensors = ((name, make()) for name in plan)
    _save(tmp_path / "new", plan, tensors, rank=rank, max_shard_bytes=120)
    assert held == ([0, 1, 2] * 3 if rank == 0 else [0] * 9)
    assert len([*tmp_path.glob("new/*")]) == (4 if rank == 0 else 0)


def test_what_cannot_be_written_is_named(tmp_path: Path):
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        (tmp_path / ".absent.tmp").rmdir()
        yield "x", torch.zeros(1)

    with pytest.raises(CheckpointError, match=r"absent\.tmp/model\.safetensors cannot be written"):
        _save(tmp_path / "absent", {"x": (torch.float32, (1,))}, tensors())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file/new cannot be written"):
        _write(tmp_path / "file" / "new")


def test_a_failure_to_write_asks_for_every_tensor_all_the_same(tmp_path: Path):
    tensors = iter((TENSORS | {"whole": TENSORS["whole"].double()}).items())
    with pytest.raises(CheckpointError, match=r"whole came as torch\.float64"):
        _save(tmp_path / "new", PLAN, tensors, max_shard_bytes=100)
    assert [*tensors] == [] and [*tmp_path.iterdir()] == []
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        _write(_write(tmp_path / "ours"))
