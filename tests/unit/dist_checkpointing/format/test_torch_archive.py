"""What `torch.save` wrote is described without running it, and damaged or odd archives are refused."""

from __future__ import annotations

import io
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing.format.torch_archive import TorchArchive
from tests.unit.dist_checkpointing._pieces import Bomb
from tests.unit.dist_checkpointing.format.test_torch_files import archive_of, members_of, zipped


def read(value: object) -> TorchArchive:
    return TorchArchive(io.BytesIO(archive_of(value)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_a_tensor_has_a_place(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).to(dtype).view(2, 3, 4)
    data = archive_of({"a": [tensor[1]], "b": torch.nn.Parameter(tensor.float())})
    archive = TorchArchive(io.BytesIO(data))
    found, shape, start, num_bytes = archive.tensor(archive.root["a"][0]) or (None, (), 0, 0)
    assert (found, shape, num_bytes) == (dtype, (3, 4), 12 * dtype.itemsize)
    assert torch.frombuffer(bytearray(data[start : start + num_bytes]), dtype=dtype).view(3, 4).equal(tensor[1])
    assert archive.tensor(archive.root["b"])[:2] == (torch.float32, (2, 3, 4))  # type: ignore[index]
    assert archive.tensor(3) is None


def test_objects_are_records_and_nothing_runs(tmp_path: Path) -> None:
    tables = OrderedDict(a=torch.tensor(7.0), b=None)
    archive = read({"args": Namespace(lr=0.1, bomb=Bomb(tmp_path / "ran"), dtype=torch.bfloat16), "tables": tables})
    arguments = archive.root["args"]
    assert (arguments.kind, arguments.get("lr"), arguments.get("dtype")) == ("Namespace", 0.1, torch.bfloat16)
    assert archive.number(archive.root["tables"]["a"]) == 7.0 and archive.number(archive.root["tables"]["b"]) is None
    assert not (tmp_path / "ran").exists()


def _odd() -> dict[str, Any]:
    honest = members_of(archive_of(torch.arange(6.0).view(2, 3)))
    other = dict(honest) | {name: b"big" for name in honest if name.endswith("byteorder")}
    short = {name: content[:4] if "/data/" in name else content for name, content in honest.items()}
    return {"no archive": b"PK" + bytes(90), "in big order": zipped(other), "outside of its bytes": zipped(short)}


@pytest.mark.parametrize("said", _odd())
def test_odd_archives_are_refused(said: str) -> None:
    with pytest.raises(CheckpointError, match=said.replace("in big", "in '?big'?")):
        archive = TorchArchive(io.BytesIO(_odd()[said]))
        archive.tensor(archive.root)


def test_rows_that_are_not_together_are_refused() -> None:
    archive = read(torch.arange(6.0).view(2, 3).t())
    with pytest.raises(CheckpointError, match="with the strides"):
        archive.tensor(archive.root)
