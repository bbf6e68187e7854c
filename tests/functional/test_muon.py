"""Muon of a GPT with experts, cut over ranks: the numbers of one process, and bit by bit those of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from core.models.gpt import GPTModel
from tests.functional._equality import Tolerance, assert_bitwise, assert_close, curves_of, serial
from tests.functional.test_experts import experts
from tests.unit._quick import quick
from tests.unit._runs import Curve

FIELDS = {"vocab": 64, "num_attention_heads": 4, "num_query_groups": 2, "num_moe_experts": 4, "ffn_hidden_size": 16}
OVER_RANKS = {"moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": None}
MUON = {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.01, "clip_grad": 1.0, "muon_fp32_matmul_prec": "highest"}
Layout = tuple[int, int, int]
"""Sizes of data, expert and tensor parallelism."""


def _freeze_what_muon_leaves(models: Sequence[GPTModel]) -> None:
    """Lion and AdamW turn rounding of a small gradient into a whole step."""
    (model,) = models
    for param in model.parameters():
        param.requires_grad = param.ndim > 1 and getattr(param, "use_muon", True)
    for layer in (model.embedding, model.output_layer):
        layer.requires_grad_(False)


TRAINING = replace(
    experts("aux", False, **FIELDS, **OVER_RANKS), optimizer=MUON, length=12, prepare=_freeze_what_muon_leaves
)


def _runs(layout: Layout, wrapper: str) -> list[Curve]:
    dp, ep, tp = layout
    groups = {"expert_model_parallel_size": ep, "tensor_model_parallel_size": tp}
    return curves_of(wrapper, replace(TRAINING, groups=groups), dp * tp)


LAYOUTS: list[Layout] = [(2, 1, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize(("layout",), quick([(layout,) for layout in LAYOUTS], lambda case: case[0] in LAYOUTS[1::2]))
def test_experts_over_ranks_are_updated_as_in_one_process(layout):
    for curve in _runs(layout, "ddp"):
        assert_close(curve, serial(TRAINING, layout[0]), Tolerance(1e-5, 1e-4, 1e-4, 1e-4))


WRAPPERS = ["zero1, overlapped", "zero2", "zero3", "fsdp2"]


@pytest.mark.parametrize(
    ("layout", "wrapper"),
    quick(
        [(layout, w) for layout in LAYOUTS for w in WRAPPERS],
        lambda c: c in (((2, 2, 1), "zero1, overlapped"), ((2, 2, 1), "zero3"), ((2, 2, 2), "fsdp2")),
    ),
)
def test_every_wrapper_updates_experts_as_replicas(layout, wrapper):
    for curve in _runs(layout, wrapper):
        assert_bitwise(curve, _runs(layout, "ddp")[0])
