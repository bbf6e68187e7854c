"""Simulated steps compared with real ones on gloo ranks, with formulas, and with steps that repeat nothing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.errors import ConfigError
from core.planner import formula, simulation
from core.planner.phantom import Recorder, phantoms
from core.training.config.arguments import parse_arguments
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed
from tests.unit.planner._lines import LLAMA, TINY, simulated

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
REAL = (
    "",
    f"{LLAMA} --bf16 --data-parallel-sharding-strategy optim_grads_params --global-batch-size 16",
    "--use-torch-fsdp2 --activation-checkpointing full",
    f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel",
)


def _load(name: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


def _real_steps(lines: list[list[str]]) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = _load("_planned_step").real_steps(lines)
    return steps


def test_peak_and_sent_bytes_are_those_of_a_real_step():
    real = run_distributed(_real_steps, 2, [f"{TINY} {flags}".split() for flags in REAL])[0]
    for flags, (peak, sent) in zip(REAL, real, strict=True):
        planned = simulated(flags)
        assert 0.99 <= planned.peak.nbytes / peak <= 1.03, flags
        assert sum(planned.wire().values()) == sent, flags


def test_repeated_micro_batches_count(monkeypatch: pytest.MonkeyPatch):
    flags = "--use-torch-fsdp2 --global-batch-size 20"
    short = simulated(flags)
    monkeypatch.setattr(simulation, "MOST_SIMULATED", 100)
    whole = simulated(flags)
    assert (short.hardware_flops, short.wire(), short.peak) == (whole.hardware_flops, whole.wire(), whole.peak)


def test_gradients_of_embeddings_are_dense_on_a_gpu_alone():
    flags = "--untie-embeddings-and-output-weights --global-batch-size 8 --vocab-size 40000"
    on_gpu, on_cpu = (simulated(flags, on_gpu=on_gpu).peak.nbytes for on_gpu in (True, False))
    assert on_gpu > on_cpu


def test_memory_may_be_larger_than_the_machine():
    recorder = Recorder()
    with phantoms(recorder):
        large = torch.zeros(2**30, 2**12)
        assert (large + 1).shape == large.shape
    assert recorder.changes[0][1] == 2**44


def test_operations_are_those_of_the_formula():
    flags = f"{LLAMA} --global-batch-size 8"
    config = parse_arguments(f"{TINY} {flags}".split())
    model, length = config.model, config.data.seq_length
    # A fused backward of attention computes the scores again: one product for each pair of tokens.
    again = 8 * model.num_layers * 2 * (length * (length + 1) // 2) * model.hidden_size
    assert 2 * simulated(flags).hardware_flops == formula.model_flops(config, 2) + again


def test_ranks_share_the_operations_of_a_model():
    flags = f"{LLAMA} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    whole = simulated(LLAMA, 1).hardware_flops
    # Pieces of attention on the diagonal are half as long, so that less of a context-parallel rank's is exact.
    assert 4 * simulated(flags, 4).hardware_flops == pytest.approx(whole, rel=0.1)


def test_categories_are_those_of_the_plan():
    planned = simulated("--data-parallel-sharding-strategy optim", 4)
    held = dict(zip(simulation.CATEGORIES, planned.peak.held, strict=True))
    assert held["parameters"] == sum(unit.kept_bytes for unit in planned.plan.units)
    assert held["gradients"] == sum(unit.gradient_bytes for unit in planned.plan.units)
    trained = sum(param.numel for param in planned.plan.trained.values())
    assert 2 * trained <= held["optimizer state"] <= 2.1 * trained  # two fp32 moments of a quarter


def test_sharded_parameters_are_never_built_whole():
    planned = simulated("--use-torch-fsdp2 --num-layers 12", 8)
    assert planned.construction_peak < planned.num_parameters * 4 / 4


def test_a_plan_leaves_nothing_behind():
    hook, state = sys.excepthook, torch.random.get_rng_state()
    simulated("--use-torch-fsdp2")
    assert sys.excepthook is hook
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--num-experts 4", "num_experts"),
        ("--use-torch-fsdp2 --cpu-offload", "cpu_offload"),
        ("--offload-activations", "offload_activations"),
        ("--pipeline-model-parallel-size 2", "pipeline_model_parallel_size"),
    ],
)
def test_what_is_not_simulated_is_named(flags: str, said: str):
    with pytest.raises(ConfigError, match=said):
        simulated(flags)


def test_a_process_group_is_refused():
    with fake_world(0, 2), pytest.raises(ConfigError, match="another process"):
        simulated("")
