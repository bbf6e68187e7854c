"""A checkpoint is read if its files are those that its index lists; else the file is named and nothing changes."""

import json

import pytest
import torch

from core.base.errors import CheckpointError
from core.dist_checkpointing import load, save
from core.dist_checkpointing.format.index import seal
from core.dist_checkpointing.format.reader import read_index


@pytest.mark.parametrize("damage", ["truncate", "grow", "remove"])
def test_a_damaged_file_is_named_and_nothing_is_touched(tmp_path, damage):
    save({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "it", metadata={})
    file = tmp_path / "it" / "rank_00000.bin"
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "truncate" else file.read_bytes() + b"\0")
    mine = {"a": torch.zeros(64), "b": torch.zeros(64)}
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin (has|is missing)"):
        load(mine, tmp_path / "it")
    assert not mine["a"].any()


def test_no_checkpoint_and_a_damaged_one_are_different_errors(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        load({"a": torch.zeros(1)}, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no checkpoint\.json"):
        load({"a": torch.zeros(1)}, tmp_path)


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
