"""The folder of a run without --save: its own, also beside others of one second, and found again after a restart."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import run_folder
from run_folder import STARTED_FILE, run_folder_named

from core.base.errors import ConfigError
from core.rendezvous import default_group
from core.training.config.build import build_config
from core.training.launch.messages import RUN_STARTED
from tests.unit._spawn import on_ranks

SIZES = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "micro_batch_size": 1}
CONFIG = build_config({**SIZES, "train_iters": 1, "lr": 0.1})
SECOND = "20260131-120000"


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One rank in a folder of its own, without the memory of earlier runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_folder, "_folders", {})
    for name in ("RANK", RUN_STARTED, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    default_group.init_process_group()
    yield tmp_path
    run_folder.dist.destroy_process_group()


def _name(started: str, restarts: int = 0, *, forget: bool = True) -> str:
    """Returns the folder that a run would write into, and leaves a file there."""
    changed = {RUN_STARTED: started, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    with mock.patch.dict(os.environ, changed), run_folder_named(CONFIG) as config:
        if forget:  # as a new process
            run_folder._folders.clear()
        folder = config.checkpoint.save
        assert folder is not None and folder.parent == Path("runs")
        (folder / "log.jsonl").touch()
        return folder.name


def test_runs_of_one_second_have_folders_of_their_own(alone: Path) -> None:
    starts = [f"{SECOND}.00000{number}" for number in range(3)]
    names = [_name(started) for started in starts]
    assert names == [SECOND, f"{SECOND}-2", f"{SECOND}-3"]
    assert [_name(started, restarts=1) for started in reversed(starts)] == names[::-1]
    assert _name(starts[0]) == f"{SECOND}-4"  # a program that starts again below one launcher, not by it
    assert _name(SECOND, restarts=1) == f"{SECOND}-5"  # of a launcher that made none yet


def test_runs_without_a_launcher_have_folders_of_their_own(alone: Path) -> None:
    with mock.patch.object(run_folder, "datetime") as clock:
        clock.now.return_value.__format__ = lambda *_: SECOND
        assert [_name(""), _name(""), _name("", restarts=1)] == [SECOND, f"{SECOND}-2", f"{SECOND}-3"]


def test_a_process_that_stays_knows_its_folder_without_the_disk(alone: Path) -> None:
    _name(f"{SECOND}.1")
    assert _name(f"{SECOND}.2", forget=False) == f"{SECOND}-2"
    (Path("runs") / f"{SECOND}-2").rename("elsewhere")
    assert _name(f"{SECOND}.2", restarts=1, forget=False) == f"{SECOND}-2"
    assert (Path("runs") / f"{SECOND}-2" / STARTED_FILE).read_text() == f"{SECOND}.2"


def test_a_run_that_writes_nothing_leaves_no_folder(alone: Path) -> None:
    with pytest.raises(ConfigError, match="no lr"), ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {RUN_STARTED: f"{SECOND}.1"}))
        stack.enter_context(run_folder_named(CONFIG))
        assert (Path("runs") / SECOND / STARTED_FILE).exists()
        raise ConfigError("no lr")
    assert not list(alone.iterdir())


def test_a_place_for_runs_that_cannot_be_written_is_one_error(alone: Path) -> None:
    (alone / "runs").touch()
    with pytest.raises(ConfigError, match=r"runs cannot be written .*--save"), run_folder_named(CONFIG):
        pass


@on_ranks(2)
def test_survivors_tell_a_new_first_rank_the_folder(tmp_path: Path) -> None:
    """Rank 1 stays, and rank 0 is new and has another disk."""
    rank = run_folder.dist.get_rank()
    (tmp_path / str(rank)).mkdir()
    restarted = {RUN_STARTED: f"{SECOND}.1", "TORCHELASTIC_RESTART_COUNT": "1"}
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, restarted):
        patch.chdir(tmp_path / str(rank))
        if rank == 1:
            run_folder._folders[f"{SECOND}.1"] = Path("runs") / f"{SECOND}-7"
        with run_folder_named(CONFIG) as config:
            assert config.checkpoint.save == Path("runs") / f"{SECOND}-7"
            if rank == 0:
                assert (config.checkpoint.save / STARTED_FILE).exists()
