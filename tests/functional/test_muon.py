"""Muon of a GPT with experts, cut over ranks: the numbers of one process, and bit by bit those of replicas."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from core import parallel_state
from core.dist_checkpointing.global_view import whole_view
from core.distributed import wrap_model
from tests.functional._equality import Tolerance, assert_bitwise, assert_close
from tests.functional.test_experts import gpt_with_experts
from tests.unit._quick import quick
from tests.unit._runs import (
    Curve,
    Training,
    _finish,
    ddp_config,
    loss_and_report,
    micro_batches,
    train_serially,
    train_wrapped,
)
from tests.unit._spawn import run_distributed
from tests.unit._whole import whole

# Lion and AdamW turn rounding of a small gradient into a whole step, so that what Muon leaves is frozen here.
TRAINING = Training(
    {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.01, "clip_grad": 1.0, "muon_fp32_matmul_prec": "highest"},
    steps=3,
    tied=False,
)
FIELDS = {"vocab": 64, "num_attention_heads": 4, "num_query_groups": 2, "num_moe_experts": 4, "ffn_hidden_size": 16}
LENGTH = 12
Layout = tuple[int, int, int]
"""Sizes of data, expert and tensor parallelism."""


def _model(**degrees: Any) -> Any:
    fields = {**FIELDS, "moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": None, **degrees}
    model = gpt_with_experts("aux", False, **fields)
    for param in model.parameters():
        param.requires_grad = param.ndim > 1 and getattr(param, "use_muon", True)
    for layer in (model.embedding, model.output_layer):
        layer.requires_grad_(False)
    return model


def _trained(layout: Layout, wrapper: str) -> Curve:
    _, ep, tp = layout
    degrees = {"expert_model_parallel_size": ep, "tensor_model_parallel_size": tp}
    parallel_state.initialize_model_parallel(**degrees)
    module = _model(**degrees)
    model, replica = wrap_model(module, module.config, ddp_config(wrapper)), parallel_state.get_data_parallel_rank()
    curve, _ = train_wrapped(
        model,
        TRAINING,
        lambda step: micro_batches(step, replica, False, LENGTH),
        lambda batch: loss_and_report(model(batch[0], labels=batch[1]), batch[1], TRAINING),
        model.process_group,
    )
    curve.masters = {name: whole(whole_view(p)).clone() for name, p in module.named_parameters()}
    return curve


@functools.cache
def _runs(layout: Layout, wrapper: str) -> list[Curve]:
    dp, _, tp = layout
    return run_distributed(_trained, dp * tp, layout, wrapper)


@functools.cache
def _serial(replicas: int) -> Curve:
    module = _model()
    curve, optimizer = train_serially(
        module,
        TRAINING,
        lambda step: [micro_batches(step, rank, False, LENGTH) for rank in range(replicas)],
        lambda batch: loss_and_report(module(batch[0], labels=batch[1]), batch[1], TRAINING),
    )
    _finish(curve, module, optimizer)
    return curve


LAYOUTS: list[Layout] = [(2, 1, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize(("layout",), quick([(layout,) for layout in LAYOUTS], lambda case: case[0] in LAYOUTS[1::2]))
def test_experts_over_ranks_are_updated_as_in_one_process(layout):
    for curve in _runs(layout, "ddp"):
        assert_close(curve, _serial(layout[0]), Tolerance(1e-5, 1e-4, 1e-4, 1e-4))


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
