"""Pipeline stages train a GPT to the weights that one process reaches, under every wrapper and schedule.

One process adds in the same order where a rank of a stage has all of its replicas' micro-batches and no weight is on
two stages: there all numbers are equal to the last bit. Elsewhere fp32 sums differ in their last bits: losses agree to
1e-6, and weights, which are of the order of 1, to 1e-5 after the steps of this training.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.functional._equality import Tolerance, assert_bitwise, assert_close, curves_of, serial
from tests.functional._pipelines import over_stages

WRAPPERS = ("ddp", "ddp, overlapped", "zero1, overlapped", "zero2", "zero2, every micro-batch", "zero3", "fsdp2")
EXPERTS = {"num_moe_experts": 4, "moe_layer_freq": (0, 1, 0, 1), "moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.01}
"""Losses that balance experts are computed on both stages, and weigh what the last one alone knows."""

COUNTED = {
    "num_moe_experts": 4,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.5,
    "moe_z_loss_coeff": 0.01,
}
"""A loss that reads the counts of the step's micro-batches: all stages count them in the order of one process."""

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
FIRST_STAGE = ("embedding.*", "decoder.layers.[01].*")

# The sample of compositions has two stages under every wrapper, by 1F1B and ZBV, over data, tensor and context ranks.
SHORT: list[tuple[str, dict[str, Any]]] = [
    ("zero2", {"micro_batches": 3, "per_token": True}),
    ("zero3", {"tied": True}),
    ("fsdp2", {"vpp": 2, "tied": True, "per_token": True}),
    ("zero1, overlapped", {"vpp": 2, "micro_batches": 8}),
    ("ddp, overlapped", {"schedule": "GPipe", "tied": True, "per_token": True, "micro_batches": 2}),
    ("fsdp2", {"freeze": FIRST_STAGE}),
    ("zero1, overlapped", {"vpp": 2, "schedule": "ZBVZeroBubble", "fields": EXPERTS}),
    ("ddp, overlapped", {"dp": 2, "fields": EXPERTS, "per_token": True}),
    ("fsdp2", {"first": 1, "lora": 2, "has_documents": True, "fields": RECOMPUTED}),
    ("zero1, overlapped", {"muon": True}),
    ("zero2", {"muon": True, "freeze": FIRST_STAGE}),
    ("ddp, overlapped", {"muon": True, "freeze": FIRST_STAGE[1:]}),  # the first stage has no matrix
    ("zero2", {"fields": COUNTED}),
    ("zero3", {"vpp": 2, "fields": COUNTED | RECOMPUTED}),
    ("fsdp2", {"vpp": 2, "schedule": "ZBVZeroBubble", "fields": {**COUNTED, "recompute_granularity": "selective"}}),
    ("zero2", {"schedule": "GPipe", "tied": True, "fields": {**COUNTED, "moe_router_dtype": "fp64"}}),
]
LAYOUTS = ({}, {"vpp": 2}, {"pp": 4}, {"tp": 2}, {"dp": 2})
LONG = [
    (wrapper, {**layout, "tied": tied, "per_token": per_token, "micro_batches": 1 + (3 * number) % 8})
    for number, (wrapper, layout, tied, per_token) in enumerate(
        itertools.product((*WRAPPERS, "hybrid fsdp2"), LAYOUTS, (False, True), (False, True))
    )
    if wrapper != "hybrid fsdp2" or "dp" in layout
]
LONG += [
    ("zero3", {"vpp": 2, "schedule": "ZBVZeroBubble", "micro_batches": 6}),
    ("ddp, overlapped", {"vpp": 2, "schedule": "ZBVZeroBubble", "dp": 2, "per_token": True}),
    ("zero2", {"vpp": 2, "schedule": "ZBVZeroBubble", "tp": 2, "fields": RECOMPUTED}),
    ("zero3", {"vpp": 2, "muon": True}),
    ("fsdp2", {"muon": True}),
]
LONG = [  # torch's interleaved stages take no 5 or 7 micro-batches over two ranks
    (wrapper, case | {"micro_batches": 8} if "vpp" in case and case.get("micro_batches") in (5, 7) else case)
    for wrapper, case in LONG
]
LIKE_REPLICAS = [
    ("fsdp2", {"precision": "bf16"}),
    ("zero2", {"vpp": 2, "precision": "fp16", "fields": EXPERTS}),
    ("zero3", {"precision": "fp16"}),
    ("ddp", {"precision": "bf16", "vpp": 2}),
    *((name, {"dp": 2, "muon": True}) for name in ("zero2", "zero3", "fsdp2")),
]
CLOSE = Tolerance(losses=1e-6, grad_norms=1e-5, gradients=1e-5, masters=1e-5)


def _params(cases: list[tuple[str, dict[str, Any]]], is_long: bool) -> list[Any]:
    marks = [pytest.mark.long] if is_long else []
    names = [
        "-".join([wrapper, *(n if v is True or n == "fields" else f"{n} {v}" for n, v in case.items())])
        for wrapper, case in cases
    ]
    return [pytest.param(*case, id=name, marks=marks) for case, name in zip(cases, names, strict=True)]


@pytest.mark.parametrize(("wrapper", "case"), [*_params(LIKE_REPLICAS[:2], False), *_params(LIKE_REPLICAS[2:], True)])
def test_stages_equal_one_stage_with_the_same_replicas(wrapper: str, case: dict[str, Any]):
    """Hidden states travel in the compute dtype, stages skip the same steps, and replicas add in the same order."""
    replicas = case.get("dp", 1)
    training = over_stages(**{name: value for name, value in case.items() if name != "dp"})
    groups = training.groups | {"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": None}
    alone = replace(training, groups=groups, cut={})
    expected, found = curves_of(wrapper, alone, replicas)[0], curves_of(wrapper, training, 2 * replicas)[0]
    is_scaled = case.get("precision") == "fp16"
    assert bool(expected.skipped) == is_scaled and training.steps - 1 not in expected.skipped
    assert_bitwise(found, expected)


@pytest.mark.parametrize(("wrapper", "case"), [*_params(SHORT, False), *_params(LONG, True)])
def test_pipeline_stages_equal_one_process(wrapper: str, case: dict[str, Any]):
    replicas = case.get("dp", 1)
    training = over_stages(**{name: value for name, value in case.items() if name != "dp"})
    is_model_cut, world = case.get("tp", 1) > 1, case.get("pp", 2) * case.get("tp", 1) * replicas
    expected, found = serial(training, replicas), curves_of(wrapper, training, world)[0]
    assert expected.losses[-1] < expected.losses[0]
    assert min(expected.grad_norms) > 0.0
    # One process adds a tied weight's two gradients per micro-batch; other ranks of a stage add after micro-batches.
    if training.tied or is_model_cut or replicas > 1:
        assert_close(found, expected, CLOSE)
        for name, value in expected.masters.items():
            torch.testing.assert_close(found.masters[name], value, rtol=0, atol=1e-5, msg=name)
    else:
        assert_bitwise(found, expected)
