"""No file of a checkpoint can run anything, reach outside its folder, or describe tensors that its bytes are not."""

import io
import json
import pickle
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from core.base.errors import CheckpointError
from core.dist_checkpointing import load, load_metadata, save
from core.dist_checkpointing.format.index import seal
from core.dist_checkpointing.format.reader import read_index


class _Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


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
        dcp.save({"w": torch.ones(2), "step": _Bomb(bomb)}, checkpoint_id=tmp_path / "theirs")
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
    whole.planner_data = _Bomb(bomb)  # a description that is otherwise right
    attacks = [
        pickle.dumps(_Bomb(bomb)),
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
    torch.save(_Bomb(bomb), payload)
    for attack in (payload.getvalue(), pickle.dumps(_Bomb(bomb))):
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
    attack = pickle.dumps(_Bomb(bomb))
    save({"w": torch.zeros(len(attack), dtype=torch.uint8)}, tmp_path / "it", metadata={})
    (tmp_path / "it" / "rank_00000.bin").write_bytes(attack)
    state = {"w": torch.zeros(len(attack), dtype=torch.uint8)}
    load(state, tmp_path / "it", verify=False)
    assert bytes(state["w"].tolist()) == attack
    assert not bomb.exists()


def _edited(*path_and_value):
    *path, value = path_and_value

    def edit(document):
        at = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return edit


_W = ("tensors", "w")
_PIECE = (*_W, "pieces", 0)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (_edited("format", "else"), "no \"format\""),
        (_edited("version", 3), "version 3, and this library reads version 2"),
        (_edited("byte_order", "big"), "'big' order"),
        (_edited("extra", 1), "unknown keys"),
        (_edited("tensors", []), "no tables"),
        (_edited("file_bytes", "rank_00000.bin", "24"), "no integers"),
        (_edited("file_bytes", "rank_00000.bin", True), "no integers"),
        (_edited(*_W, "dtype", "object"), "unknown dtype 'object'"),
        (_edited(*_W, "dtype", ["float32"]), "unknown dtype"),
        (_edited(*_W, "dtype", "float64"), "6 elements in 24 bytes"),
        (_edited(*_W, "shape", [2, -3]), "list of sizes"),
        (_edited(*_W, "shape", [3, 3]), "not covered exactly once"),
        (_edited(*_W, "shape", [2, 2]), "outside of it"),
        (_edited(*_W, "pieces", []), "not covered exactly once"),
        (_edited(*_W, "pieces", {}), "no dtype, shape and pieces"),
        (_edited(*_PIECE, 0, [0]), "piece of other rank"),
        (_edited(*_PIECE, 0, [0, 1]), "outside of it"),
        (_edited(*_PIECE, 2, "../secret"), "unlisted file"),
        (_edited(*_PIECE, 3, 4), "beyond the end"),
        (_edited(*_PIECE, 3, -1), "no place in a file"),
        (_edited(*_PIECE, 4, 1 << 80), "no place in a file"),
        (_edited(*_PIECE, [1, 2]), "without its six fields"),
        (_edited(*_PIECE, 5, "ff"), "16 hexadecimal digits"),
        (_edited(*_PIECE, 5, 7), "16 hexadecimal digits"),
        (_edited(*_PIECE, 5, "0" * 16), "not the sum of its pieces' hashes"),
        (_edited(*_W, "hash", "0" * 16), "not the sum of its pieces' hashes"),
        (_edited("metadata", "step", 4), "its text does not match its sha256"),
        (_edited("sha256", "0" * 64), "its text does not match its sha256"),
        (_edited("sha256", None), "its text does not match its sha256"),
    ],
)  # fmt: skip
def test_a_description_that_contradicts_itself_is_refused(tmp_path, edit, problem):
    save({"w": torch.ones(2, 3)}, tmp_path / "it", metadata={"step": 3})
    path = tmp_path / "it" / "checkpoint.json"
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as caught:
        load({"w": torch.zeros(2, 3)}, tmp_path / "it")
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["../secret.bin", "/etc/passwd", "a/b.bin", "..", ""])
def test_a_file_outside_the_folder_is_never_opened(tmp_path, name):
    save({"w": torch.ones(2, 3)}, tmp_path / "it", metadata={})
    (tmp_path / "secret.bin").write_bytes(bytes(24))
    path = tmp_path / "it" / "checkpoint.json"
    path.write_text(path.read_text().replace("rank_00000.bin", name))
    with pytest.raises(CheckpointError, match="no name of a file in the folder"):
        load({"w": torch.zeros(2, 3)}, tmp_path / "it")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "null", "\x80\x04."])
def test_text_that_is_no_description_is_refused(tmp_path, text):
    save({"w": torch.ones(2, 3)}, tmp_path / "it", metadata={})
    (tmp_path / "it" / "checkpoint.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged or unsafe"):
        load_metadata(tmp_path / "it")


def test_pieces_that_overlap_are_refused(tmp_path):
    """Two pieces with the right number of elements, one over the other, leave rows unfilled."""
    save({"w": torch.ones(4, 3)}, tmp_path / "it", metadata={})
    path = tmp_path / "it" / "checkpoint.json"
    document = json.loads(path.read_text())
    file = "rank_00000.bin"
    for second in ([2, 0], [1, 0]):
        zero = "0" * 16
        pieces = [[[0, 0], [2, 3], file, 0, 24, zero], [second, [2, 3], file, 24, 24, zero]]
        document["tensors"]["w"].update(pieces=pieces, hash=zero)
        document["sha256"] = seal(document)
        path.write_text(json.dumps(document))
        if second == [2, 0]:
            assert len(read_index(tmp_path / "it").tensors["w"].pieces) == 2
        else:
            with pytest.raises(CheckpointError, match="not covered exactly once by its 2 pieces"):
                read_index(tmp_path / "it")
