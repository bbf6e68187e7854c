"""Runs of the throughput benchmark: their rows, and the comparison of two wrappers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit._benchmark_modules import load
from tests.unit._spawn import run_distributed


def _run(folder: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Runs the benchmark without a C++ compiler, in seconds; returns its status and its report."""
    rows, results = load("_throughput_rows"), Path(folder) / "results"
    results.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        interpreted = tuple(one for one in rows.LADDER if "compile_units" not in one.wrapper)
        patch.setattr(rows, "LADDER", interpreted)
        patch.setattr(load("_throughput_report"), "RESULTS", results)
        status = load("gpt_throughput").main([*arguments, "--steps", "1", "--save"])
    (report,) = results.iterdir()
    return status, json.loads(report.read_text())


ROWS = ("plain", "loss in parts", "full recomputation", "bare", "fully_shard", "zero3", "fsdp2")


def test_the_small_preset_writes_its_trace_page_and_rows(tmp_path):
    arguments = ("--ladder", *ROWS, "--profile", f"{tmp_path}/profile")
    ((status, report),) = run_distributed(_run, 1, str(tmp_path), *arguments)
    rows = report["rows"]
    assert status == 0 and [row["name"] for row in rows] == list(ROWS)
    assert rows[2]["techniques"] == ["plain", "loss in parts", "full recomputation"]
    assert [row["wrapper"] for row in rows] == ["ddp"] * 3 + ["bare", "fully_shard", "zero3", "fsdp2"]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["percent_of_matmul"] > 0 and row["peak_gib"] > 0
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=0.01)
        assert sum(row["profile"].values()) == pytest.approx(1.0)
        folder = tmp_path / "profile" / row["name"].replace(" ", "-")
        assert json.loads((folder / "trace.json").read_text())["traceEvents"]
        page = (folder / "step.svg").read_text()
        assert all(part in page for part in ("optimizer", "compute", "exposed communication", "host gaps"))
        assert row["profile"]["optimizer"] > 0, row["name"]
    assert report["versions"]["torch"] == torch.__version__ and report["versions"].keys() > {"driver", "nccl", "cudnn"}
    assert report["preset"]["name"] == "small" and rows[0]["steps"] == 1
    assert report["datasheet_tflops"] is None and rows[0]["percent_of_datasheet"] is None
    before, after = report["matmul_tflops"]["before"], report["matmul_tflops"]["after"]
    assert before > 0 and after > 0
    assert rows[0]["percent_of_matmul"] == pytest.approx(100 * rows[0]["tflops"] / before)


def _compare(folder: str, slowdown: float) -> tuple[int, dict[str, Any]]:
    throughput = load("gpt_throughput")

    def timed(candidates: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        for run in candidates.values():
            run()
        return {"fsdp2": [slowdown] * rounds, "fully_shard": [1.0] * rounds}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "interleaved_seconds", timed)
        return _run(folder, "--wrapper", "fsdp2", "--against", "fully_shard")


@pytest.mark.parametrize(("slowdown", "status"), [(1.009, 0), (1.02, 1)])
def test_fsdp2_may_take_a_hundredth_longer_than_torchs(slowdown, status, tmp_path):
    ((found, report),) = run_distributed(_compare, 1, str(tmp_path), slowdown)
    (ratio,) = report["ratios"]
    assert found == status and ratio["holds"] == (status == 0)
    assert ratio["ratio"] == slowdown and ratio["limit"] == 1.01 and len(ratio["seconds"]["fully_shard"]) == 15
    assert ratio["candidate"].startswith("fsdp2:") and ratio["baseline"].startswith("fully_shard:")
