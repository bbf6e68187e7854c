"""No two masks of a step are equal, over all axes of ranks and micro-batches, but those of replicated activations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from core import parallel_state
from core.distributed import DistributedDataParallelConfig, wrap_model
from core.models.gpt import GPTModel
from core.pipeline_parallel import get_forward_backward_func
from core.tensor_parallel import get_rng_tracker
from core.tensor_parallel.random import MicroBatchSeeds, seed_everything
from core.transformer import TransformerConfig
from tests.unit._gpt import gpt_of
from tests.unit._quick import quick
from tests.unit._spawn import run_distributed

LENGTH, MICRO_BATCHES = 16, 2
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

Seeding = Callable[[int], None]
"""Seeds before a forward; the index is of its micro-batch in the step."""


def _once(seed: Callable[[int], object], index: int) -> None:
    if index < 0:
        seed(1234)


def _by_micro_batch(index: int) -> None:
    seed_everything(7 if index < 0 else 7 + index)


def _as_reproducible(index: int) -> None:
    """Replicas have other micro-batches."""
    if index >= 0:
        replica = parallel_state.get_data_parallel_rank()
        MicroBatchSeeds(7, 0).enter(replica * MICRO_BATCHES + index)


SEEDINGS: dict[str, Seeding] = {
    "all streams, once": partial(_once, seed_everything),
    "torch's stream alone": partial(_once, torch.manual_seed),
    "each micro-batch": _by_micro_batch,
    "as reproducible": _as_reproducible,
}


def _masks(seeding: str, sizes: dict[str, Any], fields: dict[str, Any]) -> tuple[list[Tensor], list[float]]:
    """Returns the masks of a step, in order, and what the loop itself has drawn."""
    seed, masks, drawn = SEEDINGS[seeding], list[Tensor](), list[float]()
    parallel_state.initialize_model_parallel(
        *(sizes.get(name, default) for name, default in (("tp", 1), ("pp", 2), ("vpp", None))),
        context_parallel_size=sizes.get("cp", 1),
    )
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.5,
        attention_dropout=0.0,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 2),
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        context_parallel_size=sizes.get("cp", 1),
        **fields,
    )
    seed(-1)
    chunks = []
    for turn in range(sizes.get("vpp") or 1):
        turn = None if sizes.get("vpp") is None else turn
        model = gpt_of(config, False, 32, LENGTH, positions="learned_absolute", vp_stage=turn)
        chunks.append(wrap_model(model, config, DistributedDataParallelConfig()))
    draw, length = F.dropout, LENGTH // sizes.get("cp", 1)

    def note(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y = draw(x, *args, **kwargs)
        if torch._C._current_graph_task_id() == -1:  # no recomputation
            masks.append(y.detach() == 0)
        return y

    def step(indices: Any, model: Any) -> tuple[Tensor, Any]:
        seed(next(indices))
        if seeding != "all streams, once":  # there a forward alone moves the stream
            drawn.append(torch.rand(()).item())
        tokens = torch.zeros(2, length, dtype=torch.long)
        return model(tokens, labels=tokens), lambda losses: (losses.mean(), {})

    try:
        with mock.patch.object(F, "dropout", note):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(range(MICRO_BATCHES)) for _ in chunks],
                model=chunks,
                num_microbatches=MICRO_BATCHES,
                seq_length=LENGTH,
                micro_batch_size=2,
                forward_only=sizes.get("forward_only", False),
            )
    finally:
        get_rng_tracker().reset()
    return masks, drawn


def _assert_independent(masks: list[Tensor]) -> None:
    for one, other in itertools.combinations(masks, 2):
        if one.shape == other.shape:  # of 512 elements or more: 0.5 is 9 standard deviations below 0.7
            assert (one == other).double().mean() < 0.7


@pytest.mark.parametrize("seeding", SEEDINGS)
@pytest.mark.parametrize(
    ("sizes", "fields"),
    quick(
        [
            ({}, {}),
            ({"forward_only": True}, {}),
            ({}, RECOMPUTED),
            ({"vpp": 2}, {}),
            ({"vpp": 2}, {"pipeline_parallel_schedule": "ZBVZeroBubble"}),
        ],
        lambda case: case[1] != RECOMPUTED and case != ({"vpp": 2}, {}),
    ),
    ids=str,
)
def test_stages_and_micro_batches_have_masks_of_their_own(seeding, sizes, fields):
    ranks = run_distributed(_masks, 2, seeding, sizes, fields)
    masks = [mask for own, _ in ranks for mask in own]
    assert len(masks) == MICRO_BATCHES * (4 * 2 + 1)  # two of each layer, one of the embedding
    _assert_independent(masks)
    if "vpp" not in sizes:  # what the loop draws for itself is the same on all stages
        assert ranks[0][1] == ranks[1][1]


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [({"tp": 2}, {}), ({"tp": 2}, {"sequence_parallel": True}), ({"cp": 2}, {}), ({"dp": 2}, {})],
    ids=str,
)
def test_axes_of_ranks_have_masks_of_their_own(sizes, fields):
    """Tensor-parallel ranks are next to each other, then context-parallel and data-parallel ones, then stages."""
    ranks = [own for own, _ in run_distributed(_masks, 4, "as reproducible", sizes, fields)]
    if sizes == {"tp": 2} and not fields:
        for first, second in (ranks[:2], ranks[2:]):
            assert all(map(torch.equal, first, second))
        ranks = ranks[::2]
    _assert_independent([mask for own in ranks for mask in own])


def test_a_model_that_draws_nothing_moves_no_stream():
    torch.manual_seed(1234)
    GPTModel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2),
        vocab_size=32,
        max_sequence_length=LENGTH,
    )
    expected = [torch.rand(()).item() for _ in range(MICRO_BATCHES)]
    assert run_distributed(_without_dropout, 2) == [expected, expected]


def _without_dropout() -> list[float]:
    with (
        mock.patch("core.transformer.transformer_layer.hidden_dropout", lambda x, *_, **__: x),
        mock.patch("core.models.common.embeddings.language_model_embedding.hidden_dropout", lambda x, *_, **__: x),
    ):
        return _masks("torch's stream alone", {}, {})[1]
