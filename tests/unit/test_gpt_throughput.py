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

from tests.unit._spawn import run_distributed

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


def _runs(folder: str) -> None:
    throughput = _load("gpt_throughput")
    with pytest.MonkeyPatch.context() as patch:
        interpreted = tuple(one for one in throughput.LADDER if "compile_units" not in one.wrapper)
        patch.setattr(throughput, "LADDER", interpreted)  # without a C++ compiler, in seconds
        patch.setattr(throughput, "__file__", f"{folder}/gpt_throughput.py")
        status = throughput.main(["--steps", "1", "--ladder", "--save", "--profile", f"{folder}/profile"])
    assert status == 0


def test_the_small_preset_writes_its_trace_page_and_rows(tmp_path):
    (tmp_path / "results").mkdir()
    run_distributed(_runs, 1, str(tmp_path))
    (report,) = (tmp_path / "results").iterdir()
    rows = json.loads(report.read_text())["rows"]
    assert rows[0]["techniques"] == ["plain"] and rows[-1]["techniques"] == [
        "plain",
        "loss in parts",
        "full recomputation",
    ]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["percent_of_matmul"] > 0 and row["peak_gib"] > 0
        assert row["loss"] == pytest.approx(rows[0]["loss"], abs=0.01)
    assert json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    page = (tmp_path / "profile" / "step.svg").read_text()
    assert all(part in page for part in ("optimizer", "compute", "exposed communication", "host gaps", "aten::mm"))
