"""Simulated steps compared with real ones on gloo ranks, with formulas, and with steps that repeat nothing."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.base.device import CPU_STANDS_FOR_GPU, MEMORY_BYTES
from core.base.errors import ConfigError
from core.base.host_memory import AS_HOST_MEMORY
from core.comm.lane import LANES
from core.pipeline_parallel.stages import STAGE
from core.planner import simulation
from core.planner.estimates import estimate, model_flops
from core.planner.hardware import find_hardware
from core.planner.phantom import phantoms
from core.planner.recorder import HOST, Recorder, Transfer, Work
from core.training.config.arguments import parse_arguments
from tests.unit._benchmark_modules import load
from tests.unit._ranks import fake_world
from tests.unit._spawn import run_distributed
from tests.unit.planner._lines import LLAMA, TINY, simulated

LINEAR = "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear"
LARGE = 32 * (2 * 64) * (128 * 2**10) * 2
"""Memory of which logits of 2^7 tokens and 2^17 columns in bf16 are 1/32."""
EXPERTS = "--num-experts 4 --moe-router-topk 2"
REAL = (
    "",
    f"{LLAMA} --bf16 --data-parallel-sharding-strategy optim_grads_params --global-batch-size 16",
    "--use-torch-fsdp2 --activation-checkpointing full --cpu-offload",
    f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel",
    f"{LLAMA} {EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "--use-torch-fsdp2 --pipeline-model-parallel-size 2 --global-batch-size 12",
)


def _real_steps(lines: list[list[str]]) -> list[tuple[int, int]]:
    steps: list[tuple[int, int]] = load("_planned_step").real_steps(lines)
    return steps


def test_peak_and_sent_bytes_are_those_of_a_real_step():
    real = run_distributed(_real_steps, 2, [f"{TINY} {flags}".split() for flags in REAL])
    for index, flags in enumerate(REAL):
        for rank in range(2 if "pipeline" in flags else 1):
            planned = simulated(flags, pipeline_rank=rank)
            peak, sent = real[planned.rank][index]
            # gloo holds the gradient `[s, b, h]` that a stage sent for longer than the stage waits
            unseen = 64 * 2 * 64 * 4 if "pipeline" in flags else 0
            assert planned.peak.nbytes / peak <= 1.03 and (planned.peak.nbytes + unseen) / peak >= 0.99, flags
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


def test_a_fused_loss_has_larger_parts_on_a_gpu():
    flags = f"{LINEAR} --vocab-size {128 * 2**10}"
    on_gpu, on_cpu = (simulated(flags, on_gpu=on_gpu, memory=LARGE) for on_gpu in (True, False))
    products = [[e.flops for _, e in s.events if isinstance(e, Work) and e.name == "mm"] for s in (on_gpu, on_cpu)]
    assert max(products[0]) == 2 * max(products[1])  # 2^21 elements, and 2^20
    assert on_gpu.hardware_flops == on_cpu.hardware_flops


def test_logits_are_kept_where_the_planned_gpu_has_room():
    flags = f"{LINEAR} --vocab-size {128 * 2**10} --global-batch-size 12 --bf16"
    kept, in_parts = (simulated(flags, on_gpu=True, memory=memory) for memory in (LARGE, LARGE - 1))
    product = 2 * (2 * 64) * 64 * (128 * 2**10)  # of tokens, width and columns
    assert in_parts.hardware_flops - kept.hardware_flops == 3 * product  # of each micro-batch of a rank
    # Of one micro-batch at a time: logits, and as much for their gradient or less for a chunk in fp32.
    assert kept.peak.nbytes - in_parts.peak.nbytes > LARGE // 32
    assert kept.peak.held[simulation.CATEGORIES.index("logits and loss")] <= 4 * LARGE // 32
    hardware = replace(find_hardware("h100"), memory_bytes=LARGE - 1)
    planned = estimate("", parse_arguments(f"{TINY} {flags}".split()), 2, hardware)
    assert planned.peak_bytes == in_parts.peak.nbytes


def test_a_frozen_layer_is_of_its_stage_alone():
    def peaks(flags: str) -> list[int]:
        stages = f"--pipeline-model-parallel-size 2 --global-batch-size 8 {flags}"
        return [simulated(stages, pipeline_rank=rank).peak.nbytes for rank in (0, 1)]

    (first, last), (frozen, other) = peaks(""), peaks("--freeze decoder.layers.0.*")
    assert frozen < first and other == last


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
    assert 2 * simulated(flags).hardware_flops == model_flops(config, 2) + again


def test_ranks_share_the_operations_of_a_model():
    flags = f"{LLAMA} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    whole = simulated(LLAMA, 1).hardware_flops
    # Pieces of attention on the diagonal are half as long, so that less of a context-parallel rank's is exact.
    assert 4 * simulated(flags, 4).hardware_flops == pytest.approx(whole, rel=0.1)


def test_categories_are_those_of_the_plan():
    planned = simulated("--data-parallel-sharding-strategy optim", 4)
    held = dict(zip(simulation.CATEGORIES, planned.peak.held, strict=True))
    (plan,) = planned.plans
    assert held["parameters"] == sum(unit.kept_bytes for unit in plan.units)
    assert held["gradients"] == sum(unit.gradient_bytes for unit in plan.units)
    trained = sum(param.numel for param in plan.trained_params.values())
    assert 2 * trained <= held["optimizer state"] <= 2.1 * trained  # two fp32 moments of a quarter


def test_sharded_parameters_are_never_built_whole():
    planned = simulated("--use-torch-fsdp2 --num-layers 12", 8)
    assert planned.construction_peak < planned.num_parameters * 4 / 4


def test_a_plan_leaves_nothing_behind():
    def places() -> list[Any]:
        seams = (LANES, CPU_STANDS_FOR_GPU, MEMORY_BYTES, AS_HOST_MEMORY, STAGE)
        return [sys.excepthook, torch.UntypedStorage.resize_, torch.Tensor.to, *(seam.value for seam in seams)]

    before, state = places(), torch.random.get_rng_state()
    simulated("--use-torch-fsdp2 --cpu-offload --offload-activations", on_gpu=True)
    assert places() == before
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not dist.is_initialized()


def _fill_free_memory(value: float) -> None:
    """Leaves a value in the memory that the next tensors get."""
    for log in range(12, 22):
        blocks = [torch.full((2**log // 4,), value) for _ in range(2**23 // 2**log)]
        del blocks


def test_plans_in_one_process_do_not_depend_on_each_other():
    lines, plans = ("--optimizer muon", "--data-parallel-sharding-strategy optim"), []
    for order, value in ((lines, 0.0), (lines[::-1], float("nan"))):
        planned = {}
        for flags in order:
            _fill_free_memory(value)
            planned[flags] = simulated(flags)
        plans.append([(planned[flags].peak, planned[flags].wire(), len(planned[flags].events)) for flags in lines])
    assert plans[0] == plans[1]


def test_what_is_not_simulated_is_named():
    with pytest.raises(ConfigError, match="optimizer is 'muon'"):
        simulated("--use-torch-fsdp2 --optimizer muon")


def test_experts_have_equally_many_tokens():
    flags = f"{LLAMA} {EXPERTS} --moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    config = parse_arguments(f"{TINY} {flags}".split())
    model, planned = config.model, simulated(flags)
    attention = model.num_layers * 2 * (64 * 65 // 2) * model.hidden_size  # as in the test above
    assert 2 * planned.hardware_flops == model_flops(config, 2) + 4 * attention
    tokens = 2 * 64 * model.moe_router_topk
    rows = [event for _, event in planned.events if isinstance(event, Transfer) and event.kind == "all-to-all"]
    # Both ways, forward and backward, of each layer.
    sizes = [event.nbytes for event in rows if event.nbytes > 1000]
    assert sizes == [tokens * model.hidden_size * 4] * 4 * model.num_layers


def test_micro_batches_under_way_are_those_of_a_long_step():
    flags = "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
    short, long = (simulated(f"{flags} --global-batch-size {size}") for size in (12, 24))
    assert short.hardware_flops * 2 == long.hardware_flops
    passes = {(stage, forward, number) for stage in range(4) for forward in (True, False) for number in range(12)}
    assert {each for of_rank in long.schedule.values() for each in of_rank} == passes
    # Six micro-batches more: each sends three times, `[s, b, h]` in fp32, and receives three times, into memory that
    # torch before 2.15 keeps.
    kept = 3 if find_spec("torch.distributed.pipelining._recv_buffers") is None else 0
    assert long.peak.nbytes - short.peak.nbytes == 6 * (3 + kept) * 64 * 2 * 64 * 4


def test_offloaded_activations_are_no_memory_of_an_accelerator():
    flags = f"{LLAMA} --num-layers 8"
    kept, offloaded = (simulated(f"{flags}{more}", on_gpu=True) for more in ("", " --offload-activations"))
    held = [planned.peak.held[simulation.CATEGORIES.index("activations")] for planned in (kept, offloaded)]
    assert held[1] < 0.5 * held[0]
    copies = [e.nbytes for _, e in offloaded.events if isinstance(e, Transfer) and e.ranks == HOST]
    assert held[0] - held[1] <= sum(copies) // 2 <= held[0]
    assert offloaded.wire() == kept.wire()


@pytest.mark.parametrize("wrapper", ["--use-torch-fsdp2", "--data-parallel-sharding-strategy optim_grads_params"])
def test_offloaded_shards_are_no_memory_of_an_accelerator(wrapper: str):
    flags = f"{wrapper} --bf16 --num-layers 4 --global-batch-size 8"
    kept, offloaded = (simulated(f"{flags}{more}", on_gpu=True) for more in ("", " --cpu-offload"))
    held = dict(zip(simulation.CATEGORIES, kept.peak.held, strict=True))
    on_host = held["parameters"] + held["optimizer state"]
    assert kept.peak.nbytes - offloaded.peak.nbytes == pytest.approx(on_host, rel=0.002)  # a vector is gone
    assert offloaded.wire() == kept.wire()
    copies = [e for _, e in offloaded.events if isinstance(e, Transfer) and e.ranks == HOST]
    to_host, from_host = (sum(e.nbytes for e in copies if e.kind == f"{way} the host") for way in ("to", "from"))
    # Gradients once, in fp32. Units that backward gathers again are read twice, the root once.
    assert held["parameters"] <= to_host <= 1.01 * held["parameters"]
    assert held["parameters"] < from_host < 3 * held["parameters"]


def test_a_process_group_is_refused():
    with fake_world(0, 2), pytest.raises(ConfigError, match="another process"):
        simulated("")
