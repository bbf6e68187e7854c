"""Archives of torch.save are checked before torch reads them: nothing is believed that they do not hold."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.base.dtypes import DTYPES
from core.base.errors import CheckpointError
from core.base.files import BoundsError
from core.dist_checkpointing import load, save
from core.dist_checkpointing.format.torch_files import check_pickle, read_tensor_archive
from tests.unit.dist_checkpointing._pieces import Bomb


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


@pytest.fixture
def torch_checkpoint(tmp_path) -> Path:
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "s": torch.tensor(4)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.save(dict(state), checkpoint_id=tmp_path / "theirs")
    return tmp_path / "theirs"


def _empty_state() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16), "s": torch.tensor(0)}


def test_what_torch_wrote_is_read_without_unpickling_it(torch_checkpoint, monkeypatch):
    monkeypatch.setattr(pickle, "load", None)  # what torch's own reader calls
    state = _empty_state()
    assert load(state, torch_checkpoint) == {}
    assert torch.equal(state["w"], torch.arange(6.0).view(2, 3))
    assert torch.equal(state["b"], torch.ones(3, dtype=torch.bfloat16))
    assert state["s"].item() == 4


def test_entries_of_torch_that_are_no_tensors_are_never_read(tmp_path):
    bomb = tmp_path / "ran"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"w": torch.ones(2), "step": Bomb(bomb)}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(CheckpointError, match="not asked for, but in the checkpoint: step"):
        load({"w": torch.zeros(2)}, tmp_path / "theirs")
    w = torch.zeros(2)
    load({"w": w}, tmp_path / "theirs", strict=False)
    assert w.all()
    assert not bomb.exists()


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def test_a_pickle_in_place_of_the_description_runs_nothing(torch_checkpoint):
    bomb = torch_checkpoint.parent / "ran"
    honest = (torch_checkpoint / ".metadata").read_bytes()
    whole = pickle.loads(honest)
    whole.planner_data = Bomb(bomb)  # a description that is otherwise right
    attacks = [
        pickle.dumps(Bomb(bomb)),
        pickle.dumps(whole),
        f"cos\nsystem\n(S'touch {bomb}'\ntR.".encode(),
        pickle.dumps({"no": "metadata"}),
        _truncated(honest),
        b"",
    ]
    for attack in attacks:
        (torch_checkpoint / ".metadata").write_bytes(attack)
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged or unsafe"):
            load(_empty_state(), torch_checkpoint)
    assert not bomb.exists()
    pickle.loads(attacks[1])  # the attack is a real one
    assert bomb.exists()


def test_a_class_that_a_pickle_edits_is_its_own_stand_in(torch_checkpoint):
    """BUILD on an allowed class is legal to the unpickler; it must reach neither torch nor the next load."""
    edit = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x08poisoned\x88stb."
    (torch_checkpoint / ".metadata").write_bytes(edit)
    with pytest.raises(CheckpointError, match="unsafe"):
        load(_empty_state(), torch_checkpoint)
    assert not hasattr(dcp.metadata.Metadata, "poisoned")
    pickle.loads(edit)
    try:
        assert dcp.metadata.Metadata.poisoned  # plain unpickling is changed by it
    finally:
        del dcp.metadata.Metadata.poisoned


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_payload_that_is_a_pickle_runs_nothing(torch_checkpoint):
    bomb = torch_checkpoint.parent / "ran"
    payload = io.BytesIO()
    torch.save(Bomb(bomb), payload)
    for attack in (payload.getvalue(), pickle.dumps(Bomb(bomb))):
        description = pickle.loads((torch_checkpoint / ".metadata").read_bytes())
        file = next(torch_checkpoint.glob("*.distcp"))
        file.write_bytes(attack + bytes(10_000))
        for info in description.storage_data.values():
            info.offset, info.length = 0, len(attack)
        (torch_checkpoint / ".metadata").write_bytes(pickle.dumps(description))
        with pytest.raises(CheckpointError, match="nothing was run"):
            load(_empty_state(), torch_checkpoint)
    assert not bomb.exists()
    torch.load(io.BytesIO(payload.getvalue()), weights_only=False)
    assert bomb.exists()


def test_eight_bytes_do_not_take_gigabytes(tmp_path):
    """Numbered values are kept in an array that is as long as the largest number says."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x02Nr" + (2**32 - 1).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="numbers a value 4294967295 after 2 instructions"):
        load(_empty_state(), tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


def test_one_list_of_pieces_for_many_tensors_is_not_multiplied(torch_checkpoint):
    description = pickle.loads((torch_checkpoint / ".metadata").read_bytes())
    name, entry = next((n, e) for n, e in description.state_dict_metadata.items() if hasattr(e, "chunks"))
    entry.chunks = entry.chunks * 70_000
    for number in range(100):
        description.state_dict_metadata[f"{name}{number}"] = entry
    (torch_checkpoint / ".metadata").write_bytes(pickle.dumps(description))
    with pytest.raises(CheckpointError, match="has more pieces than are stored"):
        load(_empty_state(), torch_checkpoint)


def test_a_payload_of_ours_is_bytes_of_any_content(tmp_path):
    """A pickle in a raw file is read as the numbers that its bytes are."""
    bomb = tmp_path / "ran"
    attack = pickle.dumps(Bomb(bomb))
    save({"w": torch.zeros(len(attack), dtype=torch.uint8)}, tmp_path / "it", metadata={})
    (tmp_path / "it" / "rank_00000.bin").write_bytes(attack)
    state = {"w": torch.zeros(len(attack), dtype=torch.uint8)}
    load(state, tmp_path / "it", verify=False)
    assert bytes(state["w"].tolist()) == attack
    assert not bomb.exists()


def anything(_module: str, _name: str) -> bool:
    return True


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".", "numbers a value 4294967295 after 2 instructions"),
        (b"\x80\x02N" + b"\x85" * 100_000 + b".", "nested more than 64 deep"),
        (b"\x80\x02N" + b"q\x00h\x00\x86" * 100_000 + b".", "nested more than 64 deep"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".", "expected 4611686018427387904 bytes"),
        (b"\x80\x04\x8f.", "EMPTY_SET"),
        (b"\x80\x02)\x81.", "IndexError"),
        (b"", "pickle exhausted"),
        (pickle.dumps({"a": (1, 2)})[:-3], "no pickle, or a damaged one"),
    ],
)
def test_a_pickle_asks_for_no_more_than_it_has(data: bytes, said: str):
    tracemalloc.start()
    with pytest.raises(BoundsError, match=said):
        check_pickle(data, anything)
    assert tracemalloc.get_traced_memory()[1] < 10 * len(data) + (1 << 20)
    tracemalloc.stop()


def test_an_honest_pickle_passes_and_an_unknown_name_does_not():
    for protocol in range(2, 6):
        check_pickle(pickle.dumps([{"a": (1, ("b", [2.5, None]))}, Path("x")], protocol), anything)
    with pytest.raises(BoundsError, match=r"it names 'builtins\.eval'; nothing was run"):
        check_pickle(b"cbuiltins\neval\n.", lambda module, name: False)
