"""Experts cut over ranks, under every wrapper: the numbers of one process, and bit by bit those of replicas."""

from __future__ import annotations

from typing import Any

import pytest

from core import parallel_state
from core.dist_checkpointing.flat_range import whole, whole_view
from core.distributed import wrap_model
from core.transformer.context_parallel import own_chunks
from tests.functional._equality import Tolerance, assert_bitwise, assert_close
from tests.functional._runs import (
    Curve,
    Training,
    ddp_config,
    loss_and_report,
    micro_batches,
    train_wrapped,
)
from tests.functional.test_experts import BALANCING, gpt_with_experts, serial
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed

_SGD = {"optimizer": "sgd", "lr": 0.05, "sgd_momentum": 0.9, "weight_decay": 0.01, "clip_grad": 1.0}
_EVEN = {"vocab": 64, "num_attention_heads": 4, "num_query_groups": 2, "num_moe_experts": 4, "ffn_hidden_size": 16}
LENGTH, STEPS = 12, 6
Layout = tuple[int, int, int, int]
"""Sizes of data, expert, tensor and context parallelism."""
LAYOUTS: list[Layout] = [(2, 2, 1, 1), (4, 2, 1, 1), (4, 4, 1, 1), (2, 2, 2, 1), (1, 1, 1, 2), (2, 2, 1, 2)]
WRAPPERS = ["ddp", "zero1, overlapped", "zero2", "zero2, every micro-batch", "zero3", "fsdp2"]


def _training(per_token: bool) -> Training:
    return Training(_SGD, steps=STEPS, tied=False, per_token=per_token)


def _sizes(layout: Layout) -> dict[str, int]:
    _, ep, tp, cp = layout
    return {
        "expert_model_parallel_size": ep,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
    }


def _fields(balancing: str, dispatcher: str = "alltoall") -> dict[str, Any]:
    # Bounds of capacity are those of a rank's tokens, which context-parallel ranks do not share.
    return {**_EVEN, "moe_token_dispatcher_type": dispatcher, "moe_expert_capacity_factor": None}


def _trained(
    layout: Layout, wrapper: str, balancing: str, per_token: bool, sizes: dict[str, Any], fields: dict[str, Any]
) -> Curve:
    """Trains on this rank's part of the data; returns the whole model's numbers."""
    parallel_state.initialize_model_parallel(**_sizes(layout), **sizes)
    degrees = {**_sizes(layout), **{n: s for n, s in sizes.items() if n == "expert_tensor_parallel_size"}}
    module = gpt_with_experts(balancing, per_token, **_fields(balancing), **degrees, **fields)
    model, training = wrap_model(module, module.config, ddp_config(wrapper)), _training(per_token)
    replica = parallel_state.get_data_parallel_rank()

    def batches(step: int) -> list[Any]:
        of_replica = micro_batches(step, replica, per_token, LENGTH)
        return [(own_chunks(tokens), own_chunks(labels)) for tokens, labels in of_replica]

    curve, _ = train_wrapped(
        model,
        training,
        batches,
        lambda batch: loss_and_report(model(batch[0], labels=batch[1]), batch[1], training),
        model.process_group,
    )
    curve.masters = {name: whole(whole_view(p)).clone() for name, p in module.named_parameters()}
    biases = {name: value.clone() for name, value in module.named_buffers() if name.endswith("expert_bias")}
    curve.masters.update(biases)
    return curve


_curves: dict[Any, Any] = {}


def _once(key: Any, run: Any) -> Any:
    if key not in _curves:
        _curves[key] = run()
    return _curves[key]


def _runs(
    layout: Layout, wrapper: str, balancing: str, per_token: bool, sizes: Any = None, **fields: Any
) -> list[Curve]:
    dp, _, tp, cp = layout
    world = dp * tp * cp
    key = (layout, wrapper, balancing, per_token, str(sizes), str(fields))
    return _once(
        key, lambda: run_distributed(_trained, world, layout, wrapper, balancing, per_token, sizes or {}, fields)
    )


def _serial(replicas: int, balancing: str, per_token: bool) -> Curve:
    key = ("serial", replicas, balancing, per_token)
    fields = _fields(balancing)
    return _once(key, lambda: serial(balancing, per_token, replicas, LENGTH, **fields))


_CASES = [(layout, b, t) for layout in LAYOUTS for b in BALANCING for t in (False, True)]


def _is_quick(case: Any) -> bool:
    return case in (
        ((2, 2, 1, 1), "aux", True),
        ((2, 2, 1, 1), "bias", False),
        ((2, 2, 2, 1), "aux", False),
        ((2, 2, 1, 2), "bias", True),
    )


@pytest.mark.parametrize(("layout", "balancing", "per_token"), quick(_CASES, _is_quick))
def test_replicas_equal_one_process(layout, balancing, per_token):
    expected = _serial(layout[0], balancing, per_token)
    for curve in _runs(layout, "ddp", balancing, per_token):
        assert_close(curve, expected, Tolerance(losses=1e-5, grad_norms=1e-4, gradients=1e-4, masters=1e-5))


_WRAPPED = [(layout, w, b, t) for layout in LAYOUTS for w in WRAPPERS[1:] for b in BALANCING for t in (False, True)]


def _is_quick_wrapped(case: Any) -> bool:
    layout, _, balancing, per_token = case
    return (layout, balancing, per_token) == ((2, 2, 1, 1), "aux", True) or case in (
        ((4, 2, 1, 1), "zero3", "aux", True),
        ((2, 2, 2, 1), "fsdp2", "aux", False),
        ((2, 2, 2, 1), "zero1, overlapped", "aux", False),
        ((2, 2, 1, 1), "zero3", "bias", False),
        ((2, 2, 1, 1), "fsdp2", "bias", False),
    )


@pytest.mark.parametrize(("layout", "wrapper", "balancing", "per_token"), quick(_WRAPPED, _is_quick_wrapped))
def test_every_wrapper_equals_replicas(layout, wrapper, balancing, per_token):
    expected = _runs(layout, "ddp", balancing, per_token)[0]
    adds_alike = "every micro-batch" not in wrapper
    for curve in _runs(layout, wrapper, balancing, per_token):
        if adds_alike:
            assert_bitwise(curve, expected)
        else:
            assert_close(curve, expected, Tolerance(losses=1e-5, grad_norms=1e-4, gradients=1e-4, masters=1e-5))
