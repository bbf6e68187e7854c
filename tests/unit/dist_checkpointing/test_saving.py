"""A checkpoint written while training goes on holds the state at the call, or an error says why not."""

import os
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.base import device
from core.base.errors import CheckpointError
from core.dist_checkpointing import (
    AsyncSaver,
    Retention,
    agreement,
    latest_checkpoint,
    load,
    model_state_dict,
    save,
    saving,
)
from core.dist_checkpointing.saving import HostStaging
from tests.unit._spawn import run_distributed
from tests.unit.dist_checkpointing._pieces import toy


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self) -> None:
        self._open, self._kept = threading.Event(), saving._write_piece
        saving._write_piece = self._wait

    def _wait(self, *args):
        assert self._open.wait(600)
        return self._kept(*args)

    def open(self) -> None:
        saving._write_piece = self._kept
        self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()


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


def test_one_process_without_a_group_saves_asynchronously_too(tmp_path):
    saver, w = AsyncSaver(), torch.ones(3)
    saver.save({"w": w}, tmp_path / "it", metadata={})
    w.zero_()
    saver.wait()
    load({"w": w}, tmp_path / "it")
    assert w.tolist() == [1.0] * 3


def _environment_of_the_group(root: str) -> str | None:
    seen: list[str | None] = []
    make = dist.new_group

    def noted(**options: Any) -> dist.ProcessGroup:
        seen.append(os.environ.get("TORCH_GLOO_LAZY_INIT"))
        return make(**options)

    saver = AsyncSaver()
    with mock.patch.object(device, "device_type", lambda: "cuda"), mock.patch.object(dist, "new_group", noted):
        saver.save({"w": torch.ones(3)}, f"{root}/it", metadata={})
        saver.wait()
    (found,) = seen
    return found


def test_in_a_group_of_others_its_gloo_connects_when_needed(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    assert run_distributed(_environment_of_the_group, 2, str(tmp_path)) == ["1", "1"]


def test_one_is_written_at_a_time(tmp_path):
    saver, gate = AsyncSaver(), Gate()
    saver.save({"w": torch.ones(3)}, tmp_path / "iter_0000001", metadata={})
    assert not (tmp_path / "iter_0000001").exists()
    join = saver._thread.join
    saver._thread.join = lambda limit_s: (gate.open(), join(limit_s))
    saver.save({"w": torch.ones(3)}, tmp_path / "iter_0000002", metadata={}, keep=Retention(1))
    assert gate.is_open  # it waited for the first
    assert (tmp_path / "iter_0000001").exists() or (tmp_path / "iter_0000002").exists()
    saver.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "latest"]


def _fails_on_rank_1(root: str) -> list[str]:
    saver, kept = AsyncSaver(), saving._write_piece
    saver.save({"w": torch.ones(2)}, f"{root}/iter_0000001", metadata={})
    saver.wait()
    messages = []
    if dist.get_rank() == 1:
        saving._write_piece = _cannot_write
    saver.save({f"w{dist.get_rank()}": torch.ones(2)}, f"{root}/iter_0000002", metadata={})
    deadline = time.monotonic() + 600
    while not saver.has_failed and time.monotonic() < deadline:
        time.sleep(0.01)
    saving._write_piece = kept
    for then in (saver.wait, lambda: saver.save({"w": torch.ones(2)}, f"{root}/iter_0000003", metadata={})):
        try:
            then()
        except CheckpointError as error:
            messages.append(str(error))
    saver.wait()
    return messages


def _cannot_write(*args):
    raise OSError("no space left")


def test_a_failure_of_one_writer_is_raised_once_on_all(tmp_path):
    messages = run_distributed(_fails_on_rank_1, 2, str(tmp_path))
    assert messages[0] == messages[1] and len(messages[0]) == 1
    assert "iter_0000002" in messages[0][0] and "no space left" in messages[0][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000003", "latest"]


def test_a_failure_before_copying_does_not_hold_training_back(tmp_path):
    saver = AsyncSaver()
    saver.save({"w": torch.ones(2, device="meta")}, tmp_path / "it", metadata={})
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        saver.wait()
    with pytest.raises(CheckpointError, match="w is on the meta device"):
        saver.save({"w": torch.ones(2, device="meta")}, tmp_path / "it", metadata={})
        saver.save({"w": torch.ones(2)}, tmp_path / "it", metadata={})


def _copies_ahead_of_the_plan(layout: str, root: str) -> bool:
    model, saver = toy(layout, filled=True), AsyncSaver()
    saver.save(model_state_dict(model), f"{root}/it", metadata={})
    saver.wait()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(2)
    save(model_state_dict(model), f"{root}/now", metadata={})
    kept = saving._write_piece
    saving._write_piece = lambda stream, tensor, start: (tensors.append(tensor), kept(stream, tensor, start))
    tensors: list[torch.Tensor] = []
    begun = saving.folders.begin
    planning, saving.folders.begin = threading.Event(), lambda folder: planning.wait(600) and begun(folder)
    saver.save(model_state_dict(model), f"{root}/it", metadata={})  # returns, though no plan can be made yet
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    waited = not tensors
    dist.barrier()  # one rank's plan lets all of them write
    planning.set()
    saver.wait()
    saving._write_piece, saving.folders.begin = kept, begun
    return waited and bool(tensors)


@pytest.mark.parametrize("layout", ["fsdp", "tp2"])
def test_a_state_cut_like_the_last_is_copied_before_planning(tmp_path, layout):
    assert all(run_distributed(_copies_ahead_of_the_plan, 2, layout, str(tmp_path)))
    assert content(tmp_path / "it") == content(tmp_path / "now")


def _cut_again_on_rank_1(root: str) -> None:
    saver, first = AsyncSaver(), dist.get_rank() == 0
    both = {"a": torch.arange(4.0), "b": torch.arange(8.0)}
    saver.save(both, f"{root}/it", metadata={})  # rank 0 writes one of them, rank 1 the other
    saver.wait()
    other = both | {"mine": torch.ones(3)} if not first else both
    save(other, f"{root}/now", metadata={})
    saver.save(other, f"{root}/it", metadata={})
    saver.wait()
    save({"b": both["b"]} if first else {"a": both["a"]}, f"{root}/fewer now", metadata={})
    saver.save({"b": both["b"]} if first else {"a": both["a"]}, f"{root}/fewer", metadata={})
    saver.wait()


def test_what_one_rank_cuts_otherwise_is_planned_before_all_copy(tmp_path):
    run_distributed(_cut_again_on_rank_1, 2, str(tmp_path))
    assert content(tmp_path / "it") == content(tmp_path / "now")
    assert content(tmp_path / "fewer") == content(tmp_path / "fewer now")


def test_staging_memory_is_kept_and_grows():
    staging = HostStaging()
    address = staging.copy([torch.arange(3.0), torch.ones(2, 2, dtype=torch.bfloat16)])[0].data_ptr()
    assert staging.copy([torch.zeros(1)])[0].data_ptr() == address
    odd = [torch.arange(5, dtype=torch.uint8), torch.arange(12.0).view(3, 4).t(), torch.tensor(7), torch.empty(0)] * 9
    assert all(torch.equal(a, b) for a, b in zip(staging.copy(odd), odd, strict=True))


@pytest.mark.parametrize(
    "changed",
    [
        {"t0": torch.ones(2), "t1": torch.ones(2)},
        {"t0": torch.ones(3)},
        {"t0": torch.ones(2, dtype=torch.int32)},
        {"t1": torch.ones(2)},
    ],
    ids=["one more", "longer", "of another dtype", "of another name"],
)
def test_another_state_is_planned_again(tmp_path, changed):
    saver = AsyncSaver()
    for state, plans in (({"t0": torch.ones(2)}, 1), ({"t0": torch.zeros(2)}, 0), (changed, 1)):
        with mock.patch.object(agreement, "planned_pieces", wraps=agreement.planned_pieces) as planned:
            saver.save(state, tmp_path / "it", metadata={})
        saver.wait()
        assert planned.call_count == plans
        found = {name: torch.full_like(tensor, 7) for name, tensor in state.items()}
        load(found, tmp_path / "it")
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
