"""Ranks of one checkpoint agree: what fails on one is raised on all, and what cannot be saved is refused first."""

import pytest
import torch
import torch.distributed as dist

from core import parallel_state
from core.base.errors import CheckpointError
from core.dist_checkpointing import load, save, saving
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.dist_checkpointing._pieces import toy


@pytest.mark.parametrize(
    ("state", "metadata", "message"),
    [
        ({"step": 3}, {}, "step is a int, and only tensors"),
        ({"w": torch.ones(2, device="meta")}, {}, "w is on the meta device"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, {}, "complex64"),
        ({"w": torch.eye(2).to_sparse()}, {}, "sparse"),
        ({"w": torch.ones(2)}, {"a": {"dtype": torch.float32}}, r"metadata\['a'\]\['dtype'\] is a dtype"),
        ({"w": torch.ones(2)}, {1: 2}, "the key 1"),
        ({}, {}, "no rank gave a tensor"),
    ],
)
def test_unsupported_values_are_refused_before_writing(tmp_path, state, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        save(state, tmp_path / "root" / "it", metadata=metadata)
    assert list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("it")) + list(tmp_path.rglob("latest")) == []


def _fails_on_rank_1(moment: str, directory: str) -> str:
    if moment == "before writing":
        state = {"w": torch.ones(2), "odd": 3 if dist.get_rank() == 1 else torch.ones(1)}
        run = lambda: save(state, directory, metadata={})  # noqa: E731
    elif moment == "while writing":
        if dist.get_rank() == 1:
            saving._write_piece, kept = _cannot_write, saving._write_piece
        run = lambda: save({f"w{dist.get_rank()}": torch.ones(2)}, directory, metadata={})  # noqa: E731
    else:
        shape = 3 if dist.get_rank() == 1 else 2
        run = lambda: load({"w": torch.zeros(shape)}, directory)  # noqa: E731
    try:
        with pytest.raises(CheckpointError) as caught:
            run()
    finally:
        if moment == "while writing" and dist.get_rank() == 1:
            saving._write_piece = kept
    return str(caught.value)


def _cannot_write(*args):
    raise OSError("no space left")


@pytest.mark.parametrize(
    ("moment", "message"),
    [("before writing", "odd is a int"), ("while writing", "no space left"), ("reading", "float32 [3] here")],
)
def test_what_fails_on_one_rank_is_raised_on_all(tmp_path, moment, message):
    save({"w": torch.ones(2)}, tmp_path / "old", metadata={})
    directory = tmp_path / ("old" if moment == "reading" else "new")
    messages = run_distributed(_fails_on_rank_1, 2, moment, str(directory))
    assert messages[0] == messages[1]
    assert message in messages[0]
    assert {path.name for path in tmp_path.iterdir()} == {"old", "latest"}


@on_ranks(2)
def test_a_rank_can_keep_tensors_of_its_own(tmp_path):
    directory = str(tmp_path / "it")
    mine = f"rng.rank{dist.get_rank()}"
    save({mine: torch.tensor([dist.get_rank() + 1]), "w": torch.ones(2)}, directory, metadata={})
    read = {mine: torch.tensor([0]), "w": torch.zeros(2)}
    load(read, directory)
    assert read[mine].item() == dist.get_rank() + 1
    if dist.get_rank() == 1:
        del read[mine]
    with pytest.raises(CheckpointError, match=r"not asked for, but in the checkpoint: rng\.rank1$"):
        load(read, directory)


@on_ranks(2)
def test_a_bare_tensor_parallel_piece_is_not_taken_for_the_whole(tmp_path):
    directory = str(tmp_path / "it")
    parallel_state.initialize_model_parallel(2)
    model = toy("tp2", filled=True)
    with pytest.raises(CheckpointError, match=r"columns\.weight is one tensor-parallel rank's piece"):
        save(dict(model.named_parameters()), directory, metadata={})
