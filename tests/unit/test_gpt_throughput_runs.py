"""Runs of the throughput benchmark: their rows, what they print and report, what makes one fail or end early."""

from __future__ import annotations

import contextlib
import datetime
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.base.errors import ParallelConfigError
from tests.unit._benchmark_modules import BENCHMARKS, load
from tests.unit._spawn import on_ranks, run_distributed

LIMIT_S = 300.0
"""For a process to start and to train a row."""


@contextlib.contextmanager
def _interpreted() -> Any:
    """Drops the techniques that need a C++ compiler, and minutes."""
    rows = load("_throughput_rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "LADDER", tuple(one for one in rows.LADDER if "compile_units" not in one.wrapper))
        yield patch


def _run(folder: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Runs the benchmark; returns its status, what it printed, and its report."""
    printed = io.StringIO()
    with _interpreted(), contextlib.redirect_stdout(printed):
        steps = () if "--against" in arguments else ("--steps", "1")
        status = load("gpt_throughput").main([*arguments, *steps, "--results", f"{folder}/results"])
    (path,) = Path(folder, "results").iterdir()
    return status, printed.getvalue(), json.loads(path.read_text())


ROWS = ("plain", "loss in parts", "full recomputation", "bare", "fully_shard", "zero3", "fsdp2")


def test_the_small_preset_writes_its_trace_page_and_rows(tmp_path):
    arguments = ("--ladder", *ROWS, "--profile", f"{tmp_path}/profile")
    ((status, printed, report),) = run_distributed(_run, 1, str(tmp_path), *arguments)
    rows = report["rows"]
    assert status == 0 and report["finished"] is True and [row["name"] for row in rows] == list(ROWS)
    assert rows[2]["techniques"] == ["plain", "loss in parts", "full recomputation"]
    assert [row["wrapper"] for row in rows] == ["ddp"] * 3 + ["bare", "fully_shard", "zero3", "fsdp2"]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["percent_of_matmul"] > 0 and row["peak_gib"] > 0
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=0.01)
        assert sum(row["profile"].values()) == pytest.approx(1.0)
        folder = tmp_path / "profile" / row["name"].replace(" ", "-")
        assert {path.name for path in folder.iterdir()} == {"trace.json.gz", "step.svg"}
        with gzip.open(folder / "trace.json.gz") as trace:
            assert json.load(trace)["traceEvents"]
        page = (folder / "step.svg").read_text()
        assert all(part in page for part in ("optimizer", "compute", "exposed communication", "host gaps"))
        assert row["profile"]["optimizer"] > 0, row["name"]
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"].keys() > {"driver", "nccl", "cudnn", "commit"}
    assert datetime.datetime.fromisoformat(report["date"]).utcoffset() == datetime.timedelta(0)
    assert report["preset"]["name"] == "small" and rows[0]["steps"] == 1 and report["device"] == "CPU"
    assert report["command"][:2] == ["--ladder", "plain"]
    assert report["datasheet_tflops"] is None and rows[0]["mfu_percent"] is None and "% MFU" not in printed
    for rates in (report["matmul_tflops"], report["copy_gb_per_second"]):
        assert rates.keys() == {"before", "after"} and min(rates.values()) > 0
    assert rows[0]["percent_of_matmul"] == pytest.approx(100 * rows[0]["tflops"] / report["matmul_tflops"]["before"])


def test_bytes_of_the_update_are_compared_with_the_copy(tmp_path):
    ((_, printed, report),) = run_distributed(_run, 1, str(tmp_path), "--ladder", "bare")
    (row,) = report["rows"]
    update = row["update"]
    assert update["bytes_per_parameter"] == pytest.approx(52, abs=0.1)
    assert sum(update["by_operator"].values()) == pytest.approx(1e9 * update["gigabytes"])
    seconds = update["gigabytes"] / report["copy_gb_per_second"]["before"]
    assert update["milliseconds_at_copy_rate"] == pytest.approx(1e3 * seconds)
    assert "\n    update: 52.0 bytes a parameter, " in printed


def test_rows_count_their_own_sequences_and_micro_batches(tmp_path):
    arguments = ("--micro-batches", "3", "--samples", "2", "--ladder", "unfused attention", "plain")
    ((_, printed, report),) = run_distributed(_run, 1, str(tmp_path), *arguments)
    unfused, plain = report["rows"]  # in the order given
    assert (unfused["name"], plain["name"]) == ("unfused attention", "plain")
    llama, small = load("_llama"), load("_llama").PRESETS["small"]
    assert "small: 0.1 M parameters in matrices, 3 x 2 x 64 tokens a step\n" in printed
    assert "unfused attention, samples 1: " in printed
    for row, samples in ((unfused, 1), (plain, 2)):
        assert (row["samples"], row["micro_batches"], row["tokens"]) == (samples, 3, 3 * samples * small.sequence)
        assert row["flops"] == 3 * llama.model_flops(replace(small, samples=samples))
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["tflops"] == pytest.approx(row["flops"] / row["seconds"] / 1e12)
    assert (report["preset"]["samples"], report["preset"]["micro_batches"]) == (2, 3)


@on_ranks(1)
def test_mfu_is_printed_next_to_the_matrix_product(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(load("_throughput_report").DATASHEET_TFLOPS, "CPU", 0.5)
        _, printed, report = _run(tmp_path, "--ladder", "plain")
    (row,) = report["rows"]
    assert row["mfu_percent"] == pytest.approx(100 * row["tflops"] / 0.5) and report["datasheet_tflops"] == 0.5
    assert "MFU is in percent of 0.5 TFLOP/s, of the datasheet\n" in printed
    (line,) = [line for line in printed.splitlines() if " ddp: plain: " in line]
    assert f"{row['mfu_percent']:.1f} % MFU, {row['percent_of_matmul']:.1f} % of the matrix product, " in line


def test_lines_of_rows_begin_with_the_seconds_since_the_start(tmp_path):
    ((_, printed, _),) = run_distributed(_run, 1, str(tmp_path), "--ladder", "plain", "fused attention")
    stamps = [line.split("]")[0] for line in printed.splitlines() if line.startswith("[")]
    seconds = [int(stamp.removeprefix("[").removesuffix(" s")) for stamp in stamps]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    lines = printed.splitlines()
    rates = next(number for number, line in enumerate(lines) if line.startswith("bf16 matrix product"))
    assert lines[rates].endswith(", before the first row") and " ddp: plain: " in lines[rates + 1]
    assert " ddp: plain + loss in parts" not in printed and "attention_backend is 'fused'" in printed


ERRORS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory"),
    "configuration": ParallelConfigError("this device cannot"),
    "anything": RuntimeError("a kernel failed"),
}


def _run_with_a_failure(folder: str, name: str, error: str) -> tuple[int, str, dict[str, Any]]:
    throughput = load("gpt_throughput")
    measure = throughput.measure

    def failing(row: Any, *arguments: Any) -> Any:
        if row.name == name:
            raise ERRORS[error]
        return measure(row, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure", failing)
        return _run(folder, "--ladder", "plain", "unfused attention", "bare")


@pytest.mark.parametrize(
    ("name", "error", "status", "reason"),
    [
        ("unfused attention", "memory", 0, "out of memory"),
        ("plain", "memory", 1, "out of memory"),
        ("plain", "configuration", 0, "this device cannot"),
        ("unfused attention", "anything", 1, "RuntimeError: a kernel failed"),
    ],
)
def test_only_rows_that_should_run_make_a_run_fail(name, error, status, reason, tmp_path):
    ((ended, printed, report),) = run_distributed(_run_with_a_failure, 1, str(tmp_path), name, error)
    assert ended == status and report["not_measured"] == {name: reason} and f": {reason}\n" in printed
    others = [other for other in ("plain", "unfused attention", "bare") if other != name]
    assert [row["name"] for row in report["rows"]] == others and report["finished"] is True


@on_ranks(1)
def test_a_row_keeps_its_time_where_its_bytes_cannot_be_counted(tmp_path):

    def failing(*arguments: Any) -> Any:
        raise RuntimeError("torch has no such graph")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load("_throughput_measure").Update, "of", failing)
        status, printed, report = _run(tmp_path, "--ladder", "plain", "bare", "--profile", f"{tmp_path}/profile")
    assert status == 1 and report["finished"] is True
    assert [(row["name"], row["update"]) for row in report["rows"]] == [("plain", None), ("bare", None)]
    assert all(row["seconds"] > 0 and row["profile"] for row in report["rows"])
    assert report["not_measured"]["update of plain"] == "RuntimeError: torch has no such graph"
    assert " ddp: plain: " in printed and printed.count("    profiled: ") == 2


@on_ranks(1)
def test_the_report_is_written_after_every_row(tmp_path):
    throughput, found = load("gpt_throughput"), []
    measure = throughput.measure

    def noting(*arguments: Any) -> Any:
        (path,) = Path(tmp_path, "results").iterdir()
        report = json.loads(path.read_text())
        found.append((report["finished"], len(report["rows"])))
        return measure(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "measure", noting)
        _run(tmp_path, "--ladder", "plain", "bare", "loss in parts")
    assert found == [(False, 0), (False, 1), (False, 2)]


KILLED = """
import sys, time
import gpt_throughput as benchmark

measure = benchmark.measure
def sleeping(row, *arguments):
    if row.name == "bare":
        time.sleep(600)
    return measure(row, *arguments)
benchmark.measure = sleeping
sys.exit(benchmark.main(sys.argv[1:]))
"""


def test_a_run_that_is_terminated_leaves_its_rows(tmp_path):
    arguments = ("--preset", "small", "--steps", "1", "--ladder", "plain", "bare", "--results", f"{tmp_path}/results")
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS), "SHARDSTACK_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONUNBUFFERED", None)  # its output is a pipe, which Python then buffers in blocks
    running = subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments], env=environment, stdout=subprocess.PIPE, text=True
    )
    limit = threading.Timer(LIMIT_S, running.kill)
    limit.start()
    try:
        assert running.stdout is not None
        lines = []
        while not any(line.startswith("    update: ") for line in lines):
            lines.append(running.stdout.readline())
            assert lines[-1], "it printed only this: " + "".join(lines)
        running.send_signal(signal.SIGTERM)
        assert running.wait() == -signal.SIGTERM
    finally:
        limit.cancel()
        running.kill()
        running.communicate()
    (path,) = (tmp_path / "results").glob("*.json")  # the signal may have left half of a new one, under its own name
    report = json.loads(path.read_text())
    assert [row["name"] for row in report["rows"]] == ["plain"] and report["finished"] is False


@pytest.mark.parametrize(
    ("baseline", "slowdown", "status", "limit", "holds"),
    [
        ("fully_shard", 1.009, 0, 1.01, True),
        ("fully_shard", 1.02, 1, 1.01, False),
        ("bare", 1.5, 0, None, None),  # torch's FSDP2 copies what a bare model does not
    ],
)
@on_ranks(1)
def test_fsdp2_may_take_a_hundredth_longer_than_torchs(baseline, slowdown, status, limit, holds, tmp_path):
    throughput = load("gpt_throughput")

    def timed(candidates: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        for run in candidates.values():
            run()
        return {"fsdp2": [slowdown] * rounds, baseline: [1.0] * rounds}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "interleaved_seconds", timed)
        ended, printed, report = _run(tmp_path, "--wrapper", "fsdp2", "--against", baseline, "--micro-batches", "2")
    (ratio,) = report["ratios"]
    assert ended == status and ratio["holds"] is holds and ratio["limit"] == limit and report["finished"] is True
    assert ratio["ratio"] == slowdown and len(ratio["seconds"][baseline]) == 15
    assert ratio["candidate"].startswith("fsdp2:") and ratio["baseline"].startswith(f"{baseline}:")
    assert f"time, fsdp2 / {baseline}: {slowdown:.3f} x" in printed
