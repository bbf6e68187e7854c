"""Trackers with their real packages, offline: the numbers of the log arrive there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.base.errors import ConfigError, MissingExtraError
from core.run_log import RunLog
from tests.unit._quick import needs


def _log(folder: Path, tracker: Any, last: int = 3) -> None:
    with RunLog(folder, steps=range(1, last + 1), every=1, trackers=[tracker], settings={"width": 8}) as log:
        for step in range(1, last + 1):
            log.step(step, float(step), part="a word")
        log.log(last, validation_loss=2.5)


def _in_process(folder: Path, tracker: str, read: str, **environment: str) -> Any:
    """Logs, and reads the numbers back by the package itself, in a process whose settings end with it."""
    code = (
        f"import json; from pathlib import Path; from tests.unit.run_log.test_trackers import _log\n"
        f"folder = Path({str(folder)!r}) / 'mine'; _log(folder, {tracker!r})\n{read}\n"
        "(folder / 'found.json').write_text(json.dumps(found))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", "HOME": str(folder), "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", **environment},
        cwd=Path.cwd(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "mine" / "found.json").read_text())


@needs("tensorboard")
def test_tensorboard_gets_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _log(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [(e.step, e.value) for e in events.Scalars("validation_loss")] == [(3, 2.5)]


@needs("mlflow")
def test_mlflow_gets_the_same_numbers(tmp_path):
    read = (
        "import mlflow; client = mlflow.MlflowClient(); [run] = mlflow.search_runs(search_all_experiments=True, "
        "output_format='list'); history = client.get_metric_history(run.info.run_id, 'loss')\n"
        "name = client.get_experiment(run.info.experiment_id).name\n"
        "found = [name, run.info.status, run.data.params, [[m.step, m.value] for m in history]]"
    )
    store = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    found = _in_process(tmp_path, "mlflow", read, **store)
    assert found == ["mine", "FINISHED", {"width": "8"}, [[1, 1.0], [2, 2.0], [3, 3.0]]]


@needs("trackio")
def test_trackio_gets_the_same_numbers(tmp_path):
    read = (
        "import sqlite3; [file] = Path(folder.parent, 'trackio').glob('*.db')\n"
        "rows = sqlite3.connect(file).execute('select step, metrics from metrics order by id').fetchall()\n"
        "found = [file.stem, [[step, json.loads(m).get('loss')] for step, m in rows]]"
    )
    found = _in_process(tmp_path, "trackio", read, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert found == ["mine", [[1, 1.0], [2, 2.0], [3, 3.0], [3, None]]]


def _history_of_wandb(data: bytes) -> list[list[float]]:
    """Reads steps and losses of the file of an offline run: LevelDB's records, after a header, of one block."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, start = [], 7
    while start + 7 <= min(len(data), 1 << 15):
        size = int.from_bytes(data[start + 4 : start + 6], "little")
        record = Record.FromString(data[start + 7 : start + 7 + size])
        start += 7 + size
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "loss" in items:
            rows.append([json.loads(items["_step"]), json.loads(items["loss"])])
    return rows


@needs("wandb")
def test_wandb_gets_the_same_numbers(tmp_path):
    read = (
        "from tests.unit.run_log.test_trackers import _history_of_wandb\n"
        "import time; [file] = folder.parent.glob('wandb/offline-run-*/run-*.wandb'); found, begun = [], time.time()\n"
        "while len(found) < 3 and time.time() < begun + 60:  # a process of wandb's own writes\n"
        "    time.sleep(0.1); found = _history_of_wandb(file.read_bytes())"
    )
    found = _in_process(tmp_path, "wandb", read, WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    assert found == [[1, 1.0], [2, 2.0], [3, 3.0]]


class Recorder:
    """A tracker of a user's, such as a run of wandb or a tracker of accelerate."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []
        self.fails, self.has_finished = False, False

    def log(self, values: dict[str, Any], *, step: int) -> None:
        if self.fails:
            raise RuntimeError("the server is away")
        self.lines.append((step, values))

    def finish(self) -> None:
        self.has_finished = True


def test_an_object_of_the_users_is_taken(tmp_path, capsys):
    recorder = Recorder()
    _log(tmp_path, recorder)
    assert [(step, values.get("loss")) for step, values in recorder.lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (3, None)]
    assert recorder.has_finished and all("part" not in values for _, values in recorder.lines)
    with pytest.raises(ConfigError, match=r"trackers has \{\}; .*, or an object with log and finish"):
        RunLog(tmp_path, trackers=[{}])


def test_a_server_that_is_away_ends_no_training(tmp_path, capsys):
    recorder = Recorder()
    recorder.fails = True
    _log(tmp_path, recorder)
    path, err = tmp_path / "log.jsonl", capsys.readouterr().err
    assert err.count(f"tracker Recorder failed (the server is away): its numbers are in {path}, and training ") == 1
    assert len(path.read_text().splitlines()) == 4


def test_a_server_that_is_away_hides_no_full_disk(tmp_path, capsys):
    recorder = Recorder()
    recorder.fails = True
    with RunLog(tmp_path, every=1, trackers=[recorder]) as log:
        log.step(0, 1.0)
        (tmp_path / "log.jsonl").unlink()
        (tmp_path / "log.jsonl").mkdir()
        log.step(1, 1.0)
        err = capsys.readouterr().err
    assert err.count("warning: ") == 2 and "log.jsonl cannot be written (Is a directory)" in err


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_a_tracker_without_its_package_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"needs the package '{name}': pip install 'shardstack\[trackers\]'"):
        RunLog(tmp_path, trackers=[name])


def test_trackers_that_cannot_start_are_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="trackers has 'wandbb'; did you mean 'wandb'"):
        RunLog(tmp_path, trackers="wandbb")
    with pytest.raises(ConfigError, match="'tensorboard' writes into the log's folder, and there is none"):
        RunLog(trackers=["tensorboard"])
