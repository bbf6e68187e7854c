"""Pipeline stages train a GPT to the weights that one process reaches, under every wrapper and schedule.

One process adds in the same order where a rank of a stage has all of its replicas' micro-batches and no weight is on
two stages: there all numbers are equal to the last bit. Elsewhere fp32 sums differ in their last bits: losses agree to
1e-6, and weights, which are of the order of 1, to 1e-5 after the steps of this training.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.functional._pipelines import Case, serial, train_on_stages
from tests.unit._spawn import run_distributed

WRAPPERS = ("ddp", "ddp, overlapped", "zero1, overlapped", "zero2", "zero2, every micro-batch", "zero3", "fsdp2")
EXPERTS = (
    *(("num_moe_experts", 4), ("moe_layer_freq", (0, 1, 0, 1))),
    *(("moe_aux_loss_coeff", 0.02), ("moe_z_loss_coeff", 0.01)),
)
"""Losses that balance experts are computed on both stages, and weigh what the last one alone knows."""

COUNTED = (
    *(("num_moe_experts", 4), ("moe_router_load_balancing_type", "global_aux_loss")),
    *(("moe_aux_loss_coeff", 0.5), ("moe_z_loss_coeff", 0.01)),
)
"""A loss that reads the counts of the step's micro-batches: all stages count them in the order of one process."""

RECOMPUTED = (("recompute_granularity", "full"), ("recompute_method", "block"), ("recompute_num_layers", 2))

# The sample of compositions has two stages under every wrapper, by 1F1B and ZBV, over data, tensor and context ranks.
SHORT = [
    Case("zero2", micro_batches=3, per_token=True),
    Case("zero3", micro_batches=4, tied=True),
    Case("fsdp2", vpp=2, tied=True, per_token=True),
    Case("zero1, overlapped", vpp=2, micro_batches=8),
    Case("ddp, overlapped", schedule="GPipe", tied=True, per_token=True, micro_batches=2),
    Case("fsdp2", freeze=("embedding.*", "decoder.layers.[01].*")),  # all of the first stage
    Case("zero1, overlapped", vpp=2, schedule="ZBVZeroBubble", fields=EXPERTS),
    Case("ddp, overlapped", dp=2, fields=EXPERTS, per_token=True),
    Case("fsdp2", first=1, lora=2, packed=True, fields=RECOMPUTED),
    Case("zero1, overlapped", muon=True),
    Case("zero2", muon=True, freeze=("embedding.*", "decoder.layers.[01].*")),
    Case("ddp, overlapped", muon=True, freeze=("decoder.layers.[01].*",)),  # the first stage has no matrix
    Case("zero2", fields=COUNTED),
    Case("zero3", vpp=2, fields=COUNTED + RECOMPUTED),
    Case("fsdp2", vpp=2, schedule="ZBVZeroBubble", fields=(*COUNTED, ("recompute_granularity", "selective"))),
    Case("zero2", schedule="GPipe", tied=True, fields=(*COUNTED, ("moe_router_dtype", "fp64"))),
]
LAYOUTS = ({}, {"vpp": 2}, {"pp": 4}, {"tp": 2}, {"dp": 2})
LONG = [
    *(
        Case(wrapper, **layout, tied=tied, per_token=per_token, micro_batches=1 + (3 * number) % 8)
        for number, (wrapper, layout, tied, per_token) in enumerate(
            itertools.product((*WRAPPERS, "hybrid fsdp2"), LAYOUTS, (False, True), (False, True))
        )
        if wrapper != "hybrid fsdp2" or "dp" in layout
    )
]
LONG += [
    Case("zero3", vpp=2, schedule="ZBVZeroBubble", micro_batches=6),
    Case("ddp, overlapped", vpp=2, schedule="ZBVZeroBubble", dp=2, per_token=True),
    Case("zero2", vpp=2, schedule="ZBVZeroBubble", tp=2, fields=RECOMPUTED),
    Case("zero3", vpp=2, muon=True),
    Case("fsdp2", muon=True),
]
LONG = [  # torch's interleaved stages take no 5 or 7 micro-batches over two ranks
    replace(case, micro_batches=8) if case.vpp is not None and case.micro_batches in (5, 7) else case for case in LONG
]


@pytest.mark.parametrize(
    "case",
    [
        Case("fsdp2", precision="bf16"),
        Case("zero2", vpp=2, precision="fp16", fields=EXPERTS),
        pytest.param(Case("zero3", precision="fp16"), marks=pytest.mark.long),
        pytest.param(Case("ddp", precision="bf16", vpp=2), marks=pytest.mark.long),
        *(pytest.param(Case(name, dp=2, muon=True), marks=pytest.mark.long) for name in ("zero2", "zero3", "fsdp2")),
    ],
    ids=str,
)
def test_stages_equal_one_stage_with_the_same_replicas(case: Case):
    """Hidden states travel in the compute dtype, stages skip the same steps, and replicas add in the same order."""
    alone = replace(case, pp=1, vpp=None, schedule=None)
    expected, found = (run_distributed(train_on_stages, which.ranks, which)[0] for which in (alone, case))
    assert (None in expected.grad_norms[:-1]) == (case.precision == "fp16") and expected.grad_norms[-1] is not None
    assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
    assert [name for name in found.weights if not torch.equal(found.weights[name], expected.weights[name])] == []


@pytest.mark.parametrize("case", [*SHORT, *(pytest.param(case, marks=pytest.mark.long) for case in LONG)], ids=str)
def test_pipeline_stages_equal_one_process(case: Case):
    expected, found = serial(case), run_distributed(train_on_stages, case.ranks, case)[0]
    assert expected.losses[-1] < expected.losses[0]
    assert min(expected.grad_norms) > 0.0
    assert found.weights.keys() == expected.weights.keys()
    if case.is_bitwise:
        assert (found.losses, found.grad_norms) == (expected.losses, expected.grad_norms)
        assert [name for name in found.weights if not torch.equal(found.weights[name], expected.weights[name])] == []
        return
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    for name, weight in found.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-5, msg=name)
