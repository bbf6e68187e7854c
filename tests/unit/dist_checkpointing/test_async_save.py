"""A checkpoint written beside training holds the state of the moment at which it was begun, or says why not."""

import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from core.dist_checkpointing import AsyncSaver, Retention, latest_checkpoint, load, model_state_dict, save, storage
from core.dist_checkpointing.staging import HostStaging
from core.errors import CheckpointError
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import toy


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self) -> None:
        self._open, self._kept = threading.Event(), storage._append
        storage._append = self._wait

    def _wait(self, *args):
        assert self._open.wait(30)
        return self._kept(*args)

    def open(self) -> None:
        storage._append = self._kept
        self._open.set()


def _changes_while_writing(layout: str, root: str) -> None:
    model = toy(layout, filled=True)
    save(model_state_dict(model), f"{root}/now", metadata={"step": 1})
    metadata, saver = {"step": 1}, AsyncSaver()
    for name in ("first", "again"):  # the second time into the same staging memory
        model = toy(layout, filled=True)
        gate = Gate()
        saver.save(model_state_dict(model), f"{root}/{name}", metadata=metadata)
        assert saver.is_writing
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.zero_()
        metadata["step"] = 2
        gate.open()
        saver.wait()
        metadata["step"] = 1
        assert not saver.is_writing


@pytest.mark.parametrize("layout", ["fsdp", "tp2"])
def test_what_is_written_is_what_it_was_when_saving_began(tmp_path, layout):
    run_distributed(_changes_while_writing, 2, layout, str(tmp_path))
    assert content(tmp_path / "first") == content(tmp_path / "now")
    assert content(tmp_path / "again") == content(tmp_path / "now")
    assert latest_checkpoint(tmp_path) == tmp_path / "again"


def test_one_process_without_a_group_saves_beside_its_work_too(tmp_path):
    saver, w = AsyncSaver(), torch.ones(3)
    saver.save({"w": w}, tmp_path / "it", metadata={})
    w.zero_()
    saver.wait()
    load({"w": w}, tmp_path / "it")
    assert w.tolist() == [1.0] * 3


def test_one_is_written_at_a_time(tmp_path):
    saver, gate = AsyncSaver(), Gate()
    saver.save({"w": torch.ones(3)}, tmp_path / "iter_0000001", metadata={})
    threading.Timer(0.3, gate.open).start()
    assert not (tmp_path / "iter_0000001").exists()
    started = time.monotonic()
    saver.save({"w": torch.ones(3)}, tmp_path / "iter_0000002", metadata={}, keep=Retention(1))
    assert time.monotonic() - started > 0.2  # for the first
    assert (tmp_path / "iter_0000001").exists() or (tmp_path / "iter_0000002").exists()
    saver.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest"]


def _fails_on_rank_1(root: str) -> list[str]:
    saver, kept = AsyncSaver(), storage._append
    saver.save({"w": torch.ones(2)}, f"{root}/iter_0000001", metadata={})
    saver.wait()
    told = []
    if dist.get_rank() == 1:
        storage._append = _cannot_write
    saver.save({f"w{dist.get_rank()}": torch.ones(2)}, f"{root}/iter_0000002", metadata={})
    deadline = time.monotonic() + 30
    while not saver.failed and time.monotonic() < deadline:
        time.sleep(0.01)
    storage._append = kept
    for then in (saver.wait, lambda: saver.save({"w": torch.ones(2)}, f"{root}/iter_0000003", metadata={})):
        try:
            then()
        except CheckpointError as error:
            told.append(str(error))
    saver.wait()
    return told


def _cannot_write(*args):
    raise OSError("no space left")


def test_a_failure_of_one_writer_is_raised_once_on_all(tmp_path):
    told = run_distributed(_fails_on_rank_1, 2, str(tmp_path), limit_s=60)
    assert told[0] == told[1] and len(told[0]) == 1
    assert "iter_0000002" in told[0][0] and "no space left" in told[0][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000003", "latest"]


def test_a_failure_before_the_copies_are_made_does_not_hold_training_back(tmp_path):
    saver = AsyncSaver()
    saver.save({"w": torch.ones(2, device="meta")}, tmp_path / "it", metadata={})
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        saver.wait()
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        saver.save({"w": torch.ones(2, device="meta")}, tmp_path / "it", metadata={})
        saver.save({"w": torch.ones(2)}, tmp_path / "it", metadata={})


def test_staging_memory_is_kept_and_grows():
    staging = HostStaging()
    small = staging.take([torch.arange(3.0), torch.ones(2, 2, dtype=torch.bfloat16)])
    address = small[0].data_ptr()
    assert staging.take([torch.zeros(1)])[0].data_ptr() == address
    odd = [torch.arange(5, dtype=torch.uint8), torch.arange(12.0).view(3, 4).t(), torch.tensor(7), torch.empty(0)]
    assert all(torch.equal(a, b) for a, b in zip(staging.take(odd * 9), odd * 9, strict=True))
