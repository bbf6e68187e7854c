"""The report of the throughput benchmark: where it is written and under which name, and flags that contradict."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest
import torch

from tests.unit._benchmark_modules import load


def test_a_report_never_takes_the_name_of_another(tmp_path):
    module = load("_throughput_report")
    paths = [module.new_path(tmp_path / "new" / "folder", "cpu", "1b", "ddp") for _ in range(3)]
    day = datetime.datetime.now(tz=datetime.UTC).date()
    assert [path.name for path in paths] == [f"gpt_throughput-cpu-1b-ddp-{day}{end}.json" for end in ("", "-2", "-3")]
    paths[1].write_text("others")
    module.Report([], "CPU", {}).save(paths[0])
    assert paths[1].read_text() == "others" and len(list(paths[0].parent.iterdir())) == 3
    module.Report([], "CPU", {}).save(None)


def test_a_write_that_is_killed_leaves_the_report_before(tmp_path, monkeypatch):
    module = load("_throughput_report")
    path = module.new_path(tmp_path, "cpu")
    module.Report(["first"], "CPU", {}).save(path)
    write = Path.write_text

    def half(path: Path, text: str) -> None:
        write(path, text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        module.Report(["second"], "CPU", {}).save(path)
    assert json.loads(path.read_text())["command"] == ["first"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-save", "--results", "x"], "--no-save writes no report for --results; drop one of the two"),
        (["--wrapper", "bare", "--against", "bare"], "--against bare is what --wrapper is; choose another"),
        (["--against", "bare", "--ladder"], "--against measures one comparison, in --rounds; drop "),
        (["--against", "bare", "--steps", "3"], "--against measures one comparison, in --rounds; drop "),
        (["--rounds", "3"], "--rounds are those of --against; drop it, or take --steps"),
        (["--micro-batches", "0"], "argument --micro-batches: '0' is no number above 0"),
        (["--micro-batches", "x"], "argument --micro-batches: 'x' is no number above 0"),
        (["--results", "/proc/none"], "the folder /proc/none cannot be made: "),
        (["--profile", __file__], f"the folder {__file__} cannot be made: "),
        (["--ladder", "half"], "there is no half; there are plain, compiled layers, "),
    ],
)
def test_settings_that_contradict_each_other_end_with_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        load("gpt_throughput").parse(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "device", "folder"),
    [
        ([], "cpu", None),
        ([], "cuda", "default"),
        (["--save"], "cpu", "default"),
        (["--no-save"], "cuda", None),
        (["--results", "given"], "cpu", "given"),
        (["--results", "given", "--save"], "cpu", "given"),
    ],
)
def test_where_a_report_is_written(arguments, device, folder, tmp_path, monkeypatch):
    throughput = load("gpt_throughput")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(throughput, "RESULTS", Path("default"))
    path = throughput._path_of(throughput.parse(arguments), torch.device(device), "1b")
    assert (None if path is None else str(path.parent)) == folder
    assert path is None or path.name.startswith(f"gpt_throughput-{device}-1b-ddp-20")


def test_the_caller_says_the_commit_where_git_does_not(monkeypatch):
    module = load("_measure")
    monkeypatch.setenv("SHARDSTACK_COMMIT", "abc")
    monkeypatch.setattr(module, "_output_of", lambda *command: None)
    assert module.commit() == "abc"
    monkeypatch.delenv("SHARDSTACK_COMMIT")
    assert module.commit() is None
    monkeypatch.setenv("SHARDSTACK_COMMIT", "abc")
    monkeypatch.setattr(module, "_output_of", lambda *command: "def" if "rev-parse" in command else None)
    assert module.commit() == "def"
