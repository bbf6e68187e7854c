"""The checkpoint that a folder means, and a rank that does not answer while a run saves is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from core.base.errors import CheckpointError, OutOfStepError
from core.comm.record import latest_collective
from core.dist_checkpointing.good_checkpoints import find_checkpoint
from core.training import checkpointing as writer_module
from tests.unit._spawn import give_up_soon, reach, run_distributed, wait_for


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


def _one_rank_is_paused_in_a_save(folder: str) -> int | str:
    """Returns rank 0's message, and on rank 1 how many saves this group has begun, those of other tests included."""
    group = dist.new_group()

    def save_checkpoint(*arguments: Any, **settings: Any) -> Path:
        if dist.get_rank() == 1:
            reach("rank 1 saves")
            wait_for("rank 0 has its message")
            return Path(folder)
        wait_for("rank 1 saves")
        give_up_soon(group)
        dist.all_reduce(torch.ones(1), group=group)
        return Path(folder)

    config = SimpleNamespace(checkpoint=SimpleNamespace(async_save=False))
    writer = writer_module.CheckpointWriter(config, Path(folder))  # type: ignore[arg-type]
    with patch.object(writer_module, "save_checkpoint", save_checkpoint):
        if dist.get_rank() == 1:
            writer.save(SimpleNamespace())  # type: ignore[arg-type]
            latest = latest_collective()
            assert latest is not None
            return latest.occurrence
        try:
            with pytest.raises(OutOfStepError) as caught:
                writer.save(SimpleNamespace())  # type: ignore[arg-type]
        finally:
            reach("rank 0 has its message")
    return str(caught.value)


def test_a_rank_that_is_paused_in_a_save_is_named(tmp_path):
    message, saves = run_distributed(_one_rank_is_paused_in_a_save, 2, str(tmp_path))
    assert f"s for save {saves} of the run's checkpoint, its call" in message
    assert "rank 1 waited in the same" in message
    assert "a paused process" in message
