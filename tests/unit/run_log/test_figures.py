"""The speed of devices, the operations of a model, and the time before ranks wait for each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core import parallel_state
from core.base import device
from core.planner.hardware import PRESETS
from core.run_log.figures import Figures, device_peak_flops, model_flops_per_token
from tests.unit._gpt import build_gpt
from tests.unit._spawn import on_ranks


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("Tesla T4", None),
    ],
)
def test_the_peak_is_that_of_the_planner(monkeypatch, name, preset):
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert device_peak_flops() == (PRESETS[preset].peak_flops if preset else None)


def test_a_cpu_has_no_peak():
    assert device_peak_flops() is None


@on_ranks(2)
def test_operations_are_those_of_the_whole_model():
    fields = {"num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 36, "vocab": 64}
    parallel_state.initialize_model_parallel(1)
    whole = sum(p.numel() for p in build_gpt(False, **fields).parameters())
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2)
    model = build_gpt(False, **fields)
    assert sum(p.numel() for p in model.parameters()) < whole
    assert model_flops_per_token([model]) == 6 * whole


@on_ranks(2)
def test_the_first_forward_after_a_step_is_timed():
    model = nn.Linear(2, 2)
    figures = Figures(model, averages=True, flop_share=None)
    model(torch.ones(2))  # before the first step
    assert figures._leads == []
    figures.end_step()
    for _ in range(3):  # micro-batches
        model(torch.ones(2))
    assert len(figures._leads) == 1
    figures.add(None, 0, 1.0)
    line = figures.take({"extra": torch.tensor([2.0])}, reads=True)
    assert "loss" not in line and line["extra"] == 2.0 and line["skew"] >= 1.0
    assert figures._leads == []
