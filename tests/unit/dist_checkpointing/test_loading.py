"""A saved state is loaded bitwise into any layout, or nothing changes and all ranks raise the reason."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from core.base.dtypes import DTYPES
from core.base.errors import CheckpointError
from core.dist_checkpointing import (
    checkpoint_directory,
    latest_checkpoint,
    load,
    load_metadata,
    local_slices,
    local_tensor,
    model_state_dict,
    save,
    saving,
)
from tests.unit._spawn import run_anywhere, run_distributed
from tests.unit.dist_checkpointing._pieces import SHAPES, state_of, toy, whole


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (4, 6), dtype=np.uint8))
    state = {f"dtype.{name}": bits.to(dtype) for name, dtype in DTYPES.items()}
    state |= {
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "strided": torch.arange(8)[::2],
        "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    metadata = {"iteration": 3, "betas": (0.9, 0.95), "loss": 1e-300, "nested": {"ü": [None, True]}}
    save(state, tmp_path / "it", metadata=metadata)
    read = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found = load(read, tmp_path / "it")
    assert found == {**metadata, "betas": [0.9, 0.95]}
    assert load_metadata(tmp_path / "it") == found
    for name, tensor in state.items():
        assert torch.equal(_bits(read[name]), _bits(tensor)), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _write(layout: str, directory: str) -> None:
    save(state_of(layout, filled=True)[1], directory, metadata={"layout": layout})


def _read(layouts: list[str], directory: str) -> None:
    for layout in layouts:
        model, state = state_of(layout, filled=False)
        load(state, directory)
        for name, param in model.named_parameters():
            if "flat" in layout:  # box by box: shapes and cuts differ
                boxes = [tuple(slice(o, o + s) for o, s in zip(*box, strict=True)) for box in state[name].boxes]
                expected = torch.cat([torch.empty(0), *(whole(name)[box].flatten() for box in boxes)])
                assert torch.equal(state[name].elements, expected), (layout, name)
            else:
                assert torch.equal(local_tensor(param), whole(name)[local_slices(param)]), (layout, name)
        assert model.steps.item() == 11


Layout = tuple[int, str]
"""Ranks, and words for `toy`."""
LAYOUTS: list[Layout] = [(1, "plain"), (2, "fsdp"), (2, "tp2"), (2, "flat"), (2, "tp2 flat")]
ON_FOUR: list[Layout] = [(4, "tp2 fsdp"), (4, "hybrid"), (4, "flat"), (4, "tp2 flat"), (4, "hybrid flat")]


def _round_trips(writer: Layout, readers: list[Layout], folder: Path) -> None:
    run_anywhere(_write, *writer, str(folder))
    # of what several ranks hold, one has written: the files hold each element once
    elements = sum(torch.Size(shape).numel() for shape, _ in SHAPES.values())
    pieces = [
        piece
        for tensor in json.loads((folder / "checkpoint.json").read_text())["tensors"].values()
        for piece in tensor["pieces"]
    ]
    assert sum(num_bytes for *_, num_bytes, _ in pieces) == 4 * elements + 8  # the buffer is one int64
    for ranks in sorted({ranks for ranks, _ in readers}):
        run_anywhere(_read, ranks, [layout for of, layout in readers if of == ranks], str(folder))


@pytest.mark.parametrize("writer", LAYOUTS, ids=str)
def test_what_one_layout_writes_any_other_reads(tmp_path, writer):
    _round_trips(writer, LAYOUTS, tmp_path / "it")


@pytest.mark.long
@pytest.mark.parametrize("writer", [*LAYOUTS, *ON_FOUR], ids=str)
def test_what_four_ranks_write_any_other_reads(tmp_path, writer):
    _round_trips(writer, [*LAYOUTS, *ON_FOUR] if writer in ON_FOUR else ON_FOUR, tmp_path / "it")


def test_all_misfits_are_one_error_and_nothing_changes(tmp_path):
    save({"same": torch.ones(2), "gone": torch.ones(1), "shape": torch.ones(2), "kind": torch.ones(2)}, tmp_path / "a",
         metadata={})  # fmt: skip
    mine = {"same": torch.zeros(2), "new": torch.zeros(1), "shape": torch.zeros(3), "kind": torch.zeros(2).bfloat16()}
    with pytest.raises(CheckpointError) as caught:
        load(mine, tmp_path / "a")
    message = str(caught.value)
    for part in [
        "missing in the checkpoint: new",
        "not asked for, but in the checkpoint: gone",
        "shape is float32 [2] in the checkpoint and float32 [3] here",
        "kind is float32 [2] in the checkpoint and bfloat16 [2] here",
    ]:
        assert part in message
    assert not any(tensor.any() for tensor in mine.values())


def test_floating_tensors_are_cast_where_that_is_asked_for(tmp_path):
    values = torch.tensor([1.0, 1.001, -3.14159])
    save({"fine": values, "coarse": values.bfloat16(), "count": torch.ones(3, dtype=torch.int64)}, tmp_path / "it",
         metadata={})  # fmt: skip
    mine = {"fine": nn.Parameter(torch.zeros(3).bfloat16()), "coarse": torch.zeros(3)}
    load(mine | {"count": torch.zeros(3, dtype=torch.int64)}, tmp_path / "it", verify=True, cast=True)
    assert torch.equal(mine["fine"], values.bfloat16()) and mine["fine"].dtype == torch.bfloat16
    assert torch.equal(mine["coarse"], values.bfloat16().float())
    with pytest.raises(CheckpointError, match=r"count is int64 \[3\] in the checkpoint and float32 \[3\] here"):
        load(mine | {"count": torch.zeros(3)}, tmp_path / "it", cast=True)


def test_without_strict_common_names_load_and_one_must_exist(tmp_path):
    save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "it", metadata={"n": 1})
    mine = {"a": torch.zeros(2), "c": torch.zeros(2)}
    assert load(mine, tmp_path / "it", strict=False) == {"n": 1}
    assert mine["a"].all()
    assert not mine["c"].any()
    for state in ({"c": torch.zeros(2)}, {}):
        with pytest.raises(CheckpointError, match="no tensor in common"):
            load(state, tmp_path / "it", strict=False)
    with pytest.raises(CheckpointError, match="float32 \\[2\\] in the checkpoint and float32 \\[1\\] here"):
        load({"a": torch.zeros(1)}, tmp_path / "it", strict=False)


class _Crash(RuntimeError):
    pass


@pytest.mark.parametrize("moment", ["_write_piece", "encode_index", "folders.publish"])
def test_a_crash_while_saving_keeps_checkpoint_and_pointer(tmp_path, monkeypatch, moment):
    first, second = checkpoint_directory(tmp_path, 1), checkpoint_directory(tmp_path, 2)
    save({"w": torch.ones(2)}, first, metadata={"n": 1})

    def crash(*args):
        raise _Crash("the disk is full")

    owner, _, name = moment.rpartition(".")
    monkeypatch.setattr(getattr(saving, owner) if owner else saving, name, crash)
    for folder in (second, first):  # a new one, and one in place of the old
        with pytest.raises(CheckpointError, match="the disk is full"):
            save({"w": torch.zeros(2)}, folder, metadata={"n": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest"]
    assert latest_checkpoint(tmp_path) == first
    read = torch.zeros(2)
    assert load({"w": read}, first) == {"n": 1}
    assert read.all()


def test_a_checkpoint_replaces_one_of_its_name_and_nothing_else(tmp_path):
    for value in (1.0, 2.0):
        save({"w": torch.full((3,), value)}, tmp_path / "it", metadata={"value": value})
    read = torch.zeros(3)
    assert load({"w": read}, tmp_path / "it") == {"value": 2.0}
    assert read.tolist() == [2.0] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", "latest"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("text")
    with pytest.raises(CheckpointError, match="is no checkpoint, so it is not replaced"):
        save({"w": torch.ones(3)}, tmp_path / "mine", metadata={})
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "text"


def _reads_in_place(directory: str) -> None:
    model = toy("fsdp", filled=False)
    before = {name: local_tensor(param).data_ptr() for name, param in model.named_parameters()}
    state = model_state_dict(model)
    load(state, directory)
    assert {name: local_tensor(param).data_ptr() for name, param in model.named_parameters()} == before
    assert all(isinstance(state[name], DTensor) for name in before)


def test_loading_fills_the_storage_that_is_there(tmp_path):
    _write("plain", str(tmp_path / "it"))
    run_distributed(_reads_in_place, 2, str(tmp_path / "it"))


def _high_water_bytes() -> int:
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _rise_while_loading(directory: str, cut: bool, verify: bool) -> int:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        name: DTensor.from_local(torch.ones(512, 1024), mesh, [Shard(0)]) if cut else torch.ones(1024, 1024)
        for name in map(str, range(16))
    }
    load({"0": state["0"]}, directory, strict=False)  # code that is loaded at first use
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts from what is resident now
    before = _high_water_bytes()
    load(state, directory, verify=verify)
    return _high_water_bytes() - before


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
@pytest.mark.parametrize("cut", [False, True], ids=["as it was cut", "cut again"])
def test_loading_holds_at_most_one_tensor_on_top_of_its_targets(tmp_path, cut, verify):
    """16 tensors of 4 MiB: holding all of what is read would show as 32 or 64."""
    save({str(number): torch.zeros(1024, 1024) for number in range(16)}, tmp_path / "it", metadata={})
    rises = run_distributed(_rise_while_loading, 2, str(tmp_path / "it"), cut, verify)
    assert max(rises) < 8 << 20, rises
