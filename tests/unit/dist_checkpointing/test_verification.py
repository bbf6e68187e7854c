"""What is loaded is what was saved, or an error names the tensors and the files that are not."""

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError
from core.dist_checkpointing import global_view, load, local_tensor, model_state_dict, save, verify
from core.dist_checkpointing.agreement import Ranks
from core.dist_checkpointing.format import reader
from core.dist_checkpointing.format.index import Box
from core.dist_checkpointing.format.reader import read_index
from core.dist_checkpointing.loading import damage, differing_tensors
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import toy


def hashes(folder) -> dict[str, str]:
    tensors = json.loads((folder / "checkpoint.json").read_text())["tensors"]
    return {name: entry["hash"] for name, entry in tensors.items()}


def _write(layout: str, folder: str) -> None:
    save(model_state_dict(toy(layout, filled=True)), folder, metadata={})


def flip(folder, tensor: str, bit: int = 3, piece: int = 0) -> str:
    """Flips one bit of a stored tensor, and returns the name of the file."""
    tensors = json.loads((folder / "checkpoint.json").read_text())["tensors"]
    _, _, file, start, num_bytes, _ = tensors[tensor]["pieces"][piece]
    path = folder / file
    data = bytearray(path.read_bytes())
    data[start + num_bytes // 2] ^= 1 << bit
    path.write_bytes(data)
    return file


def test_the_hash_of_a_tensor_does_not_depend_on_who_wrote_it(tmp_path):
    _write("plain", str(tmp_path / "plain"))
    for layout in ("fsdp", "tp2"):
        run_distributed(_write, 2, layout, str(tmp_path / layout))
        assert hashes(tmp_path / layout) == hashes(tmp_path / "plain")
    assert len(set(hashes(tmp_path / "plain").values())) == len(hashes(tmp_path / "plain"))


def _load(layout: str, folder: str, all_: bool) -> str | None:
    try:
        load(model_state_dict(toy(layout, filled=False)), folder, verify=all_)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["plain", "fsdp", "tp2"])
def test_a_flipped_bit_is_named_by_all_ranks(tmp_path, layout):
    run_distributed(_write, 2, "fsdp", str(tmp_path / "it"))
    assert run_distributed(_load, 2, layout, str(tmp_path / "it"), True) == [None, None]
    verify(tmp_path / "it")
    file = flip(tmp_path / "it", "rows.weight", piece=1)
    messages = run_distributed(_load, 2, layout, str(tmp_path / "it"), True)
    assert messages[0] == messages[1]
    assert re.search(rf"{tmp_path / 'it' / file} is damaged in rows\.weight \(bytes \d+ to \d+\)", messages[0])
    assert messages[0].endswith(": rows.weight")
    with pytest.raises(CheckpointError, match=rf"{file} is damaged in rows\.weight \(bytes \d+ to \d+\)$"):
        verify(tmp_path / "it")
    # where it is not wanted only what is cut again is compared
    assert run_distributed(_load, 2, layout, str(tmp_path / "it"), False) == (
        [None, None] if layout == "fsdp" else messages
    )


def _reads_wrongly(folder: str, fault: str) -> str | None:
    model = toy("fsdp", filled=False)
    state = model_state_dict(model)
    if fault and dist.get_rank() == 1:
        load(state, folder)
        with torch.no_grad():
            local_tensor(model.rows.weight).view(-1)[0] += 1
        fault = "done"
    else:
        load(state, folder)
    index = read_index(Path(folder))
    return differing_tensors(state, index, set(state), Ranks())


def test_what_went_wrong_after_the_file_was_read_is_found_too(tmp_path):
    _write("plain", str(tmp_path / "it"))
    assert run_distributed(_reads_wrongly, 2, str(tmp_path / "it"), "") == [[], []]
    assert run_distributed(_reads_wrongly, 2, str(tmp_path / "it"), "one rank") == [["rows.weight"]] * 2


def _replicas_differ(folder: str) -> list[str]:
    state = {"w": torch.arange(6.0) + dist.get_rank()}
    return differing_tensors(state, read_index(Path(folder)), {"w"}, Ranks())


def test_a_replica_that_differs_on_one_rank_is_found(tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path / "it", metadata={})
    assert run_distributed(_replicas_differ, 2, str(tmp_path / "it")) == [["w"], ["w"]]


def test_files_put_together_wrongly_are_not_blamed_on_the_disk(tmp_path, monkeypatch):
    run_distributed(_write, 2, "fsdp", str(tmp_path / "it"))
    fill = reader.PieceReader.fill

    def assemble_wrongly(pieces: reader.PieceReader, targets: dict[str, torch.Tensor]) -> set[str]:
        resharded = fill(pieces, targets)
        held = local_tensor(targets["rows.weight"])
        held.copy_(held.flip(0))
        return resharded

    monkeypatch.setattr(reader.PieceReader, "fill", assemble_wrongly)
    with pytest.raises(CheckpointError, match=r"its files are undamaged, and were assembled wrongly"):
        load(model_state_dict(toy("plain", filled=False)), tmp_path / "it")


def _damage(folder: str) -> list[str]:
    return damage(Path(folder), Ranks())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_damaged_file_is_named(tmp_path, ranks):
    run_distributed(_write, 2, "fsdp", str(tmp_path / "it"))
    files = {flip(tmp_path / "it", "rows.weight", piece=piece) for piece in (0, 1)}
    assert len(files) == 2
    found = run_distributed(_damage, 2, str(tmp_path / "it"))[0] if ranks == 2 else _damage(str(tmp_path / "it"))
    assert [line.split()[0] for line in found] == sorted(str(tmp_path / "it" / file) for file in files)
    (tmp_path / "it" / "rank_00001.bin").unlink()
    assert "rank_00001.bin is missing" in _damage(str(tmp_path / "it"))[0]


def test_a_tensor_that_is_read_in_part_is_left_unchecked(tmp_path):
    """Ranks of no layout do so, and there is nothing that the parts would add up to."""
    save({"w": torch.arange(6.0)}, tmp_path / "it", metadata={})
    index = read_index(tmp_path / "it")
    from core.dist_checkpointing.loading import _differs

    right = index.tensors["w"].content_hash
    assert not _differs([(Box((0,), (6,)), right), (Box((2,), (3,)), 1)], index, "w")
    assert _differs([(Box((0,), (3,)), 1), (Box((3,), (3,)), right)], index, "w")
    assert not _differs([(Box((0,), (3,)), 1), (Box((3,), (3,)), right - 1)], index, "w")


def test_global_views_are_hashed_as_what_they_are_of_the_whole(tmp_path):
    tensor = torch.arange(12.0).view(3, 4)
    save({"w": global_view(tensor)}, tmp_path / "it", metadata={})
    assert differing_tensors({"w": tensor}, read_index(tmp_path / "it"), {"w"}, Ranks()) == []


def test_comparing_is_the_default_and_reported_in_a_line(tmp_path):
    lines: list[str] = []
    save({"w": torch.arange(6.0), "n": torch.tensor(1)}, tmp_path / "it", metadata={})
    state = {"w": torch.zeros(6), "n": torch.tensor(0)}
    load(state, tmp_path / "it", report=lines.append)
    load(state, tmp_path / "it", verify=False, report=lines.append)
    assert re.fullmatch(rf"verified 2 tensors of {tmp_path}/it by their hashes: 32 B in \d+\.\d\d s", lines[0])
    assert lines[1] == f"{tmp_path}/it was not compared with its hashes, as was asked"
    flip(tmp_path / "it", "w")
    with pytest.raises(CheckpointError, match=r"is damaged in w \(bytes \d+ to \d+\)"):
        load(state, tmp_path / "it")
    load(state, tmp_path / "it", verify=False)


def test_a_file_of_a_checkpoint_that_is_a_link_is_refused(tmp_path):
    save({"w": torch.arange(6.0)}, tmp_path / "it", metadata={})
    (tmp_path / "it" / "rank_00000.bin").rename(tmp_path / "elsewhere")
    (tmp_path / "it" / "rank_00000.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link, and a checkpoint holds its own files"):
        load({"w": torch.zeros(6)}, tmp_path / "it")
