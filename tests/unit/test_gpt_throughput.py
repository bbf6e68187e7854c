"""The throughput benchmark: its formula compared with torch's count of operations, its wrappers, its split of a step.

Its runs are in `test_gpt_throughput_runs.py`, its report in `test_gpt_throughput_report.py`, the bytes of an update in
`test_update_bytes.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.unit._benchmark_modules import load
from tests.unit._spawn import on_ranks, run_distributed
from tests.unit._whole import whole_weights

BATCHES = {"one micro-batch": {"samples": 6}, "three micro-batches": {"samples": 2, "micro_batches": 3}}
"""Of the same sequences."""


def _counted(batch: dict[str, int], model_fields: dict[str, Any], is_tied: bool) -> tuple[int, int, int]:
    """Counts operations of a step as torch counts them, those of the formula, and one product of the head."""
    llama = load("_llama")
    preset = llama.Preset(2, 64, 4, 2, 160, vocabulary=512, is_tied=is_tied, sequence=24, **batch)
    training = load("_llama_training").Training(preset, model_fields, {})
    # With torch's plain attention: the counter sees the products of a fused kernel's backward twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        training.step()
    assert training.loss() == pytest.approx(6.24, abs=0.1)  # ln 512: the model has learned nothing yet
    head = 2 * preset.tokens * preset.vocabulary * preset.hidden
    return counter.get_total_flops(), llama.model_flops(preset, causal=False), head


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
def test_the_formula_is_torchs_count_of_products(is_tied, batch):
    ((counted, formula, _),) = run_distributed(_counted, 1, BATCHES[batch], {}, is_tied)
    assert counted == formula


def test_a_loss_in_parts_costs_one_product_of_the_head_more():
    fields = {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "linear",
        "cross_entropy_fusion_vocab_chunk_size": 100,
    }
    ((counted, formula, head),) = run_distributed(_counted, 1, {"samples": 3}, fields, True)
    assert counted == formula + head


def test_attention_counts_pairs_of_tokens_that_see_each_other():
    llama = load("_llama")
    preset = replace(llama.PRESETS["small"], micro_batches=5)
    whole, causal = (llama.model_flops(preset, causal=one) for one in (False, True))
    seen = int(torch.ones(preset.sequence, preset.sequence).tril().sum())
    hidden = preset.sequence**2 - seen
    assert whole - causal == 12 * preset.layers * preset.hidden * 5 * preset.samples * hidden


def test_presets_have_the_sizes_that_their_names_say():
    llama = load("_llama")
    billions = {name: llama.matrix_parameters(preset) / 1e9 for name, preset in llama.PRESETS.items()}
    assert 1.2 < billions["1b"] < 1.3 and 3.1 < billions["3b"] < 3.3 and 3.5 < billions["4b"] < 4.5


def test_heads_of_the_large_presets_are_not_padded():
    presets = load("_llama").PRESETS
    assert {name: preset.head_width for name, preset in presets.items()} == {
        "small": 16,
        "1b": 64,
        "3b": 128,
        "4b": 128,
    }
    for preset in presets.values():
        assert preset.heads * preset.head_width == preset.hidden and preset.heads % preset.groups == 0


def test_every_moment_of_a_step_is_in_one_part():
    picture = load("_step_picture")
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
    picture = load("_step_picture")
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
    picture = load("_step_picture")
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


def _trained(wrapper: str, batch: str, is_bf16: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of five steps, and the weights after them."""
    preset = replace(load("_llama").PRESETS["small"], **BATCHES[batch])
    training = load("_llama_training").Training(preset, {"bf16": is_bf16}, {}, wrapper)
    losses = []
    for _ in range(5):
        training.step()
        losses.append(training.loss())
    return losses, {name: weight.float() for name, weight in whole_weights(training.model).items()}


def _distance(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    return sum(float((some[name] - others[name]).square().sum()) for name in some) ** 0.5


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_every_wrapper_trains_as_torch_alone_does(is_bf16, batch):
    ((bare, expected),) = run_distributed(_trained, 1, "bare", "one micro-batch", is_bf16)
    assert bare[0] - bare[-1] > 0.03  # more than the tolerances below: a wrapper that does not update fails
    learning_rate, weights = load("_llama_training").LEARNING_RATE, sum(map(torch.numel, expected.values()))
    moved = 5 * learning_rate * weights**0.5  # how far AdamW moves weights, a learning rate a step
    for wrapper in load("_llama_training").WRAPPERS:
        ((losses, found),) = run_distributed(_trained, 1, wrapper, batch, is_bf16)
        assert losses == pytest.approx(bare, rel=2**-9 if is_bf16 else 1e-6), wrapper
        assert found.keys() == expected.keys()
        assert _distance(found, expected) < (0.2 if is_bf16 else 1e-3) * moved, wrapper


def test_torchs_fully_shard_computes_what_our_fsdp2_does():
    ((fsdp2, weights),) = run_distributed(_trained, 1, "fsdp2", "three micro-batches", True)
    ((losses, found),) = run_distributed(_trained, 1, "fully_shard", "three micro-batches", True)
    assert losses == pytest.approx(fsdp2, rel=1e-6)
    assert max(float((found[name] - weights[name]).abs().max()) for name in weights) < 1e-6


def _norms(batch: str) -> dict[str, float]:
    """Returns the norm of the gradient of the first step under each wrapper, in fp32."""
    llama_training = load("_llama_training")
    preset = replace(load("_llama").PRESETS["small"], **BATCHES[batch])
    norms = {}
    for wrapper in llama_training.WRAPPERS:
        training = llama_training.Training(preset, {"bf16": False}, {}, wrapper)
        if wrapper in llama_training.TORCHS:
            training.optimizer.start_step = lambda: None
        training.step()
        if wrapper in llama_training.TORCHS:
            grads = [parameter.grad for parameter in training.model.parameters()]
            whole = [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in grads]
            norms[wrapper] = float(torch.nn.utils.get_total_norm(whole))
        else:
            norms[wrapper] = training.last.result().grad_norm
    return norms


def test_the_gradient_is_that_of_the_mean_over_all_tokens():
    # Losses do not show it: AdamW's step does not depend on the scale of gradients.
    (one,), (three,) = (run_distributed(_norms, 1, batch) for batch in BATCHES)
    assert three == pytest.approx(dict.fromkeys(one, one["bare"]), rel=1e-5)
    assert one == pytest.approx(dict.fromkeys(one, one["bare"]), rel=1e-5)


@on_ranks(1)
def test_torchs_own_means_refuse_what_wrappers_do() -> None:
    small, llama_training = load("_llama").PRESETS["small"], load("_llama_training")
    for wrapper in llama_training.TORCHS:
        with pytest.raises(ValueError, match=f"activation_checkpointing cannot be had with {wrapper}; choose another"):
            llama_training.Training(small, {}, {"activation_checkpointing": "full"}, wrapper)


def test_only_the_parts_of_the_datasheet_have_its_peak():
    report = load("_throughput_report")
    peaks = {name: report.datasheet_tflops(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}
    assert peaks == dict.fromkeys(peaks, 989.0)
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "CPU"):
        assert report.datasheet_tflops(other) is None


def test_the_ladder_has_rows_for_wrappers_and_attention_kernels():
    throughput_rows = load("_throughput_rows")
    rows = {row.name: row for row in throughput_rows.rows_of("ddp", True)}
    assert {"plain", "loss in parts", "bare", "fully_shard", "zero3", "fsdp2", "flash attention"} < rows.keys()
    usual = [one.name for one in throughput_rows.rows_of("ddp", False)[0].techniques]
    assert [one.name for one in rows["fsdp2"].techniques] == usual == ["compiled layers", "loss in parts"]
    assert rows["flash attention"].techniques[-1].model == {"attention_backend": "flash"}
    # What only a wrapper has is no row without one.
    for wrapper in ("bare", "fully_shard"):
        assert "full recomputation" not in {row.name for row in throughput_rows.rows_of(wrapper, True)}


def test_unfused_attention_takes_one_sequence_and_may_not_fit():
    throughput_rows, preset = load("_throughput_rows"), load("_llama").PRESETS["1b"]
    rows = throughput_rows.rows_of("ddp", True)
    assert {row.name for row in rows if row.may_run_out_of_memory} == {"unfused attention"}
    for row in rows:
        assert row.preset(preset).samples == (1 if row.name == "unfused attention" else 4), row.name
