"""Where documents begin is data of a compiled layer: one graph serves every layout."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from core import parallel_state
from core.base.device import current_device
from core.distributed import finalize_model_grads, wrap_model
from core.transformer import dot_product_attention, own_chunks
from core.transformer.sequences import PackedDocuments
from tests.unit._gpt import FFN, HIDDEN, build_gpt, ddp_config, micro_batches
from tests.unit._on_gpu import needs_gpu, one_rank_on_a_gpu
from tests.unit._quick import quick
from tests.unit._rounding import assert_same_sums
from tests.unit._spawn import on_ranks
from tests.unit.distributed._toys import gradients
from tests.unit.distributed.model._graphs import counted_graphs
from tests.unit.transformer._flash import flash_attention_by_hand

LENGTH = 12
LAYOUTS = (((4, 8), (12,)), ((2, 3, 7), (6, 6)), ((1,) * 12, (11, 1)), ((12,), (12,)), ((5, 7), (1, 2, 3, 6)))
"""Lengths of the documents in each row: different numbers and lengths, one alone, and of one token each."""

SEES = "decoder.layers.0.self_attention.linear_qkv.weight"
"""A parameter whose gradient the layout changes."""


def _document_starts(layout: Sequence[Sequence[int]]) -> torch.Tensor:
    """Returns where the document of each token begins, `[b, s]`."""
    rows = [[begin for begin, n in zip(accumulate((0, *row)), row, strict=False) for _ in range(n)] for row in layout]
    return torch.tensor(rows)


def _gradients(wrapper: str, ranks: int, fields: dict[str, Any], dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    """Returns gradients of a step with each layout; `ranks` share a sequence."""
    here = current_device()
    module = build_gpt(True, context_parallel_size=ranks).to(here, dtype)
    group = dist.group.WORLD if ranks == 1 else None
    model = wrap_model(module, module.config, ddp_config(wrapper, **fields), process_group=group)
    replica = dist.get_rank() if ranks == 1 else 0
    tokens, labels = (own_chunks(tensor.to(here)) for tensor in micro_batches(0, replica, length=LENGTH)[0])
    found = []
    for layout in LAYOUTS:
        model.zero_grad_buffer()
        starts = own_chunks(_document_starts(layout))
        documents = PackedDocuments(starts, parallel_state.get_context_parallel_rank(), ranks)
        model(tokens, labels=labels, documents=documents).mean().backward()
        finalize_model_grads([model])
        found.append(gradients(model))
    return found


def _graphs(
    wrapper: str, way: str, compiler: str = "aot_eager", dtype: torch.dtype = torch.float32
) -> tuple[int, dict[str, int]]:
    ranks = 2 if way == "context parallel" else 1
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    recomputed = {"activation_checkpointing": way.partition(" ")[0]} if way.endswith("recomputed") else {}
    with pytest.MonkeyPatch.context() as patch:
        if way == "mask":  # as with dropout on the CPU
            patch.setattr(dot_product_attention, "has_kernel", lambda *unused: False)
        elif way == "kernel of CUDA":
            patch.setattr(dot_product_attention, "has_flash_kernel", lambda query: True)
            flash_attention_by_hand(patch)
        expected = _gradients(wrapper, ranks, {}, dtype)
        with counted_graphs(compiler) as graphs:
            found = _gradients(wrapper, ranks, {"compile_units": True, **recomputed}, dtype)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums over the tokens, over the width of a layer, and of norms, in another order.
        assert_same_sums(ours, theirs, additions=2 * LENGTH + HIDDEN + FFN)
    assert not any(torch.equal(found[0][SEES], other[SEES]) for other in found[1:])
    return len(graphs), dict(counters["graph_break"])


WAYS = ("kernel", "kernel of CUDA", "mask", "context parallel", "selective recomputed", "full recomputed")


@pytest.mark.parametrize(
    ("wrapper", "way"),
    quick(
        product(("ddp", "fsdp2", "zero3"), WAYS), lambda case: case in (("ddp", "kernel"), ("ddp", "context parallel"))
    ),
)
@on_ranks(2)
def test_all_layouts_share_one_graph(wrapper: str, way: str) -> None:
    assert _graphs(wrapper, way) == (1, {})


@pytest.mark.long
@pytest.mark.parametrize("way", ["kernel", "kernel of CUDA"])
@on_ranks(2)
def test_torchs_compiler_takes_them_too(way: str) -> None:
    assert _graphs("fsdp2", way, "inductor") == (1, {})


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # in fp32 there is no kernel for all documents
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_gpus_kernels_share_one_graph(wrapper: str, dtype: torch.dtype, compiler: str) -> None:
    with one_rank_on_a_gpu():
        assert _graphs(wrapper, "the GPU's own kernel", compiler, dtype) == (1, {})
