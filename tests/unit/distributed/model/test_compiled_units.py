"""A compiled layer is one graph under every wrapper, which all layers share."""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from core.base import _torch_compat
from core.base.device import current_device
from core.base.errors import ParallelConfigError
from core.distributed import finalize_model_grads, wrap_model
from core.distributed.model import unit_transforms
from tests.unit._gpt import build_gpt, ddp_config, micro_batches
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._quick import quick
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import synced_last
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


def test_a_missing_compiler_is_one_line_with_what_to_do() -> None:
    from torch._inductor import exc

    assert _torch_compat._REMEDIES.keys() <= vars(exc).keys()

    errors = [
        (exc.InvalidCxxCompiler(), "No working C.*CXX"),
        (exc.TritonMissing(None), "Cannot find.*; install triton"),
    ]
    for error, said in errors:

        def compile_nothing(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], error: Exception = error) -> None:
            raise error

        with mock.patch.object(unit_transforms, "COMPILER", compile_nothing):
            torch._dynamo.reset()
            forward = unit_transforms.compile_forward(torch.nn.Linear(2, 2))
            with (
                mock.patch.object(torch._dynamo, "lookup_backend", lambda backend: backend),
                pytest.raises(ParallelConfigError, match=r"(?s)^compile_units cannot compile here \(" + said),
            ):
                forward(torch.ones(1, 2))
