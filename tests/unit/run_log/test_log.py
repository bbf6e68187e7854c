"""The log of a stranger's loop: which steps have a line, what is in it, who writes it, and what is waited for."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from core.base.errors import ConfigError
from core.comm.record import record_of
from core.distributed import finalize_model_grads
from core.run_log import RunLog, read_log
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit.optimizer._squares import CONFIGS, build
from tests.unit.optimizer.test_layer_norms import Blocks


def _lines(folder: Path) -> list[dict[str, Any]]:
    return read_log(folder / "log.jsonl")


def test_a_line_holds_what_came_since_the_last(tmp_path):
    with RunLog(tmp_path, steps=range(1, 6), every=2, tokens_per_step=100, settings={"a": 1}, curve=True) as log:
        logged = [log.step(step, float(step), seconds=0.5, lr=0.1, part="x") for step in range(1, 6)]
        log.log(5, validation_loss=math.nan)
    assert logged == [False, True, False, True, True]
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5, 5]
    assert [line.get("loss") for line in lines] == [1.5, 3.5, 5.0, None]
    assert lines[1]["tokens_per_s"] == 200.0 and lines[1]["step_s"] == 0.5
    assert lines[1]["memory_bytes"] > 1e6
    assert lines[1]["part"] == "x" and lines[1]["lr"] == 0.1
    assert lines[3] == {"step": 5, "validation_loss": None}  # JSON has no NaN
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_a_run_that_goes_on_has_each_step_once(tmp_path):
    for steps in (range(4), range(2, 5), range(5, 5)):
        with RunLog(tmp_path, steps=steps, every=1) as log:
            for step in steps:
                log.step(step, 1.0)
    assert [line["step"] for line in _lines(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_log_of_unknown_steps_keeps_earlier_lines(tmp_path, capsys):
    for first in (0, 3):
        RunLog(tmp_path, every=1).close()
        with RunLog(tmp_path, every=1) as log:
            for step in range(first, first + 4):
                log.step(step, 1.0)
    assert [line["step"] for line in _lines(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    assert "1 line of an earlier run removed, from step 3 on" in capsys.readouterr().err


def test_numbers_of_numpy_are_numbers(tmp_path):
    with RunLog(tmp_path, every=1, settings={"a": [math.nan, 1]}) as log:
        log.step(numpy.int64(0), numpy.float32(1), acc=numpy.float32(0.5), seconds=numpy.float32(1), lr=numpy.array(2))
        log.log(0, validation=numpy.ones(1))
        log.step(1, torch.ones(3), tokens=torch.tensor(6), seconds=2.0)
    first, second, third = _lines(tmp_path)
    assert (first["loss"], first["acc"], first["lr"], second["validation"]) == (1.0, 0.5, 2, 1.0)
    assert third["tokens_per_s"] == 3.0
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": [None, 1]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step": "4", "loss": 1.0}, "step is '4'; give its number"),
        ({"step": 4, "loss": "1"}, "loss is '1'; give a number"),
        ({"step": 4, "acc": torch.ones(3)}, r"acc is a tensor of shape \(3,\); give a number, or a tensor of one"),
        ({"step": 4, "acc": [1.0]}, r"acc is \[1.0\]; give"),
    ],
)
def test_a_value_that_is_no_number_is_named(values, message):
    with RunLog(every=10) as log, pytest.raises(ConfigError, match=message):
        log.step(**values)


def test_an_optimizer_without_rates_has_none_in_a_line(tmp_path):
    class Plain(torch.optim.Optimizer):
        def step(self, closure=None):
            return None

    optimizer = Plain([nn.Parameter(torch.ones(1))], {})
    with RunLog(tmp_path, every=1, optimizer=optimizer) as log:
        optimizer.step()
        log.step(0, 1.0)
    assert "lr" not in _lines(tmp_path)[0]


def test_time_is_that_of_steps_alone(tmp_path):
    with RunLog(tmp_path, every=1) as log:
        time.sleep(0.2)
        log.restart()
        log.step(0)
    assert _lines(tmp_path)[0]["step_s"] < 0.2


def test_losses_are_read_at_logged_steps_alone(tmp_path):
    class Unread(torch.Tensor):
        reads: list[str] = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func.__name__ in ("item", "tolist", "cpu", "__float__"):
                cls.reads.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    loss = torch.ones(2).as_subclass(Unread)
    with RunLog(tmp_path, steps=range(1, 6), every=5) as log:
        for step in range(1, 6):
            assert Unread.reads == []
            log.step(step, loss, extra=loss[0])
            loss.mul_(2.0)  # its memory is the loop's
    [line] = _lines(tmp_path)
    assert line["loss"] == sum(2.0**step for step in range(5)) / 5 and line["extra"] == 16.0


def test_rate_and_operations_are_those_of_optimizer_and_model(tmp_path):
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=1)
    with RunLog(tmp_path, every=1, model=model, optimizer=optimizer, tokens_per_step=10, peak_flops=1e6) as log:
        for step in range(2):
            model(torch.ones(1, 9)).backward()
            optimizer.step()
            schedule.step()
            log.step(step, seconds=2.0)
    assert [line["lr"] for line in _lines(tmp_path)] == [0.25, 0.5]
    parameters = sum(p.numel() for p in model.parameters())
    assert _lines(tmp_path)[0]["mfu"] == pytest.approx(6 * parameters * 10 / 2.0 / 1e6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 1000}, r"steps is 1000; give the range that the loop runs over, such as range\(1000\)"),
        ({"steps": range(10, 0, -1)}, r"steps is range\(10, 0, -1\); give a range that counts up"),
        ({"every": 0}, "every is 0; give 1"),
        ({"every": 2.5}, "every is 2.5; give 1"),
        ({"model": 5}, "model has 5; give the nn.Module"),
        ({"optimizer": 5}, "optimizer is 5; give the torch.optim.Optimizer"),
        ({"layer_norms": True}, "layer_norms needs the optimizer"),
    ],
)
def test_arguments_out_of_range_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        RunLog(**settings)


@contextmanager
def _stranger(wrapper: str) -> Iterator[tuple[Any, Any]]:
    """A model and optimizer under a wrapper of ours, under torch's, or under none."""
    torch.manual_seed(0)
    if wrapper in CONFIGS:
        yield build(Blocks, wrapper, 1, {"lr": 0.05})
        return
    model: nn.Module = TorchDDP(Blocks()) if wrapper == "torch ddp" else Blocks()
    yield model, torch.optim.AdamW(model.parameters(), lr=0.05)


def _train(folder: Path, wrapper: str, is_slow: bool = False) -> list[str]:
    rank = dist.get_rank()
    with _stranger(wrapper) as (model, optimizer):
        settings: dict[str, Any] = {"layer_norms": True, "tokens_per_step": 8, "peak_flops": 1e9}
        log = RunLog(folder, steps=range(6), every=4, model=model, optimizer=optimizer, **settings)
        for step in range(6):
            if is_slow and rank == 1:
                time.sleep(0.05)
            loss = model(torch.ones(4, 9))
            loss.backward()
            if hasattr(model, "zero_grad_buffer"):
                finalize_model_grads([model])
            optimizer.step()
            optimizer.zero_grad()
            log.step(step, torch.tensor(float(rank * 2 + step)), seconds=1.0)
        log.close()
    return [path.name for path in folder.iterdir()] if rank == 0 else []


@pytest.mark.parametrize("wrapper", [*CONFIGS, "torch ddp", "none"])
def test_any_wrapper_has_the_same_log(tmp_path, wrapper):
    assert run_distributed(_train, 2, tmp_path, wrapper)[0] == ["log.jsonl"]
    lines = _lines(tmp_path)
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 1.0), (4, 3.5), (5, 6.0)]  # over steps and ranks
    parameters = sum(p.numel() for p in Blocks().parameters())
    for line in lines:
        assert line["tokens_per_s"] == 8.0 and line["lr"] == 0.05
        assert line["mfu"] == pytest.approx(6 * parameters * 8 / 1e9 / 2)
        assert line["skew"] >= 1.0 and line["slowest_rank"] in (0, 1)
        assert line["grad_norm/blocks.1"] > 0 and line["weight_norm/embed"] > 0 and line["update_norm/scale"] > 0


def test_the_slowest_rank_is_named(tmp_path):
    run_distributed(_train, 2, tmp_path, "ddp", True)
    line = _lines(tmp_path)[-1]
    assert line["slowest_rank"] == 1 and 1.3 < line["skew"] <= 2.0


@on_ranks(2)
def test_ranks_talk_at_logged_steps_alone():
    log = RunLog(steps=range(1, 9), every=4)
    before, sent = len(record_of().calls), []
    for step in range(1, 9):
        log.step(step, 1.0)
        sent.append(len(record_of().calls) - before)
    log.close()
    assert sent == [0, 0, 0, 1, 1, 1, 1, 2]


@on_ranks(2)
def test_what_one_rank_cannot_open_raises_on_all():
    with pytest.raises(ConfigError, match="trackers has 'nothing'"):
        RunLog(trackers=["nothing"])


@pytest.mark.parametrize("name", ["loss.png", "config.json"])
def test_files_that_cannot_be_written_end_nothing(tmp_path, monkeypatch, capsys, name):
    def full(*_args, **_options) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    targets = {"loss.png": "draw_loss_curve", "config.json": "write_durably"}
    monkeypatch.setattr(f"core.run_log.log.{targets[name]}", full)
    with RunLog(tmp_path, steps=range(2), every=1, settings={}, curve=True) as log:
        for step in range(2):
            log.step(step, 1.0)
    assert [line["step"] for line in _lines(tmp_path)] == [0, 1]
    err = capsys.readouterr().err
    assert f"{name} cannot be written (No space left on device)" in err
    assert f"warning: not written: {tmp_path / name}" in err


def test_a_run_without_a_folder_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with RunLog(every=1) as log:
        log.step(1, Tensor([2.0]))
    assert list(tmp_path.iterdir()) == []
    assert "loss 2," in capsys.readouterr().err
