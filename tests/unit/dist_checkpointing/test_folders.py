"""The pointer to the latest checkpoint, and what a reader finds after a crash at the worst moment."""

import pytest
import torch

from core.dist_checkpointing import checkpoint_directory, latest_checkpoint, load, save
from core.errors import CheckpointError


def _save(folder, value: float = 1.0) -> None:
    save({"w": torch.full((2,), value)}, folder, metadata={})


def test_the_pointer_follows_each_save(tmp_path):
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    for iteration in (100, 12_345_678):
        _save(checkpoint_directory(tmp_path, iteration))
        assert latest_checkpoint(tmp_path) == checkpoint_directory(tmp_path, iteration)
    assert [path.name for path in sorted(tmp_path.glob("iter*"))] == ["iter_0000100", "iter_12345678"]
    assert (tmp_path / "latest").read_text() == "iter_12345678\n"


def test_without_a_pointer_the_highest_complete_iteration_is_the_latest(tmp_path):
    for iteration in (9_999_999, 10_000_000):
        _save(checkpoint_directory(tmp_path, iteration))
    (tmp_path / "latest").unlink()
    (tmp_path / "iter_99999999").mkdir()  # empty
    assert latest_checkpoint(tmp_path) == checkpoint_directory(tmp_path, 10_000_000)


@pytest.mark.parametrize("text", ["", "..", "../elsewhere", "/", "iter_0000009", "a\nb"])
def test_a_pointer_to_no_checkpoint_is_an_error_not_a_fresh_start(tmp_path, text):
    _save(checkpoint_directory(tmp_path, 1))
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match="latest"):
        latest_checkpoint(tmp_path)


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    folder = checkpoint_directory(tmp_path, 1)
    _save(folder)
    folder.rename(tmp_path / f".{folder.name}.old")  # moved aside, and then the machine went down
    assert latest_checkpoint(tmp_path) == folder
    read = torch.zeros(2)
    load({"w": read}, folder)
    assert read.tolist() == [1.0, 1.0]
    _save(folder, 2.0)
    load({"w": read}, folder)
    assert read.tolist() == [2.0, 2.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, "latest"]


def test_what_a_killed_save_left_is_swept_away_by_the_next(tmp_path):
    folder = checkpoint_directory(tmp_path, 1)
    left = tmp_path / f".{folder.name}.tmp"
    left.mkdir()
    (left / "rank_00007.bin").write_bytes(b"half")
    _save(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "rank_00000.bin"]
    assert not left.exists()
