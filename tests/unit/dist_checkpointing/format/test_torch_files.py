"""Archives of torch.save are checked before torch reads them: nothing is believed that they do not hold."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch

from core.base.dtypes import DTYPES
from core.base.errors import CheckpointError
from core.dist_checkpointing.format.torch_files import read_tensor_archive


def archive_of(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(name: str):
    tensor = torch.arange(24).view(2, 3, 4).to(DTYPES[name])
    read = read_tensor_archive(archive_of(tensor))
    assert read.dtype == tensor.dtype and read.shape == tensor.shape
    assert read.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_views_scalars_parameters_and_empty_tensors_come_back():
    whole = torch.arange(24.0).view(4, 6)
    for tensor in (whole.T, whole[1:3, ::2], torch.tensor(3.0), torch.nn.Parameter(whole), torch.zeros(0, 3)):
        assert read_tensor_archive(archive_of(tensor)).equal(tensor.detach())


def _described(data: bytes, old: bytes, new: bytes) -> bytes:
    members = members_of(data)
    name = next(name for name in members if name.endswith("data.pkl"))
    assert old in members[name]
    return zipped(members | {name: members[name].replace(old, new)})


def hostile() -> dict[str, bytes]:
    honest = archive_of(torch.arange(6.0).view(2, 3))
    flipped = bytearray(honest)
    flipped[flipped.index(torch.arange(6.0).numpy().tobytes()) + 5] ^= 1
    members = members_of(honest)
    return {
        "larger than its bytes": _described(honest, b"K\x02K\x03\x86", b"J\x00\x00\x00\x7fK\x03\x86"),
        "beyond its end": _described(honest, b"K\x00K\x02", b"K\x09K\x02"),
        "a storage that is too long": _described(honest, b"FloatStorage", b"DoubleStorage"),
        "a flipped bit": bytes(flipped),
        "compressed": zipped(members | {"archive/data/0": bytes(10**7)}, zipfile.ZIP_DEFLATED),
        "no description": zipped({"archive/data/0": bytes(24)}),
        "no archive": b"PK" + bytes(100),
        "a pickle": pickle.dumps(3),
        "no tensor": archive_of({"a": 1}),
        "a function": archive_of(torch.load),
        "cut short": honest[:-40],
        "empty": b"",
    }


@pytest.mark.parametrize("kind", hostile())
def test_what_is_no_tensor_or_not_all_there_is_refused(kind: str):
    data = hostile()[kind]
    with pytest.raises(CheckpointError) as caught:
        read_tensor_archive(data)
    assert len(str(caught.value)) < 500
