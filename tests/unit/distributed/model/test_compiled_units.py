"""A compiled layer is one graph under every wrapper, which all layers share; a memory budget decides what it saves."""

from __future__ import annotations

import re
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

from core.base import _torch_compat
from core.base.device import current_device
from core.base.errors import ParallelConfigError
from core.distributed import finalize_model_grads, wrap_model
from core.distributed.model import unit_transforms
from tests.functional._runs import FFN, HIDDEN, SEQUENCE, build_gpt, ddp_config, micro_batches
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._quick import quick
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import gradients, synced_last
from tests.unit.distributed.model._graphs import counted_graphs

LAYERS = 10
"""More than the 8 compilations of one function after which torch gives up and runs it uncompiled."""

WRAPPERS = ("ddp", "zero1, overlapped", "zero2, overlapped", "zero3", "fsdp2")


def _train(wrapper: str, tied: bool, fields: dict[str, Any], dtype: torch.dtype) -> None:
    here = current_device()
    module = build_gpt(tied, num_layers=LAYERS).to(here, dtype)
    model = wrap_model(module, module.config, ddp_config(wrapper, **fields), process_group=dist.group.WORLD)
    model.train()
    for step in range(2):
        model.zero_grad_buffer()
        for tokens, labels in synced_last(model, micro_batches(step, dist.get_rank())[:2]):
            model(tokens.to(here), labels=labels.to(here)).mean().backward()
        finalize_model_grads([model])


def _graphs(
    wrapper: str, tied: bool, fields: dict[str, Any], compiler: str = "aot_eager", dtype: torch.dtype = torch.float32
) -> tuple[list[int], dict[str, int], dict[str, int]]:
    with counted_graphs(compiler) as found:
        _train(wrapper, tied, {"compile_units": True, **fields}, dtype)
    return found, dict(counters["graph_break"]), dict(counters["frames"])


def _assert_one_graph(*options: Any) -> None:
    graphs, breaks, frames = _graphs(*options)
    assert not breaks
    assert len(graphs) == 1, (graphs, frames)
    assert frames == {"total": 1, "ok": 1}


@pytest.mark.parametrize(
    ("wrapper", "tied", "recomputes"),
    quick(
        product(WRAPPERS, (True, False), ("none", "selective", "full")),
        lambda case: case in (("zero3", True, "none"), ("fsdp2", True, "selective")),
    ),
)
@on_ranks(2)
def test_all_layers_share_one_graph_without_breaks(wrapper: str, tied: bool, recomputes: str) -> None:
    _assert_one_graph(wrapper, tied, {"activation_checkpointing": recomputes})


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("compiler", "recomputes"), [("aot_eager", "none"), ("inductor", "none"), ("inductor", "full")]
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_on_a_gpu_all_layers_share_one_graph_too(wrapper: str, compiler: str, recomputes: str) -> None:
    with one_rank_on_a_gpu():
        _assert_one_graph(wrapper, True, {"activation_checkpointing": recomputes}, compiler, torch.bfloat16)


def _bytes_and_gradients(wrapper: str, budget: float | None) -> tuple[int, dict[str, torch.Tensor]]:
    """Returns the bytes that forward keeps for backward next to parameters, and the gradients; compiles if given a
    budget.

    The partitioner chooses what is kept; what it keeps is computed by torch's own kernels, to save the time of C++.
    """
    torch._dynamo.reset()
    module = build_gpt(True, num_layers=2)
    fields = {} if budget is None else {"compile_units": True, "activation_memory_budget": budget}
    model = wrap_model(module, module.config, ddp_config(wrapper, **fields), process_group=dist.group.WORLD)
    assert model.plan.recomputes == (budget is not None and budget < 1.0)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens, labels = micro_batches(0, dist.get_rank())[0]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, labels=labels).mean()
    loss.backward()
    finalize_model_grads([model])
    return sum(kept.values()), gradients(model)


@pytest.mark.parametrize("wrapper", quick(WRAPPERS, lambda wrapper: wrapper == "fsdp2"))
@on_ranks(2)
def test_a_smaller_budget_saves_less_and_changes_no_number(wrapper: str) -> None:
    _, expected = _bytes_and_gradients(wrapper, None)
    sizes = []
    with mock.patch.object(unit_transforms, "COMPILER", "aot_eager_decomp_partition"):
        for budget in (1.0, 0.5, 0.2, 0.0):
            size, found = _bytes_and_gradients(wrapper, budget)
            # Sums over 26 tokens, over the width of a layer, and of norms, in another order.
            assert_same_sums(found, expected, additions=2 * SEQUENCE + HIDDEN + FFN)
            sizes.append(size)
    assert functorch_config.activation_memory_budget == 1.0  # of the process
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.long
@on_ranks(1)
def test_torchs_compiler_keeps_to_the_budget() -> None:
    (most, expected), (least, found) = (_bytes_and_gradients("ddp", budget) for budget in (1.0, 0.3))
    assert_same_sums(found, expected, additions=2 * SEQUENCE + HIDDEN + FFN)
    assert least < 0.6 * most


@pytest.mark.parametrize("dropout", quick(["hidden_dropout", "attention_dropout"], {"attention_dropout"}.__contains__))
@on_ranks(1)
def test_a_unit_with_dropout_is_refused(dropout: str) -> None:
    module = build_gpt(True, **{dropout: 0.1})
    fields = {"compile_units": True, "activation_memory_budget": 0.5}
    model = wrap_model(module, module.config, ddp_config("ddp", **fields), process_group=dist.group.WORLD)
    tokens, labels = micro_batches(0, 0)[0]
    said = "^activation_memory_budget is below 1 and a unit draws random numbers"
    with pytest.raises(ParallelConfigError, match=said):
        model(tokens, labels=labels)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation_memory_budget": 0.5}, "is 0.5 without compile_units"),
        ({"activation_memory_budget": 1.5, "compile_units": True}, "is 1.5; it takes a number from 0 to 1"),
        ({"activation_memory_budget": -0.1, "compile_units": True}, "is -0.1; it takes"),
        ({"activation_memory_budget": float("nan"), "compile_units": True}, "is nan; it takes"),
        ({"activation_memory_budget": True, "compile_units": True}, "is True; it takes"),
        ({"activation_memory_budget": "half", "compile_units": True}, "is 'half'; it takes"),
        (
            {"activation_memory_budget": 0.5, "compile_units": True, "activation_checkpointing": "full"},
            "is 0.5 and activation_checkpointing is 'full'; each decides",
        ),
    ],
)
@pytest.mark.parametrize("wrapper", ["ddp", "zero3", "fsdp2"])
def test_a_budget_that_cannot_be_kept_is_refused(wrapper: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelConfigError, match=f"activation_memory_budget {re.escape(message)}"):
        ddp_config(wrapper, **fields)


def test_a_missing_compiler_is_one_line_with_what_to_do() -> None:
    from torch._inductor import exc

    assert _torch_compat._REMEDIES.keys() <= vars(exc).keys()

    errors = [
        (exc.InvalidCxxCompiler(), "No working C.*CXX"),
        (exc.TritonMissing(None), "Cannot find.*; install triton"),
    ]
    for (error, said), budget in product(errors, (None, 1.0)):

        def compile_nothing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], error: Exception = error) -> None:
            raise error

        with mock.patch.object(unit_transforms, "COMPILER", compile_nothing):
            torch._dynamo.reset()
            forward = unit_transforms.compile_forward(torch.nn.Linear(2, 2), budget)
            with (
                mock.patch.object(torch._dynamo, "lookup_backend", lambda backend: backend),
                pytest.raises(ParallelConfigError, match=r"(?s)^compile_units cannot compile here \(" + said),
            ):
                forward(torch.ones(1, 2))
