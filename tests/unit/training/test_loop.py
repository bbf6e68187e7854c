"""The log of a run, and its skipped steps, which are reported once, and end it when they do not stop."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.base.errors import OptimizerError
from core.run_log import RunLog, read_log
from core.training import loop
from core.training.loop import LIMIT, SkippedSteps, _Reporter, _show_model
from core.training.train_step import StepResult
from tests.unit.training._configs import small_config


def test_the_first_is_warned_of_and_a_row_ends_the_run():
    skipped = SkippedSteps(scale_adapts=False)
    with pytest.warns(UserWarning, match="iteration 3 is skipped") as caught:
        for iteration in range(3, 2 + LIMIT):
            skipped.note(iteration, False)
        skipped.note(2 + LIMIT, True)  # the count starts again
        for iteration in range(LIMIT - 1):
            skipped.note(iteration, False)
    assert len(caught) == 1
    with pytest.raises(OptimizerError, match=r"iteration 99.*--lr"):
        skipped.note(99, False)


def test_with_a_dynamic_loss_scale_it_is_normal():
    skipped = SkippedSteps(scale_adapts=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in range(2 * LIMIT):
            skipped.note(iteration, False)


def _result(loss: float, updated: bool) -> StepResult:
    norm = 0.5 if updated else None
    return StepResult(
        loss=loss, has_update=updated, grad_norm=norm, num_zeros=None, stop=False, lr=0.1, loss_scale=1.0
    )


def _report(log: RunLog, last: int, hashes: dict[int, str]) -> None:
    """Reports steps of a run, the second of which is skipped, each when the next one runs."""
    state: Any = SimpleNamespace(iteration=0, optimizer=SimpleNamespace(grad_scaler=None), skipped_steps=0)
    reporter = _Reporter(state, log, SimpleNamespace())  # type: ignore[arg-type]
    for step in range(1, last + 1):
        state.iteration = step
        running: Any = SimpleNamespace(result=lambda step=step: _result(float(step), step != 2))
        reporter.take(running, 16)
        if step in hashes:
            reporter.note_hash(hashes[step])
    reporter.finish()


def test_lines_count_skipped_steps_and_have_hashes(tmp_path, capsys):
    with RunLog(tmp_path, steps=range(1, 6), every=2, average_loss=False) as log, pytest.warns(UserWarning):
        _report(log, 5, {1: "0a1b", 2: "2c3d"})
    lines = read_log(tmp_path / "log.jsonl")
    assert [line for line in lines if "weights_hash" in line] == [
        {"step": 1, "weights_hash": "0a1b"},
        {"step": 2, "weights_hash": "2c3d"},
    ]
    found = [(n["step"], n["loss"], n["skipped"], n["grad_norm"]) for n in lines if "loss" in n]
    assert found == [(2, 1.5, 1, None), (4, 3.5, 0, 0.5), (5, 5.0, 0, 0.5)]
    assert "step 2: weights_hash 2c3d" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch, capsys):
    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    model = SimpleNamespace(describe=lambda *_args, **_options: "a page")
    with RunLog(tmp_path) as log:
        _show_model(log, SimpleNamespace(model=model), 1)  # type: ignore[arg-type]
    err = capsys.readouterr().err
    assert err.startswith("a page\nwarning: ") and "model.html cannot be written (No space left on device)" in err


@pytest.mark.parametrize(("rank", "ranks", "warns"), [(0, (0, 2, 9), True), (0, (0, 1), False), (1, (9,), False)])
def test_traced_ranks_that_do_not_exist_are_named(rank, ranks, warns, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(loop.dist, "get_rank", lambda: rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop._profiler(small_config(profile=True, profile_ranks=ranks), tmp_path)
        loop._profiler(small_config(profile_ranks=ranks), tmp_path)
    assert [str(warning.message) for warning in caught] == warns * [
        "profile_ranks names 2, 9, and this run has ranks 0 to 1: the others alone are traced"
    ]


def test_wandb_gets_the_names_of_the_command_line(tmp_path, monkeypatch):
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR"):
        monkeypatch.setenv(name, "another")
    settings: dict[str, Any] = {"wandb_project": "p", "wandb_exp_name": "e", "wandb_save_dir": tmp_path}
    config = small_config(**settings, train_iters=1, tensorboard_dir=None, save=tmp_path / "run")
    opened = {}

    def open_log(folder: Path, trackers: list[Any], **_: Any) -> None:
        opened.update({name: os.environ[name] for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_DIR")})
        opened["trackers"] = trackers

    monkeypatch.setattr(loop, "RunLog", open_log)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 1)
    loop._open_log(SimpleNamespace(iteration=0, chunks=[], optimizer=None), config)  # type: ignore[arg-type]
    assert opened == {"WANDB_PROJECT": "p", "WANDB_NAME": "e", "WANDB_DIR": str(tmp_path), "trackers": ["wandb"]}
