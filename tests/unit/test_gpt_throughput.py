"""The throughput benchmark: its formula compared with torch's count of operations, its split of a step, its output."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit._spawn import on_ranks, run_distributed

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _load(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


def _counted(samples: int, model_fields: dict[str, Any], is_tied: bool) -> tuple[int, int, int]:
    """Counts operations of a step as torch counts them, those of the formula, and one product of the head."""
    llama = _load("_llama")
    preset = llama.Preset(2, 64, 4, 2, 160, vocabulary=512, is_tied=is_tied, sequence=24, samples=samples)
    training = llama.Training(preset, model_fields, {})
    # With torch's plain attention: the counter sees the products of a fused kernel's backward twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        training.step()
    assert training.loss() == pytest.approx(6.24, abs=0.1)  # ln 512: the model has learned nothing yet
    head = 2 * samples * preset.sequence * preset.vocabulary * preset.hidden
    return counter.get_total_flops(), llama.model_flops(preset, causal=False), head


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_formula_is_torchs_count_of_products(is_tied):
    ((counted, formula, _),) = run_distributed(_counted, 1, 3, {}, is_tied)
    assert counted == formula


def test_a_loss_in_parts_costs_one_product_of_the_head_more():
    fields = {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "linear",
        "cross_entropy_fusion_vocab_chunk_size": 100,
    }
    ((counted, formula, head),) = run_distributed(_counted, 1, 3, fields, True)
    assert counted == formula + head


def test_attention_counts_pairs_of_tokens_that_see_each_other():
    llama = _load("_llama")
    preset = llama.PRESETS["small"]
    whole, causal = (llama.model_flops(preset, causal=one) for one in (False, True))
    seen = int(torch.ones(preset.sequence, preset.sequence).tril().sum())
    hidden = preset.sequence**2 - seen
    assert whole - causal == 12 * preset.layers * preset.hidden * preset.samples * hidden


def test_presets_have_the_sizes_that_their_names_say():
    llama = _load("_llama")
    billions = {name: llama.matrix_parameters(preset) / 1e9 for name, preset in llama.PRESETS.items()}
    assert 1.2 < billions["1b"] < 1.3 and 3.1 < billions["3b"] < 3.3 and 3.5 < billions["4b"] < 4.5


def test_every_moment_of_a_step_is_in_one_part():
    picture = _load("_step_picture")
    work = [
        picture.Work("gemm", 10, 30),
        picture.Work("inside", 12, 18),
        picture.Work("ncclAllReduce", 25, 50),  # hidden until 30
        picture.Work("adam", 60, 80),
        picture.Work("gemm", 85, 95),
        picture.Work("before", -20, -5),
    ]
    times = picture.split(work, (0, 100), [(55, 90)])
    assert times.intervals == {
        "optimizer": [(60, 80), (85, 90)],
        "compute": [(10, 30), (90, 95)],
        "exposed communication": [(30, 50)],
        "host gaps": [(0, 10), (50, 60), (80, 85), (95, 100)],
    }
    assert sum(times.shares().values()) == pytest.approx(1.0)
    assert dict(times.largest) == {"ncclAllReduce": 25, "gemm": 24, "adam": 20, "inside": 6}


class _Event:
    """An event of the profiler, as torch 2.13 has it; torch 2.11 does not say its kind."""

    def __init__(self, name: str, start: int, end: int, kind: str = "kernel", says_kind: bool = True) -> None:
        self._name, self._start, self._end, self._kind = name, start, end, kind
        if says_kind:
            self.activity_type = lambda: kind

    def name(self) -> str:
        return self._name

    def start_ns(self) -> int:
        return self._start

    def duration_ns(self) -> int:
        return self._end - self._start

    def is_user_annotation(self) -> bool:
        return self._kind.endswith("user_annotation")

    def device_type(self) -> torch.autograd.DeviceType:
        types = torch.autograd.DeviceType
        return types.CUDA if self._kind in ("kernel", "gpu_user_annotation") else types.CPU


@pytest.mark.parametrize("name", ["mine", "FSDP::all_gather (layers.0)", "nccl:all_reduce", "Optimizer.step#AdamW"])
@pytest.mark.parametrize("says_kind", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_a_range_that_is_marked_on_a_gpu_is_no_work(name, says_kind):
    picture = _load("_step_picture")
    events = [
        _Event("step", 0, 100, "user_annotation"),
        _Event("update", 70, 80, "user_annotation"),
        _Event("aten::mm", 0, 90, "cpu_op"),
        _Event("step", 5, 95, "gpu_user_annotation", says_kind),
        _Event("update", 75, 95, "gpu_user_annotation", says_kind),
        _Event(name, 8, 92, "gpu_user_annotation", says_kind),
        _Event("gemm", 10, 30),
        _Event("ncclDevKernel_AllReduce", 40, 50),
        _Event("adam", 80, 90),
    ]
    times = picture.from_profile(_profile_of(events), "step", "update")
    assert times.intervals == {
        "optimizer": [(80, 90)],
        "compute": [(10, 30)],
        "exposed communication": [(40, 50)],
        "host gaps": [(0, 10), (30, 40), (50, 80), (90, 100)],
    }


def test_a_collective_of_gloo_is_a_range_and_work():
    picture = _load("_step_picture")
    events = [
        _Event("step", 0, 100, "user_annotation"),
        _Event("update", 70, 80, "user_annotation"),
        _Event("aten::mm", 10, 30, "cpu_op"),
        _Event("FSDP::all_gather", 0, 60, "user_annotation"),
        _Event("gloo:all_reduce", 40, 50, "user_annotation"),
    ]
    times = picture.from_profile(_profile_of(events), "step", "update")
    assert times.intervals["compute"] == [(10, 30)] and times.intervals["exposed communication"] == [(40, 50)]


def _profile_of(events: list[_Event]) -> Any:
    return SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))


def _losses(wrapper: str, model_fields: dict[str, Any]) -> list[float]:
    llama = _load("_llama")
    training = llama.Training(llama.PRESETS["small"], model_fields, {}, wrapper)
    losses = []
    for _ in range(5):
        training.step()
        losses.append(training.loss())
    return losses


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_every_wrapper_trains_as_torch_alone_does(is_bf16):
    llama = _load("_llama")
    (bare,) = run_distributed(_losses, 1, "bare", {"bf16": is_bf16})
    assert bare[0] - bare[-1] > 0.03  # more than the tolerances below: a wrapper that does not update fails
    for wrapper in llama.WRAPPERS:
        (losses,) = run_distributed(_losses, 1, wrapper, {"bf16": is_bf16})
        assert losses == pytest.approx(bare, rel=2**-9 if is_bf16 else 1e-6), wrapper


@on_ranks(1)
def test_a_model_without_wrapper_refuses_what_wrappers_do() -> None:
    llama = _load("_llama")
    with pytest.raises(ValueError, match="activation_checkpointing cannot be had without a wrapper"):
        llama.Training(llama.PRESETS["small"], {}, {"activation_checkpointing": "full"}, "bare")


def test_only_the_parts_of_the_datasheet_have_its_peak():
    report = _load("_throughput_report")
    peaks = {name: report.datasheet_tflops(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}
    assert peaks == dict.fromkeys(peaks, 989.0)
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "CPU"):
        assert report.datasheet_tflops(other) is None


def test_the_ladder_has_rows_for_wrappers_and_attention_kernels():
    throughput_rows = _load("_throughput_rows")
    rows = {row.name: row for row in throughput_rows.rows_of("ddp", True)}
    assert {"plain", "loss in parts", "bare", "zero3", "fsdp2", "flash attention"} < rows.keys()
    usual = [one.name for one in throughput_rows.rows_of("ddp", False)[0].techniques]
    assert [one.name for one in rows["fsdp2"].techniques] == usual == ["compiled layers", "loss in parts"]
    assert rows["flash attention"].techniques[-1].model == {"attention_backend": "flash"}
    # What only a wrapper has is no row without one.
    assert "full recomputation" not in {row.name for row in throughput_rows.rows_of("bare", True)}


def _run(folder: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Runs the benchmark without a C++ compiler, in seconds; returns its status and its report."""
    rows, results = _load("_throughput_rows"), Path(folder) / "results"
    results.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        interpreted = tuple(one for one in rows.LADDER if "compile_units" not in one.wrapper)
        patch.setattr(rows, "LADDER", interpreted)
        patch.setattr(_load("_throughput_report"), "RESULTS", results)
        status = _load("gpt_throughput").main([*arguments, "--steps", "1", "--save"])
    (report,) = results.iterdir()
    return status, json.loads(report.read_text())


ROWS = ("plain", "loss in parts", "full recomputation", "bare", "zero3", "fsdp2")


def test_the_small_preset_writes_its_trace_page_and_rows(tmp_path):
    arguments = ("--ladder", *ROWS, "--profile", f"{tmp_path}/profile")
    ((status, report),) = run_distributed(_run, 1, str(tmp_path), *arguments)
    rows = report["rows"]
    assert status == 0 and [row["name"] for row in rows] == list(ROWS)
    assert rows[2]["techniques"] == ["plain", "loss in parts", "full recomputation"]
    assert [row["wrapper"] for row in rows] == ["ddp"] * 3 + ["bare", "zero3", "fsdp2"]
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
    throughput = _load("gpt_throughput")

    def timed(candidates: dict[str, Any], rounds: int) -> dict[str, list[float]]:
        for run in candidates.values():
            run()
        return {"fsdp2": [slowdown] * rounds, "bare": [1.0] * rounds}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throughput, "interleaved_seconds", timed)
        return _run(folder, "--wrapper", "fsdp2", "--against", "bare")


@pytest.mark.parametrize(("slowdown", "status"), [(1.009, 0), (1.02, 1)])
def test_fsdp2_may_take_a_hundredth_longer_than_no_wrapper(slowdown, status, tmp_path):
    ((found, report),) = run_distributed(_compare, 1, str(tmp_path), slowdown)
    (ratio,) = report["ratios"]
    assert found == status and ratio["holds"] == (status == 0)
    assert ratio["ratio"] == slowdown and ratio["limit"] == 1.01 and len(ratio["seconds"]["bare"]) == 15
    assert ratio["candidate"].startswith("fsdp2:") and ratio["baseline"].startswith("bare:")
