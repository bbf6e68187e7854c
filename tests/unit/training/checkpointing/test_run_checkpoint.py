"""The checkpoint that a folder means; whole runs are in tests/functional."""

import pytest

from core.errors import CheckpointError
from core.training.checkpointing import find_checkpoint


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        find_checkpoint(tmp_path / "x")


def test_a_run_and_one_of_its_checkpoints_can_be_meant(tmp_path):
    for name in ("iter_0000001", "iter_0000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("{}")
    (tmp_path / "latest").write_text("iter_0000002\n")
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000002"
    assert find_checkpoint(tmp_path / "iter_0000001") == tmp_path / "iter_0000001"
